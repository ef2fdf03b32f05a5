"""The state of a step, compared between ranks while it trains: a part at each call, in a message that is sent anyway.

Each call computes a checksum of the part that is due, from its inputs, before anything else. `Order` mixes it into the
number that identifies the call. If that differs between ranks, they exchange the checksums of all parts through the
store. So each of them can say what differs, and on which ranks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fdp.distributed.checksum import BITS, checksum, checksum_of_memory
from fdp.distributed.exchange import exchange, timeout_s
from fdp.distributed.group import Group
from fdp.errors import ReplicationError, build_message, ranks_text
from fdp.plan import Plan
from fdp.runtime.rounds import ROUNDS, LeafSlice, last_compared, share_out
from fdp.runtime.written_early import written_early

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MASK = 2**BITS - 1

_PATIENCE_S = 60.0
"""Seconds for which a rank waits until the others have checksummed all of their state, at some gigabytes a second."""


@dataclass
class Look:
    """The checksums that a call took of its state.

    Attributes:
        call: which call.
        mixed: one number from the checksums of all parts that were due.
        numbers: the checksum of each part.
        state: the inputs of the call, as long as they may be asked for.
    """

    call: int
    mixed: int | torch.Tensor
    numbers: list[int | torch.Tensor]
    state: list[torch.Tensor]


class InPassing:
    """Compares the replicated state of a step between ranks, a part at each call.

    Args:
        plan: the plan.
        group: the ranks.
        number: of their agreement.
        device: of the messages. State is looked at there, and on the CPU; that of a further device would have to be
            waited for.
    """

    def __init__(self, plan: Plan, group: Group, number: int, device: torch.device) -> None:
        trace = plan.trace
        self._plan, self._group, self._number = plan, group, number
        self._inputs = len(trace.inputs)
        self._held = [getattr(trace.graph, target) for target, _ in trace.closed_over]
        names = [item.name for item in trace.inputs] + [f"closed-over tensor {name}" for _, name in trace.closed_over]
        there = {torch.device("cpu"), device}
        leaves = [
            (at, item.shape, item.dtype, item.stride, item.device)
            for at, item in enumerate(trace.inputs)
            if item.replicated and item.device in there
        ] + [
            (self._inputs + at, tuple(x.shape), x.dtype, x.stride(), x.device)
            for at, x in enumerate(self._held)
            if x.layout == torch.strided and x.device in there
        ]
        self._on_device = any(leaf[4].type != "cpu" for leaf in leaves)
        self._names = [names[leaf[0]] for leaf in leaves]
        self._at = [leaf[0] for leaf in leaves]
        self.rounds = share_out([(torch.Size(shape).numel(), dtype.itemsize) for _, shape, dtype, _, _ in leaves])
        plain = [
            place.type == "cpu" and not dtype.is_complex and _is_contiguous(shape, stride)
            for _, shape, dtype, stride, place in leaves
        ]
        sizes = [dtype.itemsize for _, _, dtype, _, _ in leaves]
        self._due = [
            [
                (
                    self._at[piece.leaf],
                    piece,
                    plain[piece.leaf],
                    piece.start * sizes[piece.leaf],
                    (piece.stop - piece.start) * sizes[piece.leaf],
                )
                for piece in pieces
            ]
            for pieces in self.rounds
        ]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compare."""
        return not self.rounds[0]

    @property
    def on_device(self) -> bool:
        """Whether some of it is not on the CPU."""
        return self._on_device

    def look(self, tensors: Sequence[torch.Tensor], call: int) -> Look:
        """Take the checksums of the parts that are due at a call.

        Args:
            tensors: its inputs.
            call: which call.
        """
        state = [*tensors, *self._held] if self._held else list(tensors)
        numbers: list[int | torch.Tensor] = []
        mixed = 0
        apart: torch.Tensor | None = None
        for at, piece, plain, start_bytes, size_bytes in self._due[call % ROUNDS]:
            tensor = state[at]
            # By its address where it lies in rows: a fifth of the time that a view of it would take.
            if plain and type(tensor) in _PLAIN and not tensor.is_neg() and (address := tensor.data_ptr()):
                number: int | torch.Tensor = checksum_of_memory(address + start_bytes, size_bytes)
            else:
                number = checksum(tensor, piece.start, piece.stop)
            numbers.append(number)
            if isinstance(number, int):
                mixed = (mixed * 31 + number) & _MASK
            else:
                number = number ^ (number >> BITS)
                apart = number if apart is None else apart * 31 + number
        return Look(call, mixed if apart is None else apart ^ mixed, numbers, state)

    def error(self, look: Look, since: int, now: tuple[int, Sequence[torch.Tensor]] | None) -> ReplicationError:
        """Find out, together with the other ranks, what differs between them.

        Args:
            look: what this rank saw at the call at which the numbers differed.
            since: the first call at which anything was compared.
            now: which call begins, and its inputs; None if it is the call of the look, which may have updated some.
        """
        call, tensors = (look.call, look.state) if now is None else (now[0], [*now[1], *self._held])
        early = written_early(self._plan) if now is None else frozenset()
        pieces = sorted({piece for each in self.rounds for piece in each if self._at[piece.leaf] not in early})
        own = {
            "due": [int(number) for number in look.numbers],
            "call": call,
            "now": [int(checksum(tensors[self._at[piece.leaf]], piece.start, piece.stop)) for piece in pieces],
        }
        found = self._tell_all(look.call, own)
        due = self.rounds[look.call % ROUNDS]
        differing = dict(_differing(due, {rank: each["due"] for rank, each in found.items()}, look.call))
        if len({each["call"] for each in found.values()}) == 1:
            others = _differing(pieces, {rank: each["now"] for rank, each in found.items()}, call)
            differing = {**dict(others), **differing}
        silent = [rank for rank in range(self._group.size) if rank not in found]
        return self._report(look, differing, since, silent, late=now is not None)

    def _tell_all(self, call: int, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Exchange checksums through the store; by rank, of those that answer."""
        key = f"fdp/state/{self._group.name}/{self._number}/{call}"
        try:
            payload = json.dumps(own).encode()
            answers = exchange(self._group, key, payload, min(_PATIENCE_S, timeout_s()), looks=False)
        except (RuntimeError, dist.DistError):
            return {self._group.rank: own}  # the store is gone with the process that holds it
        return {rank: json.loads(text) for rank, text in enumerate(answers) if text is not None}

    def _report(
        self, look: Look, differing: Mapping[LeafSlice, _Difference], since: int, silent: Sequence[int], late: bool
    ) -> ReplicationError:
        name, last = self._plan.trace.name, last_compared(self.rounds, look.call, since)
        lines = []
        for leaf, what in enumerate(self._names):
            parts = {piece: each for piece, each in differing.items() if piece.leaf == leaf}
            if not parts:
                continue
            # A leaf in slices: each of them was compared at a call of its own.
            before = min(last.get(piece, 0) for piece in parts)
            seen = max(each.call for each in parts.values())
            equal = f"equal when call {before} began" if before else "equal before call 1"
            whose = _whose([each.numbers for each in parts.values()])
            lines.append(f"{what}: {whose}; {equal}, not when call {seen} began")
        if not lines:
            names = dict.fromkeys(self._names[piece.leaf] for piece in self.rounds[look.call % ROUNDS])
            again = f"{ranks_text(silent)} did not tell more" if silent else "equal on all ranks when looked at again"
            lines = [f"{what}: compared at this call; {again}" for what in names]
        returned = f" What it returned since call {look.call} is wrong." if late else ""
        return ReplicationError(
            build_message(
                f"the state of step {name!r} does not hold the same bits on every rank any more, as seen at call "
                f"{look.call} on rank {self._group.rank}.{returned}",
                lines,
                remedy="start the job again from its last checkpoint (donated state may be half updated). Change state "
                "between calls on all ranks alike; if your program did not change it, suspect the memory or the "
                "processor of the ranks that differ.",
            )
        )


@dataclass(frozen=True)
class _Difference:
    """A slice that differs between ranks.

    Attributes:
        numbers: that of each rank.
        call: the call that found them so when it began.
    """

    numbers: Mapping[int, int]
    call: int


def _differing(
    pieces: Sequence[LeafSlice], numbers: Mapping[int, Sequence[int]], call: int
) -> Iterable[tuple[LeafSlice, _Difference]]:
    for at, piece in enumerate(pieces):
        each = {rank: of_rank[at] for rank, of_rank in numbers.items()}
        if len(set(each.values())) > 1:
            yield piece, _Difference(each, call)


def _whose(parts: Sequence[Mapping[int, int]]) -> str:
    """The ranks that differ, as text: the minority, if more than half of the ranks agree."""
    ranks = sorted(parts[0])
    held = {rank: tuple(part[rank] for part in parts) for rank in ranks}
    usual, count = Counter(held.values()).most_common(1)[0]
    odd = [rank for rank in ranks if held[rank] != usual]
    if 2 * count <= len(ranks):
        return f"{ranks_text(ranks)} differ"
    return f"{ranks_text(odd)} {'differs' if len(odd) == 1 else 'differ'} from the others"


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether strides are contiguous."""
    expected = 1
    for size, step in reversed(list(zip(shape, stride, strict=True))):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
