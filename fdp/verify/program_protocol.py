"""The parts of a program that the proof reads: its function, and its data about memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

import torch


class PlaceProtocol(Protocol):
    """The place of a tensor, as a program states it: see `fdp.emit.memory.planning.Place`."""

    @property
    def memory(self) -> Hashable: ...

    @property
    def start_bytes(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def stride(self) -> tuple[int, ...]: ...

    @property
    def offset(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...


class LayoutProtocol(Protocol):
    """The places of pieces of memory, as a program states them: see `fdp.emit.memory.layout.Layout`."""

    @property
    def offsets(self) -> Mapping[Hashable, int]: ...

    @property
    def size_bytes(self) -> int: ...


class ProgramProtocol(Protocol):
    """The part of a program that the proof reads: see `fdp.emit.codegen.program.Program`."""

    @property
    def source(self) -> str: ...

    @property
    def function(self) -> Callable[..., Any]: ...

    @property
    def places(self) -> Mapping[str, PlaceProtocol]: ...

    @property
    def layouts(self) -> Mapping[torch.device, LayoutProtocol]: ...

    @property
    def scaled(self) -> frozenset[int]: ...

    @property
    def gathered(self) -> frozenset[int]: ...

    @property
    def loops(self) -> Mapping[str, Any]: ...
