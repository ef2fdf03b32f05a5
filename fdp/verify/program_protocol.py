"""What is looked at of a program: its function, and what it says about memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch


class Place(Protocol):
    """Where a tensor lies, as a program says it: see `fdp.emit.memory.planning.Place`."""

    @property
    def memory(self) -> Any: ...

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


class Layout(Protocol):
    """Where pieces of memory lie, as a program says it: see `fdp.emit.memory.layout.Layout`."""

    @property
    def offsets(self) -> Mapping[Any, int]: ...

    @property
    def size_bytes(self) -> int: ...


class Program(Protocol):
    """A program, as far as it is looked at: see `fdp.emit.codegen.program.Program`."""

    @property
    def source(self) -> str: ...

    @property
    def function(self) -> Callable[..., Any]: ...

    @property
    def places(self) -> Mapping[str, Place]: ...

    @property
    def layouts(self) -> Mapping[torch.device, Layout]: ...

    @property
    def scaled(self) -> frozenset[int]: ...

    @property
    def gathered(self) -> frozenset[int]: ...

    @property
    def loops(self) -> Mapping[str, Any]: ...
