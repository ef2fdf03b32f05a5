"""What `torch.utils.checkpoint` runs again in the backward pass, and what has to be as it was the first time.

Checkpointed functions are called once in the forward pass, and once more, to recompute what was not kept, when the
backward pass asks for it. By then the call around them is over: a module that was run on other parameters has its own
again, and random numbers have been drawn. Whoever runs such functions says here how to run them the second time.

This relies on the two functions of torch.utils.checkpoint that `checkpoint` hands its work to (torch 2.11 to 2.13):
`_checkpoint_without_reentrant_generator(function, preserve_rng_state, ...)`, which calls that function to recompute and
leaves the first call to `checkpoint`; `CheckpointFunction.apply(function, preserve_rng_state, *args)`; the set
`SAC_IGNORED_OPS` of operators that selective checkpointing neither keeps nor looks for; its two modes,
`_CachingTorchDispatchMode` in the forward pass and `_CachedTorchDispatchMode` in the recomputation; and
`_is_compiling`, by which `checkpoint` asks whether a compiler will decide on what is recomputed, so that it keeps
everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint

from fdp.dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

Again = Callable[[Callable[..., Any], bool], tuple[Callable[..., Any], bool]]
"""Takes, in the forward pass, what is going to be checkpointed, and whether it is to draw the same random numbers when
it runs again; returns what to run then, and whether torch is to see to the random numbers."""


def let_pass(operators: Iterable[Any]) -> None:
    """Let operators run in a recomputation that did not run in the forward pass, also under selective checkpointing."""
    torch.utils.checkpoint.SAC_IGNORED_OPS.update(operators)


@contextmanager
def unselected() -> Iterator[None]:
    """Have selective checkpointing neither keep nor look for what runs meanwhile, in either of the two passes alone."""
    modes = (
        torch.utils.checkpoint._CachingTorchDispatchMode,
        torch.utils.checkpoint._CachedTorchDispatchMode,
    )
    with ExitStack() as stack:
        while isinstance(_get_current_dispatch_mode(), modes):
            stack.enter_context(_pop_mode_temporarily())
        yield


@contextmanager
def recomputed_by(again: Again) -> Iterator[None]:
    """While this lasts, have everything that is checkpointed recomputed in another way.

    Args:
        again: asked at each call of `checkpoint`. Of several that are at work, the innermost is asked first, and the
            next one is given what that one returned.
    """
    inner = torch.utils.checkpoint
    generator, function = inner._checkpoint_without_reentrant_generator, inner.CheckpointFunction
    compiling = inner._is_compiling

    def with_again(fn: Callable[..., Any], preserve: bool = True, *args: Any, **kwargs: Any) -> Any:
        return generator(*again(fn, preserve), *args, **kwargs)

    def without_reentering(fn: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        # The reentrant kind runs a backward pass of its own, which finds no parameter that is not a leaf: the same
        # numbers come of the other kind.
        return inner.checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=preserve)

    inner._checkpoint_without_reentrant_generator = with_again  # type: ignore[assignment]
    inner._is_compiling = lambda *_: False
    inner.CheckpointFunction = SimpleNamespace(apply=without_reentering)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        inner._checkpoint_without_reentrant_generator, inner.CheckpointFunction = generator, function  # type: ignore[misc]
        inner._is_compiling = compiling
