"""What each collective does to a value, as far as a proof looks at it: its name, its root or pairs, and shapes.

The proof assumes nothing of the numbers. What ranks compute of a value together is an unknown function of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fdp.verify.failure import VerificationError

IN_PLACE = ("mean", "sum", "max", "min", "broadcast")
"""Those whose result lies where the value lay that was sent."""

SPLIT = ("sum_scatter", "mean_scatter", "all_to_all")
"""Those of whose argument the first dimension has an entry for each rank."""

STACKED = ("all_gather", "all_to_all")
"""Those of whose result the first dimension has an entry for each rank."""

OPERATORS = (
    "fdp::all_reduce", "fdp::all_gather", "fdp::broadcast", "fdp::reduce_scatter", "fdp::all_to_all", "fdp::permute",
)  # fmt: skip
"""The operators that stand for them in a trace."""


@dataclass(frozen=True)
class OwnRank:
    """The ranks of a step, or of those along one dimension of their mesh.

    Attributes:
        own: this process's rank.
        size: number of ranks.
        dimensions: of the mesh: names and sizes, the last one counted fastest.
    """

    own: int
    size: int
    dimensions: tuple[tuple[str, int], ...] = ()

    def along(self, dimension: str) -> OwnRank:
        """The ranks that differ from this one along one dimension alone; all of them for the empty name."""
        if dimension == "":
            return self
        faster = 1
        for name, size in self.dimensions[::-1]:
            if name == dimension:
                return OwnRank(self.own // faster % size, size)
            faster *= size
        raise VerificationError(f"there is no dimension {dimension!r} in the mesh of the step")


def axis_dimension(axis: str) -> str:
    """The dimension in the axis of a marker: "hosts" in "traced along hosts"; empty if it is along all of them."""
    words = axis.split(" along ", 1)
    return words[1] if len(words) == 2 else ""


def shape_of(op: str, shape: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """The shape of a collective's result, from the shape of the value and the number of ranks.

    Example:
        >>> shape_of("sum_scatter", (2, 5), 2), shape_of("all_gather", (5,), 2), shape_of("all_to_all", (2, 5), 2)
        ((5,), (2, 5), (2, 5))
    """
    own = shape[1:] if op in SPLIT else shape
    return (size, *own) if op in STACKED else own


@dataclass(frozen=True)
class Combination:
    """How ranks combine a value.

    Attributes:
        op: the name of the collective, as buckets have it.
        root_or_pairs: the root of a broadcast, the pairs of a permutation; else 0.
        accumulate: the dtype to add in, if it is given.
        along: the dimension of the mesh; empty for all ranks.
    """

    op: str
    root_or_pairs: Any = 0
    accumulate: Any = None
    along: str = ""


def combination_of(operator: str, given: Any) -> Combination:
    """What an operator that stands for a collective says.

    Args:
        operator: its name.
        given: its arguments, by name.
    """
    accumulate, along = given.get("accumulate"), axis_dimension(given["axis"])
    if operator == "fdp::all_reduce":
        return Combination(given["op"], 0, accumulate, along)
    if operator == "fdp::reduce_scatter":
        return Combination(f"{given['op']}_scatter", 0, accumulate, along)
    if operator == "fdp::permute":
        flat = tuple(given["pairs"])
        return Combination("permute", tuple(zip(flat[::2], flat[1::2], strict=True)), accumulate, along)
    return Combination(operator.removeprefix("fdp::"), given.get("root", 0), accumulate, along)


def combination_in(bucket: Any) -> Combination:
    """What a bucket says."""
    root_or_pairs = tuple(bucket.pairs) if bucket.op == "permute" else bucket.root
    return Combination(bucket.op, root_or_pairs, bucket.accumulate_dtype, bucket.along)
