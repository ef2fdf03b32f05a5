"""A fault of a rank, as monitors exchange it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

REASONS = ("died", "frozen", "raised", "left", "unreachable")
"""What can have become of a rank: see `PeerError.reason`."""

_NAMED = 16


@dataclass(frozen=True)
class Fault:
    """A fault of a rank.

    Attributes:
        rank: in its group.
        reason: one of `REASONS`.
        text: what more is known, such as an error's class and text, or what the rank did last.
        call: of a rank that raised and goes on: which call of the group's steps it left; None for what is final.
        attempt: which attempt at that call it was, from 1 on: who has dealt with an error makes the call once more.
        after_s: how many seconds after the first fault it was noticed: what comes later may have come of that.
        calls: of a rank that left: how many calls of the group's steps it has been through.
        because: the ranks that it gave up waiting for, and left for: which, and what had become of each.
        suspected: its monitor is silent or gone. The rank itself may be well: only who waits for it believes this.
    """

    rank: int
    reason: str
    text: str = ""
    call: int | None = None
    suspected: bool = False
    after_s: float = 0.0
    calls: int = 0
    because: tuple[tuple[int, str], ...] = ()
    attempt: int = 1

    def as_json(self) -> dict[str, Any]:
        """The fault as values for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any) -> Fault:
        """The fault that `as_json` wrote.

        Raises:
            ValueError: something else.
        """
        try:
            call = found["call"]
            made = cls(
                int(found["rank"]), str(found["reason"]), str(found["text"])[:2000],
                None if call is None else int(call), bool(found["suspected"]), float(found["after_s"]),
                int(found["calls"]), tuple((int(rank), str(why)) for rank, why in found["because"][:_NAMED]),
                int(found["attempt"]),
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("no fault") from error
        if not {made.reason, *(why for _, why in made.because)} <= set(REASONS):
            raise ValueError("no fault")
        return made


def order_by_cause(faults: Sequence[Fault]) -> list[Fault]:
    """Put causes before their consequences, and keep the order in which faults were noticed otherwise.

    A rank may have left for a fault that was withdrawn since: a frozen rank was killed, and is not known to be dead
    yet. Then the cause is listed as the rank that left has seen it.

    Example:
        >>> left, died = Fault(0, "left", because=((1, "frozen"),)), Fault(1, "died")
        >>> [(fault.rank, fault.reason) for fault in order_by_cause([left, died])]
        [(1, 'died'), (0, 'left')]
        >>> [(fault.rank, fault.reason) for fault in order_by_cause([left])]
        [(1, 'frozen'), (0, 'left')]
    """
    known = {fault.rank: fault for fault in faults}
    begun: set[int] = set()
    ordered: list[Fault] = []

    def put(fault: Fault) -> None:
        if fault.rank in begun:
            return
        begun.add(fault.rank)
        for rank, why in fault.because:
            text = f"rank {fault.rank} has left for that"
            put(known.get(rank) or Fault(rank, why, text, after_s=fault.after_s))
        ordered.append(fault)

    for fault in faults:
        put(fault)
    return ordered


def with_causes(believed: Sequence[Fault], known: Sequence[Fault]) -> list[Fault]:
    """The faults that are believed, and the faults that made a rank leave: that rank had believed them.

    Example:
        >>> frozen, left = Fault(1, "frozen"), Fault(0, "left", because=((1, "frozen"),))
        >>> [fault.rank for fault in with_causes([left], [frozen, left])]
        [1, 0]
    """
    ranks = {fault.rank for fault in believed}
    unseen = list(believed)
    while unseen:
        causes = {rank for rank, _ in unseen.pop().because} - ranks
        ranks |= causes
        unseen += [fault for fault in known if fault.rank in causes]
    return [fault for fault in known if fault.rank in ranks]
