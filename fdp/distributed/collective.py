"""What ranks can do together with a value of each: an entry for each collective, asked by all that plan or send one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One way to combine what each rank holds.

    Attributes:
        name: what traces, plans and messages call it.
        operator: the operator of the `fdp` library that stands for it in a graph, without the namespace.
        gathers: the result has a row for each rank. So it does not lie where the value lies that is sent, values are
            not sent together, and on one rank there is something to do as well.
        rooted: every rank gets the value of one, the root.
    """

    name: str
    operator: str = "all_reduce"
    gathers: bool = False
    rooted: bool = False

    @property
    def reduces(self) -> bool:
        """Whether each element of the result is made of that element of every rank, and lies where it lay."""
        return not self.gathers and not self.rooted


COLLECTIVES = {
    each.name: each
    for each in (
        Collective("mean"),
        Collective("sum"),
        Collective("max"),
        Collective("min"),
        Collective("all_gather", "all_gather", gathers=True),
        Collective("broadcast", "broadcast", rooted=True),
    )
}
"""All of them, by name."""

OPERATORS = frozenset(each.operator for each in COLLECTIVES.values())
"""The operators that stand for one in a graph."""
