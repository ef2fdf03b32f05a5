"""Settings of torch while a step is traced; each is a context manager.

Private parts of torch that are relied on: the flag that tells libraries that a compiler is at work (they then skip
checks that would read the value of a tensor), the switch of oneDNN, `torch._VF`, where torch.nn.LSTM looks
up its function, the cache of autocast.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributions import Distribution

from fdp.pytorch import parts
from fdp.pytorch.dynamo import uncompiled
from fdp.pytorch.process_flags import onednn_enabled, set_onednn_enabled
from fdp.trace.capture.silent_changes import replaced

TRACING = "tracing a step"
"""What fails if a private part of torch is missing, for the error."""


@contextmanager
def compiling() -> Iterator[None]:
    """Tell libraries that values must not be read, and let functions under `torch.compile` be traced through."""
    validates = Distribution._validate_args
    with torch.compiler._compile_session_context(), uncompiled():
        if not torch.compiler.is_compiling():
            raise parts.unsupported_torch(
                TRACING, ["torch.compiler._compile_session_context does not set torch.compiler.is_compiling()"]
            )
        # Dynamo does so, too. The comparison at the first call runs with what the user has chosen.
        Distribution.set_default_validate_args(False)
        try:
            yield
        finally:
            Distribution.set_default_validate_args(validates)


@contextmanager
def recording() -> Iterator[None]:
    """Let autograd record, whatever the caller has switched off around the call of a step."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():  # not otherwise: torch.cond does not run under the context manager
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def caching_casts(enabled: bool) -> Iterator[None]:
    """Switch the cache of autocast on or off."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(before)


@contextmanager
def without_fused_lstm() -> Iterator[list[str]]:
    """Have LSTMs computed by ordinary operators, not by oneDNN's fused one; yields a list, with an entry a call of one.

    The flag of oneDNN holds for the whole process, and how a convolution lays its result out depends on it: it is off
    for no longer than a call of an LSTM takes.
    """

    called: list[str] = []

    def unfused(original: Any) -> Any:
        @functools.wraps(original)
        def lstm(*args: Any, **kwargs: Any) -> Any:
            called.append("lstm")
            before = onednn_enabled()
            set_onednn_enabled(False)
            try:
                return original(*args, **kwargs)
            finally:
                set_onednn_enabled(before)

        return lstm

    with replaced(torch._VF, "lstm", unfused), replaced(torch, "lstm", unfused):
        yield called


@contextmanager
def copyable(fake: type[torch.Tensor]) -> Iterator[None]:
    """Let `copy.deepcopy` copy fake tensors, where torch would go round in circles. (They have no method of their own.)

    Args:
        fake: their class.
    """

    def copy_tensor(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if not tensor.is_leaf:
            raise RuntimeError("copy.deepcopy takes leaf tensors only: use x.detach().clone(), or x.clone()")
        with torch.no_grad():
            memo[id(tensor)] = tensor.clone().requires_grad_(tensor.requires_grad)
        copied: torch.Tensor = memo[id(tensor)]
        return copied

    with replaced(fake, "__deepcopy__", lambda _: copy_tensor):
        yield


@contextmanager
def silenced(name: str) -> Iterator[None]:
    """Silence a logger of torch."""
    logger = logging.getLogger(name)
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled
