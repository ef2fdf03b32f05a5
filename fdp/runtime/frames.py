"""Stack frames: with a bucket's name, and whether one still runs.

Tools that record the stack where a message starts show which bucket it was: torch's flight recorder keeps the stack of
each message, of all backends, and no name that a caller could give. (What `torch.distributed.record_comm` sets is shown
by the profiler, not by the recorder, in 2.13 and 2.15.)
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

_LONGEST = 300

Frame = Callable[..., Any]
"""A function that calls another one with arguments, in a frame of some name."""


def plain_frame(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; the frame has the name of this one."""
    return function(*arguments)


def named_frame(name: str) -> Frame:
    """A function that calls another one in a frame of this name.

    Args:
        name: of the frame. What is no text in UTF-8 is escaped, and the end of a long one left out.

    Example:
        >>> import sys
        >>> named_frame("the mean of bucket 0: w")(lambda: sys._getframe(1).f_code.co_name)
        'the mean of bucket 0: w'
    """
    text = name.encode(errors="backslashreplace").decode().replace("\0", "\\0")
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    code = plain_frame.__code__.replace(co_name=text)
    return FunctionType(code, globals(), text)


def has_ended(frame: FrameType) -> bool:
    """Whether a function has returned or was interrupted, in whichever thread; its variables are dropped then.

    Args:
        frame: of a function that is no generator and no coroutine.

    `sys._current_frames` would show what runs, but may wait for ever in Python 3.11: it collects garbage while it
    holds a lock that a thread needs to begin and to end (CPython's issue 106883). A frame that runs refuses `clear`.

    Example:
        >>> import sys
        >>> def running():
        ...     return sys._getframe(), has_ended(sys._getframe())
        >>> frame, ended_within = running()
        >>> ended_within, has_ended(frame)
        (False, True)
    """
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True
