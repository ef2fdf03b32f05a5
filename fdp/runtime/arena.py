"""The memory of a step: one block a device, which steps that do not run at the same time share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Protocol

import torch

from fdp.emit.memory.layout import Layout


class Tenant(Protocol):
    """A program with tensors in an arena."""

    def leave(self, arena: Arena | None) -> None:
        """Release all tensors in the arena, if there are any."""


moving = threading.RLock()
"""Held while a program enters or leaves an arena: threads may run several steps at once, each in its own arena."""


class Arena:
    """Blocks of memory, one for each device, that grow when a step needs more than there is.

    Attributes:
        blocks: the memory, as bytes; another mapping once a block is another one.
        tenants: those who have tensors in it; one at a time is at work.
    """

    def __init__(self) -> None:
        self.blocks: dict[torch.device, torch.Tensor] = {}
        self.tenants: weakref.WeakSet[Tenant] = weakref.WeakSet()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def fit(self, layouts: Mapping[torch.device, Layout]) -> Mapping[torch.device, torch.Tensor]:
        """Blocks that are large enough, as bytes; those that were too small are freed and replaced."""
        for device, layout in layouts.items():
            if device not in self.blocks or self.blocks[device].numel() < layout.size_bytes:
                self._grow(layouts)
                break
        for device in layouts:
            if device.type == "cuda":
                self._follow(device)
        return self.blocks

    def _grow(self, layouts: Mapping[torch.device, Layout]) -> None:
        with moving:
            for tenant in list(self.tenants):
                tenant.leave(self)
        self.blocks = dict(self.blocks)
        for device, layout in layouts.items():
            block = self.blocks.pop(device, None)
            size_bytes = max(layout.size_bytes, 0 if block is None else block.numel())
            block = None  # given back before the new one is taken
            self.blocks[device] = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def _follow(self, device: torch.device) -> None:
        """Order the work of the current stream after that of the last step, which may have used another stream."""
        stream = torch.cuda.current_stream(device)
        last = self._streams.get(device)
        if last is not None and last != stream:
            stream.wait_stream(last)
        self._streams[device] = stream


class Arenas:
    """The arenas of a process: steps that run one after the other use one of them in turn.

    An arena lives as long as a step that has used it.
    """

    def __init__(self) -> None:
        # A signal handler may call a step while this one is between two.
        self._lock = threading.RLock()
        self._idle: list[weakref.ref[Arena]] = []

    def borrow(self, preferred: Arena | None) -> Arena:
        """Take an arena that is not in use: the preferred one, another one, or a new one."""
        with self._lock:
            if preferred is not None:
                try:
                    self._idle.remove(weakref.ref(preferred))
                    return preferred
                except ValueError:
                    pass  # another program has it
            idle = [arena for reference in self._idle if (arena := reference()) is not None]
            chosen = idle[-1] if idle else None
            self._idle = [weakref.ref(arena) for arena in idle if arena is not chosen]
        return Arena() if chosen is None else chosen

    def give_back(self, arena: Arena) -> None:
        """Make an arena available to others."""
        with self._lock:
            self._idle.append(weakref.ref(arena))


ARENAS = Arenas()
