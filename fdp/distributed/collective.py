"""The properties of each collective, in one table for all that plan or send one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One collective, and its properties.

    Attributes:
        name: what traces, plans and messages call it.
        operator: the operator of the `fdp` library that stands for it in a graph, without the namespace.
        reduction: by what the elements of all ranks become one: "mean", "sum", "max" or "min"; None if they are moved.
        splits: the argument has a row for each rank, and each rank gets what comes of its own row alone.
        gathers: the result has a row for each rank.
        rooted: every rank gets the value of one, the root.
        paired: which rank sends to which is said in pairs.
    """

    name: str
    operator: str = "all_reduce"
    reduction: str | None = None
    splits: bool = False
    gathers: bool = False
    rooted: bool = False
    paired: bool = False

    @property
    def in_place(self) -> bool:
        """Whether the result replaces the sent value in memory. If not, even a single rank has to copy."""
        return not (self.splits or self.gathers or self.paired)

    @property
    def scatters(self) -> bool:
        """Whether each rank gets its part of a reduction."""
        return self.splits and self.reduction is not None

    @property
    def reduces(self) -> bool:
        """Whether each element of the result combines the same element of every rank, in the same place."""
        return self.reduction is not None and self.in_place

    @property
    def varies(self) -> bool:
        """Whether ranks get different results."""
        return self.splits or self.paired

    @property
    def shares(self) -> bool:
        """Whether several values can be sent together.

        The rows of a gathered result lie apart from each other where they were sent with those of another.
        """
        return not self.gathers


COLLECTIVES = {
    each.name: each
    for each in (
        Collective("mean", reduction="mean"),
        Collective("sum", reduction="sum"),
        Collective("max", reduction="max"),
        Collective("min", reduction="min"),
        Collective("all_gather", "all_gather", gathers=True),
        Collective("broadcast", "broadcast", rooted=True),
        Collective("sum_scatter", "reduce_scatter", reduction="sum", splits=True),
        Collective("mean_scatter", "reduce_scatter", reduction="mean", splits=True),
        Collective("all_to_all", "all_to_all", splits=True, gathers=True),
        Collective("permute", "permute", paired=True),
    )
}
"""All of them, by name."""

OPERATORS = frozenset(each.operator for each in COLLECTIVES.values())
"""The operators that stand for one in a graph."""

_BY_OPERATOR = {(each.operator, each.reduction): each for each in COLLECTIVES.values()}


def collective_named(operator: str, reduction: str | None) -> Collective:
    """The collective that an operator stands for.

    Args:
        operator: its name, without the namespace.
        reduction: its argument `op`; None if it has none.

    Example:
        >>> collective_named("reduce_scatter", "mean").name
        'mean_scatter'
    """
    return _BY_OPERATOR[operator, reduction]
