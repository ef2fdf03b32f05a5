"""Makes a trace and a call on values take the same branch of a class, and read numbers from tensors alike."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.optim import _adafactor

from fdp.pytorch.fake_modes import fake_mode_at_work
from fdp.pytorch.parts import unsupported_torch


@contextlib.contextmanager
def compiling_flag(flag: bool) -> Iterator[None]:
    """Set what `torch.compiler.is_compiling()` says.

    Under it capturable code skips its check for an accelerator, and plain code does tensor arithmetic where
    it would use Python floats. So capturable needs it on, also in eager; plain needs it off, also in a trace.
    """
    before = torch.compiler._is_compiling_flag
    if before == flag:
        yield
        return
    torch.compiler._is_compiling_flag = flag
    if flag and not torch.compiler.is_compiling():
        torch.compiler._is_compiling_flag = before
        raise unsupported_torch(
            "fdp.optim.from_torch", ["torch.compiler.is_compiling() does not ask torch.compiler._is_compiling_flag"]
        )
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def numbers_of_tensors() -> Iterator[None]:
    """Let `Tensor.item()` be traced, as a number that has no value yet, where the tracer would refuse it.

    Elsewhere in a step it would be a branch frozen by mistake; here it is meant, and nothing branches on it.
    """
    mode = fake_mode_at_work()
    before = mode is not None and mode.allow_scalar_outputs
    if mode is None or before:
        yield
        return
    mode.allow_scalar_outputs = True
    try:
        yield
    finally:
        mode.allow_scalar_outputs = before


def number_of(value: Tensor, first: float) -> float:
    """The value as a float; in a trace, as a symbol that each replay reads from the tensor anew."""
    number = value.item()
    if isinstance(number, torch.SymFloat) and first > 0:
        torch._check(number > 0)  # so that `if weight_decay != 0` has an answer while it is only a symbol
    return number


def make_comparisons_traceable() -> None:
    """Let Adafactor compare numbers that are read of tensors: its `min` and `max` become operations of the graph.

    (This relies on its step calling both by these names, which its module finds among its own globals first.) They
    stay there, so that no other thread takes them away from a trace; numbers that have a value are compared as ever.
    """
    vars(_adafactor).update(min=_smaller, max=_larger)


def _larger(a: float, b: float) -> float:
    """Python's `max`, which is `a` if `b` is NaN."""
    return _chosen(a, b, torch.gt) if _is_symbolic(a, b) else builtins.max(a, b)


def _smaller(a: float, b: float) -> float:
    """Python's `min`, which is `a` if `b` is NaN."""
    return _chosen(a, b, torch.lt) if _is_symbolic(a, b) else builtins.min(a, b)


def _is_symbolic(*numbers: float) -> bool:
    return any(isinstance(number, torch.SymFloat) for number in numbers)


def _chosen(a: float, b: float, is_better: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    """The second number if it is better, and else the first."""
    # Not torch.sym_max, which turns its arguments around if the first is a plain number: then NaN would win.
    first, second = (torch.scalar_tensor(v, dtype=torch.float64, device="cpu") for v in (a, b))
    return torch.where(is_better(second, first), second, first).item()
