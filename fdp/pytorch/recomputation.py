"""What `torch.utils.checkpoint` runs again in the backward pass, and what has to be as it was the first time.

Checkpointed functions are called once in the forward pass, and once more, to recompute what was not kept, when the
backward pass asks for it. By then the call around them is over: a module that was run on other parameters has its own
again, and random numbers have been drawn. Whoever runs such functions says here how to run them the second time.

This relies on what `checkpoint` in torch.utils.checkpoint hands its work to. A generator calls the function to
recompute, and leaves the first call to `checkpoint`: since torch 2.14
`_checkpoint_without_reentrant_generator_impl(function, args, kwargs, *, preserve_rng_state, ...)`, and before
`_checkpoint_without_reentrant_generator(function, preserve_rng_state, ...)`. The other kind is
`CheckpointFunction.apply(function, preserve_rng_state, *args)`. The set `SAC_IGNORED_OPS` has operators that selective
checkpointing neither keeps nor looks for; its modes are `_CachingTorchDispatchMode` in the forward pass and
`_CachedTorchDispatchMode` in the recomputation. By `_is_compiling`, `checkpoint` asks whether a compiler will decide on
what is recomputed, so that it keeps everything. `why_not` looks, once, whether `checkpoint` still goes through these;
where it does not, functions that are checkpointed are refused.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from fdp.pytorch import parts
from fdp.pytorch.dispatch import innermost_mode, without_innermost_mode

_WHAT = "activation checkpointing"
_CHECKPOINT = torch.utils.checkpoint.__file__
_AUTOGRAD = os.path.dirname(torch.autograd.__file__)
_GENERATOR, _FORMER_GENERATOR = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)

Recompute = Callable[[Callable[..., Any], bool], tuple[Callable[..., Any], bool]]
"""Takes, in the forward pass, what is going to be checkpointed, and whether it is to draw the same random numbers when
it runs again; returns what to run then, and whether torch is to see to the random numbers."""


def let_pass(operators: Iterable[Any]) -> None:
    """Let operators run in a recomputation that did not run in the forward pass, also under selective checkpointing."""
    if not parts.missing(_WHAT):  # else nothing is checkpointed
        torch.utils.checkpoint.SAC_IGNORED_OPS.update(operators)


@contextmanager
def unselected() -> Iterator[None]:
    """Have selective checkpointing neither keep nor look for what runs meanwhile, in either of the two passes alone."""
    if parts.missing(_WHAT):
        yield
        return
    modes = (
        torch.utils.checkpoint._CachingTorchDispatchMode,
        torch.utils.checkpoint._CachedTorchDispatchMode,
    )
    with ExitStack() as stack:
        while isinstance(innermost_mode(), modes):
            stack.enter_context(without_innermost_mode())
        yield


@contextmanager
def recomputed_by(again: Recompute) -> Iterator[None]:
    """While this lasts, have everything that is checkpointed recomputed in another way.

    Args:
        again: asked at each call of `checkpoint`. Of several that are at work, the innermost is asked first, and the
            next one is given what that one returned.
    """
    reasons = why_not()
    with _refusing(reasons) if reasons else _asking(again):
        yield


@contextmanager
def _asking(again: Recompute, compiling: Callable[..., bool] = lambda *_: False) -> Iterator[None]:
    inner: Any = torch.utils.checkpoint
    name = _GENERATOR if hasattr(inner, _GENERATOR) else _FORMER_GENERATOR
    before = {each: getattr(inner, each) for each in (name, "CheckpointFunction", "_is_compiling")}
    generator = before[name]

    def with_again(fn: Callable[..., Any], args: Any, kwargs: Any, *, preserve_rng_state: bool, **options: Any) -> Any:
        fn, preserve = again(fn, preserve_rng_state)
        return generator(fn, args, kwargs, preserve_rng_state=preserve, **options)

    def with_again_formerly(fn: Callable[..., Any], preserve: bool = True, *args: Any, **kwargs: Any) -> Any:
        return generator(*again(fn, preserve), *args, **kwargs)

    def without_reentering(fn: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        # The reentrant kind runs a backward pass of its own, which finds no parameter that is not a leaf: the same
        # numbers come of the other kind.
        return inner.checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=preserve)

    setattr(inner, name, with_again if name == _GENERATOR else with_again_formerly)
    inner._is_compiling = compiling
    inner.CheckpointFunction = SimpleNamespace(apply=without_reentering)
    try:
        yield
    finally:
        for each, value in before.items():
            setattr(inner, each, value)


@functools.cache
def why_not() -> tuple[str, ...]:
    """What keeps fdp from having a say in recomputations on this torch; nothing if it has one. Looked at once."""
    gone = [f"{path} does not exist" for path in parts.missing(_WHAT)]
    if gone:
        return tuple(gone)
    asked: set[str] = set()
    found: list[str] = []

    def check(reentrant: bool) -> None:
        def again(fn: Callable[..., Any], preserve: bool) -> tuple[Callable[..., Any], bool]:
            asked.add("again")
            return counted, preserve

        def counted(x: torch.Tensor) -> torch.Tensor:
            asked.add("recomputed")
            return x.sin()

        def compiling(*_: Any) -> bool:
            asked.add("_is_compiling")
            return False

        asked.clear()
        x = torch.ones(1, requires_grad=True, device="cpu")
        with _asking(again, compiling):
            y: Any = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=reentrant, preserve_rng_state=False)
            y.backward()
        unasked = sorted({"again", "recomputed", "_is_compiling"} - asked)
        if unasked:
            found.append(f"torch.utils.checkpoint.checkpoint(use_reentrant={reentrant}) never asks: {unasked}")

    def check_both() -> None:
        try:
            check(False)
            check(True)
        except Exception as error:
            found.append(f"torch.utils.checkpoint.checkpoint: {type(error).__name__}: {error}")

    # In a thread of its own: there is no tracer, no transformation and no autocast there, wherever this is called.
    thread = threading.Thread(target=check_both)
    thread.start()
    thread.join()
    return tuple(found)


@contextmanager
def _refusing(reasons: tuple[str, ...]) -> Iterator[None]:
    """Refuse every function that is checkpointed, in whatever way torch calls it."""

    def refuse(*_: Any, **__: Any) -> None:
        raise parts.unsupported_torch(_WHAT, reasons)

    # The reentrant kind: autograd would end the process if it were stopped in the middle of a function of its own.
    kinds = {each for each in vars(torch.utils.checkpoint).values() if isinstance(each, type)}
    kinds = {each for each in kinds if issubclass(each, torch.autograd.Function)}
    kinds = {each for each in kinds if "apply" not in vars(each)}  # those that an outer one refuses already have one
    for kind in kinds:
        kind.apply = refuse  # type: ignore[attr-defined]
    try:
        with _Refusing(refuse):
            yield
    finally:
        for kind in kinds:
            del kind.apply  # type: ignore[attr-defined]


class _Refusing(TorchFunctionMode):
    """Refuses every call that comes from a function that is being checkpointed."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        super().__init__()
        self.refuse = refuse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: FrameType | None = sys._getframe(1)
        # What checkpoint and autograd ask for themselves is let by.
        file = "" if frame is None else frame.f_code.co_filename
        while frame is not None and not file.startswith((_CHECKPOINT, _AUTOGRAD)):
            if frame.f_code.co_filename == _CHECKPOINT:
                self.refuse()
            frame = frame.f_back
        return func(*args, **(kwargs or {}))
