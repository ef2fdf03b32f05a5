"""The values of the other ranks in a dry run: nothing is sent, and collectives still have results.

A collective that returned its argument would hide mistakes: a program that reads a value before its average exists
would be right by chance. So in a comparison the other ranks hold *something else*: a function of what
this rank holds. The function is the same for each element, wherever it lies. So it does not matter whether a value
is reduced by itself or as a part of a bucket.

- Floating-point and complex numbers are multiplied by a share of the rank, between 0.5 and 0.875. What is zero stays
  zero, what is positive stays positive, what is finite stays finite: flags, variances, weights and probabilities go on
  to be such. (There is no offset, because a flag that is zero on all ranks has to stay zero: `pmax` counts NaNs so.)
- Integers above one get smaller, and stay positive. Places in a table stay in the table, and counts do not become zero.
- Booleans are negated.
- Other dtypes, which have no arithmetic, stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fdp.distributed.mesh import place_along

OthersHold = Literal["different", "equal"]

_SCALED = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
})  # fmt: skip
_LOWERED = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


@dataclass(frozen=True)
class OtherRanks:
    """The assumed values of all ranks of a group, while nothing is sent.

    Attributes:
        size: how many ranks there are.
        rank: this one.
        kind: "different" if the others hold something else, "equal" if they hold what this one holds.
        dimensions: of a mesh of several dimensions, their names and sizes.
    """

    size: int
    rank: int
    kind: OthersHold = "different"
    dimensions: tuple[tuple[str, int], ...] = ()

    def along(self, dimension: str) -> OtherRanks:
        """The ranks that differ from this one along one dimension of the mesh alone; all of them for `WHOLE`."""
        if not dimension:
            return self
        return OtherRanks(
            dict(self.dimensions)[dimension], place_along(self.rank, self.dimensions, dimension), self.kind
        )

    @property
    def axis_name(self) -> str:
        """The name under which markers carry this: a backward pass on another thread reads it there."""
        text = f"{self.kind} ranks: {self.rank} of {self.size}"
        return f"{text} in {json.dumps(self.dimensions)}" if self.dimensions else text

    @classmethod
    def of_axis(cls, name: str) -> OtherRanks | None:
        """What `axis_name` says; None for another name."""
        kind, found, numbers = name.partition(" ranks: ")
        if not found or kind not in ("different", "equal"):
            return None
        rank, _, rest = numbers.partition(" of ")
        size, _, mesh = rest.partition(" in ")
        dimensions = tuple((str(name), int(count)) for name, count in json.loads(mesh or "[]"))
        return cls(int(size), int(rank), "equal" if kind == "equal" else "different", dimensions)

    def all_reduce_(self, x: torch.Tensor, op: str, scaled: bool = False) -> None:
        """Reduce a tensor in place, with the assumed values.

        Args:
            x: what this rank contributes.
            op: "mean", "sum", "max" or "min".
            scaled: the values have been divided by the number of ranks, so that their sum is the mean.
        """
        if self.dimensions:
            # Along one dimension after the other, as sharded state and sums in two levels are reduced.
            for name, _ in reversed(self.dimensions):
                self.along(name).all_reduce_(x, op, scaled)
            return
        if op in ("max", "min"):
            choose = torch.maximum if op == "max" else torch.minimum
            own = x.clone()
            for factor, fewer in self._distinct:
                choose(x, _held(own, factor, fewer), out=x)
        elif x.dtype in _LOWERED:
            own = x.clone()
            for rank in self._others:
                x.add_(_held(own, *self._share(rank)))
        else:
            total = 1 + sum(self._share(rank)[0] for rank in self._others)
            factor = total / self.size if op == "mean" and not scaled else total
            if factor != 1:
                x.mul_(factor)

    def all_gather_(self, out: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `out` ([size, *own.shape]) with the value of each rank."""
        for rank, row in enumerate(out.unbind(0)):
            row.copy_(own if rank == self.rank else _held(own, *self._share(rank)))

    def broadcast_(self, x: torch.Tensor, root: int) -> None:
        """Replace this rank's value by the root's."""
        if root != self.rank:
            x.copy_(_held(x, *self._share(root)))

    def reduce_scatter_(self, out: torch.Tensor, own: torch.Tensor, op: str) -> None:
        """Fill `out` with the reduction of this rank's row of each rank's value."""
        out.copy_(own[self.rank])
        self.all_reduce_(out, op)

    def all_to_all_(self, out: torch.Tensor, own: torch.Tensor) -> None:
        """Fill each row of `out` with that rank's piece for this one."""
        self.all_gather_(out, own[self.rank])

    def permute_(self, out: torch.Tensor, own: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Fill `out` with the value of the rank that sends to this one, or with zeros if there is none."""
        source = next((one for one, other in pairs if other == self.rank), None)
        if source is None:
            out.zero_()
        else:
            out.copy_(own if source == self.rank else _held(own, *self._share(source)))

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def _distinct(self) -> set[tuple[float, int]]:
        return {self._share(rank) for rank in self._others}

    def _share(self, rank: int) -> tuple[float, int]:
        """The factor of a rank's numbers, and by how much its integers are smaller.

        On a mesh each dimension along which a rank differs from this one adds to that.
        """
        if self.kind == "equal":
            return 1.0, 0
        if not self.dimensions:
            return 1 - (1 + rank % 4) / 8, 1 + rank % 4
        factor, fewer = 1.0, 0
        for name, _ in self.dimensions:
            place = place_along(rank, self.dimensions, name)
            if place != place_along(self.rank, self.dimensions, name):
                factor, fewer = factor * (1 - (1 + place % 4) / 8), fewer + 1 + place % 4
        return factor, fewer


def _held(own: torch.Tensor, factor: float, fewer: int) -> torch.Tensor:
    """The assumed value of another rank, from the value of this one."""
    if own.dtype in _SCALED:
        return own * factor
    if own.dtype in _LOWERED:
        return torch.where(own > 1, (own - fewer).clamp_min(1), own) if fewer else own
    if own.dtype == torch.bool:
        return ~own if fewer else own
    return own
