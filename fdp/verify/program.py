"""What is looked at of a program: its function, and what it says about memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch


class Place(Protocol):
    """Where a tensor lies, as a program says it: see `fdp.emit.places.Place`."""

    memory: Any
    start_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Layout(Protocol):
    """Where pieces of memory lie, as a program says it: see `fdp.emit.layout.Layout`."""

    offsets: Mapping[Any, int]
    size_bytes: int


class Program(Protocol):
    """A program, as far as it is looked at: see `fdp.emit.program.Program`."""

    source: str
    function: Callable[..., Any]
    places: Mapping[str, Any]
    layouts: Mapping[torch.device, Any]
    scaled: frozenset[int]
    loops: Mapping[str, Any]
