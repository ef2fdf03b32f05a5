"""Gradients that are checked: `value_and_grad` records the extremes that show whether each is finite."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

_local = threading.local()


@dataclass
class GradientExtremes:
    """The extremes of each gradient that was recorded.

    Attributes:
        names: key paths.
        own: this rank's, as `extremes`; an empty list for one without elements.
        means: over ranks, likewise.
    """

    names: list[str] = field(default_factory=list)
    own: list[list[torch.Tensor]] = field(default_factory=list)
    means: list[list[torch.Tensor]] = field(default_factory=list)

    def show(self, name: str, own: list[torch.Tensor], mean: list[torch.Tensor]) -> None:
        """One more gradient: its key path, this rank's extremes, and those of the mean."""
        self.names.append(name)
        self.own.append(own)
        self.means.append(mean)


@contextmanager
def looking() -> Iterator[GradientExtremes]:
    """Record the extremes of this thread's gradients."""
    before, _local.look = current_look(), GradientExtremes()
    try:
        yield _local.look
    finally:
        _local.look = before


def current_look() -> GradientExtremes | None:
    """The record of this thread's gradients, if one is being made."""
    return getattr(_local, "look", None)


def extremes(x: torch.Tensor) -> list[torch.Tensor]:
    """The least and the greatest of all real numbers in a tensor; both are finite exactly if all are."""
    if not x.numel():
        return []
    x = x.detach()
    # One pass, and no memory: `isfinite` takes a tensor of its own, and several times as long.
    return list(torch.aminmax(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x))
