"""The memory of a program: each call borrows an arena, and reuses the tensors of the last call if it is the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TypeVar

import torch

from fdp.emit.codegen.program import Program
from fdp.errors import FdpError, build_message
from fdp.plan import Plan
from fdp.runtime.arena import ARENAS, Arena, moving
from fdp.runtime.buffers import Buffer, all_place_values, make_buffers
from fdp.runtime.frames import has_ended
from fdp.runtime.proofs import prove_made

_Result = TypeVar("_Result")


class Busy(FdpError):
    """The step is running already."""


class Residence:
    """The memory of one program.

    Attributes:
        arena: that of the last call; None before the first, and after it was left.
        blocks: its memory, for each device.
        buffers: the buckets of the program in it, by index.
    """

    def __init__(self, plan: Plan, program: Program) -> None:
        self._plan, self._program = plan, program
        self.arena: Arena | None = None
        self.blocks: Mapping[torch.device, torch.Tensor] = {}
        self.buffers: dict[int, Buffer] = {}
        self._running: dict[str, FrameType] = {}  # the call that runs, if one does; `setdefault` is one instruction

    def call(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Call the program's function with its tensors in an arena.

        An interrupt may come between any two instructions: also after the call has begun, and before or after the block
        that a `finally` protects. Then the next call sees that this one has ended, and goes on.

        Raises:
            FdpError: the program is running already.
        """
        # No variable holds the frame: it would hold itself, with the user's state, until garbage is collected.
        while self._running.setdefault("call", sys._getframe()) is not sys._getframe():
            self._refuse_or_forget()
        arena = None
        try:
            arena = ARENAS.borrow(self.arena)
            self._place_tensors(arena)
            return function(*args)
        except BaseException:
            # Messages may still be in flight: their memory is left to them, and the next call takes new.
            self.leave(self.arena)
            arena = None
            raise
        finally:
            if arena is not None:
                ARENAS.give_back(arena)
            self._running.pop("call", None)

    def _refuse_or_forget(self) -> None:
        """Refuse a call while another one runs, and forget one that was interrupted before it could say that it ended.

        Raises:
            Busy: another one runs.
        """
        other = self._running.get("call")
        if other is not None and not has_ended(other):
            raise Busy(
                build_message(
                    f"step {self._plan.trace.name!r} was called while it was running, from another thread or from "
                    "itself; its memory holds one call at a time.",
                    remedy="call it from one thread, or make a second step with fdp.data_parallel.",
                )
            )
        with moving:
            if self._running.get("call") is other:
                self._running.pop("call", None)

    def _place_tensors(self, arena: Arena) -> None:
        """Make the tensors at the program's fixed places, unless they are there from the last call."""
        blocks = arena.fit(self._program.layouts)
        if self.arena is arena and self.blocks is blocks:
            return
        with moving:
            self.leave(self.arena)
            self.arena, self.blocks = arena, blocks
            for function, values in all_place_values(self._program, blocks):
                function.__globals__.update(values)
            self.buffers = make_buffers(self._plan, self._program, blocks)
            prove_made(self._plan, self._program, blocks, self.buffers)
            arena.tenants.add(self)

    def release(self) -> None:
        """Release the memory of the last call; the next call borrows an arena again."""
        self.leave(self.arena)

    def leave(self, arena: Arena | None) -> None:
        """Leave an arena, if it is the one that the last call used; the next call takes one again."""
        with moving:
            if arena is None or self.arena is not arena:
                return
            for program in (self._program, *self._program.loops.values()):
                for name in program.places:
                    program.function.__globals__.pop(name, None)
            arena.tenants.discard(self)
            self.arena, self.blocks, self.buffers = None, {}, {}
