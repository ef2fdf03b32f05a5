"""Tracebacks that show the user's code: without the frames of fdp and of torch's tracer between two lines of it.

References:
    JAX, `jax_traceback_filtering`: the idea.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sysconfig
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

from fdp.errors import FdpError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _folder(path: str | pathlib.Path) -> str:
    """A folder as what the files in it begin with: no other folder's do."""
    return str(path) + os.sep


_TORCH = pathlib.Path(torch.__file__).parent
_FDP = _folder(pathlib.Path(__file__).parent)
_TRACER_FOLDERS = tuple(
    _folder(_TORCH / name)
    for name in (
        "fx", "_subclasses", "_dynamo", "_functorch", "_higher_order_ops", "_library", "_prims_common", "_refs",
        "_decomp", "_inductor",
    )
)  # fmt: skip
_TRACER_FILES = tuple(
    str(_TORCH / name)
    for name in (
        "_ops.py", "_compile.py", "_meta_registrations.py", "autograd/graph.py", "utils/_python_dispatch.py",
        "utils/_stats.py", "utils/_pytree.py", "overrides.py", "__init__.py",
    )
)  # fmt: skip
_HIDDEN_FOLDERS = (_FDP, *_TRACER_FOLDERS)
_HIDDEN_FILES = {*_TRACER_FILES, contextlib.__file__}
_PATHS = sysconfig.get_paths()
_NOT_THE_USERS = (
    *(_folder(_PATHS[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")), _folder(_TORCH), "<frozen",
)  # fmt: skip
"""Where installed code is. A step that is installed there itself is shown with all frames."""
_MODELS = _folder(_TORCH / "nn" / "modules")
"""Torch's own layers run where the user's model has them: what they raise is the user's."""


def shows_all() -> bool:
    """Whether every frame is shown: `FDP_TRACEBACK_FILTERING=off`."""
    return os.environ.get("FDP_TRACEBACK_FILTERING") == "off"


def hide_frames(error: BaseException) -> None:
    """Leave frames out of the traceback of an error that is the user's, and of those of its causes.

    An error is the user's if fdp refuses something, or if the user's code was running when it was raised: called by
    fdp, and not installed beside it; or if a function of fdp was called with other arguments than it takes. Any other
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
        is_wrong_call = one is error and could_not_begin(error)
        if isinstance(one, FdpError) or is_wrong_call or _runs_users_code(one.__traceback__):
            one.__traceback__ = _filtered(one.__traceback__)


def hiding_frames(function: _Function) -> _Function:
    """Hide frames of what a function raises.

    Args:
        function: of fdp, that a user calls. (`breaks_graph` hides them as well.)

    Returns:
        The function, which belongs to the same module, so that its doctests are found there.
    """
    hide = hide_frames

    def hiding(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            hide(error)
            raise

    code, own = hiding.__code__, function.__globals__
    made = types.FunctionType(code, own, function.__name__, None, hiding.__closure__)
    return cast(_Function, functools.wraps(function)(made))


def could_not_begin(error: BaseException) -> bool:
    """Whether a function could not be called with its arguments, where its caller handles the error: beneath the
    caller's frame there is none."""
    traceback = error.__traceback__
    return isinstance(error, TypeError) and traceback is not None and traceback.tb_next is None


def _links(traceback: types.TracebackType | None) -> Iterator[tuple[types.TracebackType, str, bool]]:
    """The frames of a traceback, outermost first: each with its file, and whether it is hidden."""
    in_tracer = False
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        # The tracer calls a step through a function that it writes.
        written = file == "<string>" and in_tracer
        in_tracer = file.startswith(_TRACER_FOLDERS)
        yield traceback, file, written or file in _HIDDEN_FILES or file.startswith(_HIDDEN_FOLDERS)
        traceback = traceback.tb_next


def _runs_users_code(traceback: types.TracebackType | None) -> bool:
    """Whether fdp was calling the user's code: a frame of it lies below one of fdp."""
    below = False
    for _, file, hidden in _links(traceback):
        if file.startswith(_FDP):
            below = True
        elif below and not hidden and (file.startswith(_MODELS) or not file.startswith(_NOT_THE_USERS)):
            return True
    return False


def _filtered(traceback: types.TracebackType | None) -> types.TracebackType | None:
    shown = [link for link, _, hidden in _links(traceback) if not hidden]
    after: types.TracebackType | None = None
    for link in reversed(shown):
        after = types.TracebackType(after, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return after
