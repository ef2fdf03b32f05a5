"""Where ranks wait for each other, and whether they wait in different places: then none of them will ever go on.

All ranks run the same program: they start the same messages, and take the same turns in exchanges through the store, in
the same order. A rank that waits in an exchange has started some messages before it. Another rank waits for one of its
messages, and has taken some turns before. If the first has not started that message yet, and the second has not taken
that turn yet, then they are not in the same order on both ranks. Nor are they if two ranks wait for messages of the
same number and of different kinds. That does not depend on when it is noticed: a place that is out of date proves it as
well. So no rank that is only slow is ever taken for one in another place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

_KEPT = 4
"""So many places are passed on: most often all ranks that wait do so in one."""


@dataclass(frozen=True, order=True)
class PlaceOfWait:
    """Where a rank waits for others.

    Attributes:
        kind: of the message that it waits for, the same on all ranks; empty in an exchange through the store.
        turns: how many turns in exchanges it has taken, this one included.
        messages: how many messages it has started, up to the one that it waits for.
        rank: which rank.
        text: the place in words, such as "call 5 of step 'train'".
    """

    kind: str
    turns: int
    messages: int
    rank: int
    text: str

    def as_json(self) -> dict[str, Any]:
        """What JSON knows of."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any) -> PlaceOfWait:
        """What `as_json` made.

        Raises:
            ValueError: something else.
        """
        try:
            return cls(
                str(found["kind"])[:200], int(found["turns"]), int(found["messages"]), int(found["rank"]),
                str(found["text"])[:1000],
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise ValueError("no place") from error


def merged(places: Iterable[PlaceOfWait]) -> list[PlaceOfWait]:
    """Different places, each with the lowest of the ranks that wait there; not more than a few.

    Example:
        >>> merged([PlaceOfWait("sum", 1, 5, rank, "call 3 of step 'train'") for rank in (2, 1)])
        [PlaceOfWait(kind='sum', turns=1, messages=5, rank=1, text="call 3 of step 'train'")]
    """
    found: dict[tuple[str, int, int], PlaceOfWait] = {}
    for place in sorted(places):
        found.setdefault((place.kind, place.turns, place.messages), place)
    return list(found.values())[:_KEPT]


def contradiction(places: Iterable[PlaceOfWait]) -> tuple[PlaceOfWait, PlaceOfWait] | None:
    """Two places of which at most one lies on the way of a program that all ranks run; None if all may.

    Example:
        >>> save, step = PlaceOfWait("", 7, 20, 0, "fdp.save"), PlaceOfWait("sum", 6, 21, 1, "call 5 of step 'train'")
        >>> [place.text for place in contradiction([save, step])]
        ['fdp.save', "call 5 of step 'train'"]
        >>> contradiction([save, PlaceOfWait("sum", 6, 20, 1, "call 4 of step 'train'")])  # it is on its way
    """
    known = list(places)
    for one in known:
        for other in known:
            if not other.kind:
                continue
            behind = other.turns < one.turns and one.messages < other.messages
            unlike = one.messages == other.messages and one.kind != other.kind
            if unlike if one.kind else behind:
                return one, other
    return None
