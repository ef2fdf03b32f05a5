"""Whether what a step returned is what plain PyTorch computes, as far as rounding allows.

How far rounding goes is not guessed. Plain PyTorch runs in float32 and in float64: what differs between the two is what
rounding does to this value in this program. Where they do not differ, and few bits are enough, nothing may: sums of
short numbers are exact in any order. (Not so running means, by which inductor computes some operators; nor sums of
thirds, which come out short in one order of the ranks and not in another.) A value outside of a multiple of that is
looked at again: the program runs in float64 with its inputs, and what collectives return, moved by rounding, and in
float32 on the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from fuzz.oracle import Call, run_plain, same
from fuzz.program import Program

_TIMES = 16
"""Rounding in another order may go this many times as far."""

_EPS = 2.0**-23
_RUNS = 6


_RUNNING = ("var_mean",)
"""Operators for which inductor corrects a mean by each number (Welford): it rounds quotients that a sum has none of."""


def rounds_by_itself(programs: Sequence[Program]) -> bool:
    """Whether a compiler rounds where plain PyTorch does not, and may."""
    return programs[0].options.compile and any(name in program.text for program in programs for name in _RUNNING)


def divides_exactly(world: int) -> bool:
    """Whether a mean over the ranks only changes the exponent."""
    return world & (world - 1) == 0


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A value that is not what it should be."""

    call: int
    path: str
    text: str


class Judge:
    """Knows what programs compute, and compares.

    Attributes:
        calls: for each rank what plain PyTorch computes, in float32.
        excused: how many values were right only as far as they are ill-conditioned.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = programs
        self.calls = run_plain(programs)
        self._wide = run_plain(programs, wide=True)
        self._moved: list[tuple[list[list[Call]], list[list[Call]]]] | None = None
        self.excused = 0

    def exact(self) -> bool:
        """Whether nothing is rounded anywhere; on the wire, how far depends on the order of the ranks."""
        first = self._programs[0]
        if first.world > 1 and first.options.wire_dtype and not first.options.accumulate_dtype:
            return False
        if self._rounds():
            return False
        ranks = zip(self.calls, self._wide, strict=False)
        pairs = [
            (a, b)
            for one, two in ranks
            for x, y in zip(one, two, strict=False)
            for a, b in zip(x.leaves, y.leaves, strict=False)
        ]
        return all(_gap(a, b) == 0.0 for (_, a), (_, b) in pairs)

    def compare(self, rank: int, number: int, found: Sequence[tuple[str, Any]]) -> list[Mismatch]:
        """What differs between a call on a rank and the same in plain PyTorch."""
        expected = self.calls[rank][number].leaves
        paths, wanted = [path for path, _ in found], [path for path, _ in expected]
        if paths != wanted:
            return [Mismatch(number, "", f"another structure: {paths}, expected {wanted}")]
        bad = []
        for index, ((path, one), (_, two)) in enumerate(zip(found, expected, strict=False)):
            text = self._differs(number, rank, index, one, two)
            if text:
                bad.append(Mismatch(number, path, text))
        return bad

    def _differs(self, number: int, rank: int, index: int, found: Any, expected: Any) -> str | None:
        if not isinstance(expected, torch.Tensor):
            equal = type(found) is type(expected) and found == expected
            return None if equal else f"{found!r}, expected {expected!r}"
        if not isinstance(found, torch.Tensor):
            return f"{type(found).__name__}, expected a tensor"
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            return f"{list(found.shape)} {found.dtype}, expected {list(expected.shape)} {expected.dtype}"
        if same(found, expected):
            return None
        rounding = max(self._rounding(self._wide, r, number, index) for r in range(len(self.calls)))
        scale = _largest(expected)
        gap = _gap(found, self._wide[rank][number].leaves[index][1])
        # What needs many bits is rounded in another order of the same sums, though in this one it may not be.
        rounds = self._rounds()
        if rounds_by_itself(self._programs):
            scale = max(scale, 1.0)  # what a mean is taken of is larger than that, and the mean may be taken away again
        short = rounding == 0 and _is_short(expected) and not rounds
        allowed = 0.0 if short else _TIMES * (rounding + _EPS * scale)
        if gap <= allowed:
            return None
        if not self.exact() and gap <= _TIMES * self._moves(rank, number, index):
            self.excused += 1
            return None
        return (
            f"differs by {gap:.3g}, where rounding goes to {allowed:.3g}: {_short(found)}, expected {_short(expected)}"
        )

    def _rounds(self) -> bool:
        """Whether some order of the same sums rounds, though the one of plain PyTorch may not."""
        return rounds_by_itself(self._programs) or not divides_exactly(self._programs[0].world)

    def _moves(self, rank: int, number: int, index: int) -> float:
        """How far a value goes where inputs are moved by rounding; and how far rounding goes there."""
        if self._moved is None:
            noise = 2.0**-8 if self._programs[0].options.wire_dtype else 2.0**-22
            self._moved = [
                (run_plain(self._programs, True, noise, seed), run_plain(self._programs, False, noise, seed))
                for seed in range(1, _RUNS + 1)
            ]

        def value(run: list[list[Call]]) -> Any:
            return run[rank][number].leaves[index][1]

        # What is zero but for rounding stays zero wherever inputs are, and may by luck be zero in both types on these.
        return max(
            max(_gap(value(wide), value(self._wide)), _gap(value(wide), value(narrow))) for wide, narrow in self._moved
        )

    def _rounding(self, wide: list[list[Call]], rank: int, number: int, index: int) -> float:
        return _gap(self.calls[rank][number].leaves[index][1], wide[rank][number].leaves[index][1])


def _gap(x: Any, y: Any) -> float:
    """The largest difference; infinite if shapes differ, or one is a number where the other is none."""
    if not isinstance(x, torch.Tensor):
        return 0.0 if x == y else float("inf")
    if x.shape != y.shape:
        return float("inf")
    x, y = x.cpu().double(), y.cpu().double()
    if not torch.equal(x.isfinite(), y.isfinite()):
        return float("inf")
    difference = (x - y).abs().nan_to_num(0.0)
    return float(difference.max()) if difference.numel() else 0.0


def _is_short(x: torch.Tensor) -> bool:
    """Whether sixteen bits are enough for each number."""
    mantissa = torch.frexp(x.double().nan_to_num(0.0))[0] if x.is_floating_point() else torch.zeros(())
    return bool((mantissa * 2**16 == (mantissa * 2**16).round()).all())


def _largest(x: torch.Tensor) -> float:
    return float(x.double().abs().nan_to_num(0.0).max()) if x.numel() else 0.0


def _short(x: torch.Tensor) -> str:
    values = [f"{float(v):.7g}" for v in x.detach().reshape(-1)[:8].double()]
    return "[" + ", ".join(values) + (", ..." if x.numel() > 8 else "") + "]"
