"""Gradients that are added up over microbatches: what `value_and_grad` does while `fdp.accumulate` calls it.

It adds each gradient to a total as soon as the backward pass has made it, and hands out a stand-in for the total, with
which nothing can be done but return it: a norm of it, say, would be that of a part of the gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from fdp.errors import ArgumentError, build_message

_local = threading.local()


class Pending:
    """Stands for a gradient that is still being added up.

    Attributes:
        total: what has been added up so far, laid out like `source`.
        source: what it is the gradient of; of the last microbatch.
        label: its key path.
    """

    def __init__(self, total: torch.Tensor, source: torch.Tensor, label: str) -> None:
        self.total, self.source, self.label = total, source, label

    def __repr__(self) -> str:
        return f"<the gradient of {self.label}, which is being added up>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentError(
            build_message(
                f"the gradient of {self.label} is used while fdp.accumulate adds it up: it is not whole yet.",
                remedy="return gradients as fdp.value_and_grad gives them, and clip or change those that "
                "fdp.accumulate returns.",
            )
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        pending = [args, kwargs]
        while pending:
            item = pending.pop()
            if isinstance(item, Pending):
                item._refuse()
            if isinstance(item, dict):
                pending.extend(item.values())
            elif isinstance(item, (list, tuple)):
                pending.extend(item)
        raise TypeError(f"{func} was given a gradient that is being added up")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __abs__ = __getitem__ = __float__ = __bool__ = __len__ = __iter__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse


@dataclass
class AccumulationContext:
    """The accumulation context: the state of a loop over microbatches.

    Attributes:
        scale: by which each microbatch counts.
        totals: of each call of `value_and_grad`, in the order in which they are made.
        averages: of the values that they differentiate, likewise.
        values: those values, of the microbatch that is under way, so far.
        calls: how many calls there were so far, for this microbatch.
        inside: whether one is under way.
    """

    scale: float
    totals: list[list[Pending]] = field(default_factory=list)
    averages: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    calls: int = 0
    inside: bool = False

    def begin(self) -> None:
        """Begin the next microbatch."""
        self.values, self.calls = [], 0

    def add_value(self, value: torch.Tensor) -> None:
        """Add the value that is about to be differentiated to its average, before the backward pass begins."""
        if self.calls > len(self.averages):
            self.averages.append(torch.zeros((), dtype=value.dtype, device=value.device))
        with torch.no_grad():
            self.averages[self.calls - 1].add_(value.detach(), alpha=self.scale)

    def average_of(self, leaf: object) -> torch.Tensor | None:
        """The average that a value belongs to; None for a value that was not differentiated."""
        return next((a for a, value in zip(self.averages, self.values, strict=False) if value is leaf), None)

    @contextmanager
    def differentiating(self, sources: Sequence[torch.Tensor], labels: Sequence[str]) -> Iterator[list[Pending]]:
        """The totals for the gradients of one call of `value_and_grad`."""
        if self.inside:
            refuse_while_accumulating("fdp.value_and_grad, inside of another one,")
        if self.calls == len(self.totals):
            self.totals.append([Pending(_zeros_like(s), s, label) for s, label in zip(sources, labels, strict=True)])
        found = self.totals[self.calls]
        self.calls += 1
        shapes = [(pending.total.shape, pending.total.dtype, pending.label) for pending in found]
        if shapes != [(s.shape, s.dtype, label) for s, label in zip(sources, labels, strict=True)]:
            raise ArgumentError(
                build_message(
                    "fdp.accumulate adds up gradients, but not all microbatches have gradients of the same parameters.",
                    [f"{label}: {list(shape)} {dtype}" for shape, dtype, label in shapes],
                    remedy="differentiate with respect to the same parameters in every call.",
                )
            )
        for pending, source in zip(found, sources, strict=True):
            pending.source = source
        self.inside = True
        try:
            yield found
        finally:
            self.inside = False


def current_accumulation() -> AccumulationContext | None:
    """The accumulation context of this thread, or None."""
    return getattr(_local, "accumulation", None)


def refuse_while_accumulating(
    what: str,
    remedy: str = "average what fdp.accumulate returns, in one message; for a gradient inside of the loss use "
    "torch.func.grad.",
) -> None:
    """Refuse communication inside a loop over microbatches."""
    if current_accumulation() is not None:
        raise ArgumentError(
            build_message(
                f"{what} was called inside the function of fdp.accumulate: ranks would exchange a message for every "
                "microbatch.",
                remedy=remedy,
            )
        )


@contextmanager
def entered(accumulation: AccumulationContext) -> Iterator[None]:
    """Add up gradients on this thread."""
    _local.accumulation = accumulation
    try:
        yield
    finally:
        _local.accumulation = None


def _zeros_like(source: torch.Tensor) -> torch.Tensor:
    """Zeros in the memory order of a tensor, made from its shape alone."""
    order = memory_order(source) or list(range(source.dim()))
    back = sorted(range(len(order)), key=order.__getitem__)
    zeros = torch.zeros([source.shape[d] for d in order], dtype=source.dtype, device=source.device)
    return zeros if back == list(range(len(back))) else zeros.permute(back)


def memory_order(x: torch.Tensor) -> list[int] | None:
    """The order of dimensions in which a tensor lies in memory, with or without gaps; None if it is that of its shape.

    It is that of its shape, too, where elements lie in one place.
    """
    if x.is_contiguous():
        return None
    shape, strides = x.shape, x.stride()
    order = sorted(range(x.dim()), key=lambda d: (-strides[d], d))
    reach = 0  # of the dimensions so far, from the innermost, the element that lies last
    for d in reversed(order):
        if shape[d] > 1 and strides[d] <= reach:
            return None
        reach += (shape[d] - 1) * strides[d]
    return order if order != list(range(x.dim())) else None
