"""Where fdp meets `torch.compile`: what Dynamo must not look into, and what it must leave alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from fdp.errors import CompileError, build_message
from fdp.pytorch.parts import unsupported_torch
from fdp.tracebacks import hide_frames, hiding_frames

_eval_frame: Any = getattr(torch._C._dynamo, "eval_frame", None)
"""The part of Dynamo in C, which decides about frames; it is there before Dynamo is imported."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def breaks_graph(reason: str) -> Callable[[_Function], _Function]:
    """Keep a function out of the graphs of others: a graph under `torch.compile` breaks once, around its call.

    It hides frames of what the function raises, as `hiding_frames` does.

    It is what `torch.compiler.disable` does, without importing Dynamo, which takes long, and without a
    frame of torch in tracebacks. (This relies on the marks by which Dynamo breaks its graph at a function, and on two
    functions of Dynamo's part in C, which is there before the rest: `set_eval_frame`, which says what compiles frames,
    and `set_code_exec_strategy`, which keeps the frame around the function from being compiled after the break. On a
    torch without them it is done by `torch.compiler.disable`.)

    Args:
        reason: what is said where one whole graph is asked for (`fullgraph=True`).

    Returns:
        A decorator.
    """

    def decorate(function: _Function) -> _Function:
        if not all(hasattr(_eval_frame, name) for name in ("set_eval_frame", "set_code_exec_strategy")):
            return cast(_Function, torch.compiler.disable(hiding_frames(function), reason=reason))
        compiles = _eval_frame.set_eval_frame

        def apart(*args: Any, **kwargs: Any) -> Any:
            before = compiles(None)
            try:
                return function(*args, **kwargs)
            except Exception as error:
                hide_frames(error)
                raise
            finally:
                compiles(before)

        # The frame of this function is skipped, but not those of functions that it calls.
        actions = _eval_frame._FrameAction
        strategy = _eval_frame._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
        _eval_frame.set_code_exec_strategy(apart.__code__, strategy)
        functools.update_wrapper(apart, function)
        apart.__dict__.update(
            _torchdynamo_disable=True, _torchdynamo_disable_msg=reason, _torchdynamo_disable_recursive=True,
            _torchdynamo_orig_callable=function,
        )  # fmt: skip
        return cast(_Function, apart)

    return decorate


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run what is under `torch.compile` as plain Python: inside of a step it is part of the step's graph.

    It holds for the whole process: a caller keeps others from doing so meanwhile.

    Not by `torch.compiler.set_stance("force_eager")` alone, which would stop `torch.cond` and its like as well: they
    have their branches traced by Dynamo. (This relies on `eval_frame._callback_from_stance`, through which each
    function under `torch.compile` asks at its call whether to compile, and on `_in_hop_compile`, which is true inside
    of them. Whether functions under `torch.compile` still ask there is looked at once.)

    Raises:
        FdpError: they do not.
    """
    if not _is_asked():
        raise unsupported_torch(
            "tracing a step", ["functions under torch.compile do not ask eval_frame._callback_from_stance"]
        )
    with _asked_instead(lambda callback, in_hop: callback if in_hop else None):
        yield


@functools.cache
def _is_asked() -> bool:
    asked = False

    def note(callback: object, in_hop: bool) -> None:
        nonlocal asked
        asked = True

    with _asked_instead(note):
        # Made as what `torch.compile` returns is made, without the half second of imports of a first `torch.compile`.
        torch._dynamo.run(lambda: None)()
    return asked


@contextmanager
def _asked_instead(decide: Callable[[Any, bool], Any]) -> Iterator[None]:
    """While this lasts, decide what functions under `torch.compile` are compiled with.

    Args:
        decide: takes what they would be compiled with, and whether the call comes from inside `torch.cond` or its like.
    """
    from torch._dynamo import config, eval_frame
    from torch._higher_order_ops.utils import _in_hop_compile

    before = eval_frame._callback_from_stance

    def answer(callback: object) -> Any:
        return decide(callback, _in_hop_compile())

    with torch.compiler.set_stance("force_eager"), config.patch(error_on_nested_fx_trace=False):
        eval_frame._callback_from_stance = answer
        try:
            yield
        finally:
            eval_frame._callback_from_stance = before


def function_behind_compile(step_fn: object) -> tuple[Any, Mapping[str, Any] | None] | None:
    """Take what `torch.compile` made of a function apart.

    (This relies on `_torchdynamo_orig_callable`, which is the function, and on `_is_torch_compile` and
    `_torchdynamo_disable`, which say that it was not merely disabled. `get_compiler_config()` gives inductor's
    settings, but not with fullgraph=True: then its backend has them, which is found behind the context that
    `get_compiler_config` is a function of.)

    Args:
        step_fn: anything.

    Returns:
        The function, and the settings of inductor that hold in it, None for another backend; None if `torch.compile`
        has nothing to do with it.
    """
    inner = getattr(step_fn, "_torchdynamo_orig_callable", None)
    disabled = getattr(step_fn, "_torchdynamo_disable", False)
    if inner is None or not getattr(step_fn, "_is_torch_compile", not disabled):
        return None
    get_config = getattr(step_fn, "get_compiler_config", None)
    wanted = None if get_config is None else get_config()
    if wanted is None and get_config is not None:
        found: Any = getattr(inspect.getclosurevars(get_config).nonlocals.get("self"), "callback", None)
        while hasattr(found, "_torchdynamo_orig_backend"):
            found = found._torchdynamo_orig_backend
        wanted = found.get_compiler_config() if hasattr(found, "get_compiler_config") else None
    return inner, wanted


def uncompiled_module(module: object) -> torch.nn.Module:
    """The module that `torch.compile` made another one of.

    (This relies on `OptimizedModule._orig_mod`.)

    Args:
        module: an `OptimizedModule` of torch.

    Raises:
        FdpError: torch keeps the original elsewhere.
    """
    original = getattr(module, "_orig_mod", None)
    if original is None:
        raise unsupported_torch("a module under torch.compile", ["an OptimizedModule has no _orig_mod"])
    found: torch.nn.Module = original
    return found


def refuse_as_backend(graph: object, inputs: object, **options: Any) -> Any:
    """Say why there is no `torch.compile(step, backend="fdp")`: pyproject.toml has Dynamo find this under the name.

    Args:
        graph: what Dynamo has captured.
        inputs: its arguments.
        options: of the backend.

    Raises:
        CompileError: always.
    """
    raise CompileError(
        build_message(
            'torch.compile(step, backend="fdp"): fdp has no front end through Dynamo. A captured graph does not say '
            "which inputs differ from rank to rank, which are donated, and what leaves are called.",
            remedy="decorate the step: fdp.data_parallel(step, compile=True).",
        )
    )
