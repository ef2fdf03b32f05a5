"""Tracebacks that show the user's code: without the frames of fdp and of torch's tracer between two lines of it.

References:
    JAX, `jax_traceback_filtering`: the idea.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import optree
import rich
import torch

from fdp.errors import FdpError

_Function = TypeVar("_Function", bound=Callable[..., Any])

_FDP = str(pathlib.Path(__file__).parent)
_TORCH = pathlib.Path(torch.__file__).parent
_TRACER = tuple(
    str(_TORCH / name)
    for name in (
        "fx", "_subclasses", "_dynamo", "_functorch", "_higher_order_ops", "_library", "_prims_common", "_refs",
        "_decomp", "_inductor", "_ops.py", "_compile.py", "_meta_registrations.py", "autograd/graph.py",
        "utils/_python_dispatch.py", "utils/_stats.py", "utils/_pytree.py", "overrides.py",
    )
)  # fmt: skip
_LIBRARIES = tuple(str(pathlib.Path(str(module.__file__)).parent) for module in (optree, rich))
_HIDDEN = (_FDP, *_TRACER, *_LIBRARIES, contextlib.__file__)
_NOT_THE_USERS = (_FDP, str(_TORCH), *_LIBRARIES, contextlib.__file__)


def shows_all() -> bool:
    """Whether every frame is shown: `FDP_TRACEBACK_FILTERING=off`."""
    return os.environ.get("FDP_TRACEBACK_FILTERING") == "off"


def hide_frames(error: BaseException) -> None:
    """Leave frames out of the traceback of an error that is the user's, and of those of its causes.

    An error is the user's if fdp refuses something, or if the user's code was running when it was raised. Any other
    error is fdp's own, and shows where it came from. On Python 3.10 a bare `raise` shows all frames nevertheless.

    Args:
        error: what is being raised; re-raise it with a bare `raise`.
    """
    if shows_all():
        return
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        pending += [one.__cause__, one.__context__]
        if isinstance(one, FdpError) or _runs_users_code(one.__traceback__):
            one.__traceback__ = _filtered(one.__traceback__)


def hiding_frames(function: _Function) -> _Function:
    """Hide frames of what a function raises."""

    @functools.wraps(function)
    def hiding(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    return hiding  # type: ignore[return-value]


def _links(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_hidden(link: types.TracebackType) -> bool:
    return link.tb_frame.f_code.co_filename.startswith(_HIDDEN)


def _runs_users_code(traceback: types.TracebackType | None) -> bool:
    """Whether fdp was calling the user's code: a frame of neither fdp nor torch lies below one of fdp."""
    below = False
    for link in _links(traceback):
        file = link.tb_frame.f_code.co_filename
        if below and not file.startswith(_NOT_THE_USERS):
            return True
        below = below or file.startswith(_FDP)
    return False


def _filtered(traceback: types.TracebackType | None) -> types.TracebackType | None:
    shown = [link for link in _links(traceback) if not _is_hidden(link)]
    after: types.TracebackType | None = None
    for link in reversed(shown):
        after = types.TracebackType(after, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return after
