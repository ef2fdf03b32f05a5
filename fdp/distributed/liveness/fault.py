"""What became of a rank, as monitors tell it each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

REASONS = ("died", "frozen", "raised", "left", "unreachable")
"""What can have become of a rank: see `PeerError.reason`."""

_NAMED = 16


@dataclass(frozen=True)
class Fault:
    """What became of a rank.

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
        """What JSON knows of."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Any) -> Fault:
        """What `as_json` made.

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


def causes_first(told: Sequence[Fault]) -> list[Fault]:
    """Faults in the order in which they came of each other, and otherwise in the one in which they were noticed.

    What a rank left for may have been taken back since: a frozen rank was killed, and is not known to be dead yet. Then
    it is told as the one that left has found it.

    Example:
        >>> left, died = Fault(0, "left", because=((1, "frozen"),)), Fault(1, "died")
        >>> [(fault.rank, fault.reason) for fault in causes_first([left, died])]
        [(1, 'died'), (0, 'left')]
        >>> [(fault.rank, fault.reason) for fault in causes_first([left])]
        [(1, 'frozen'), (0, 'left')]
    """
    known = {fault.rank: fault for fault in told}
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

    for fault in told:
        put(fault)
    return ordered


def with_causes(believed: Sequence[Fault], known: Sequence[Fault]) -> list[Fault]:
    """The faults that are believed, and those for which a rank has left: it had looked at them, and believed them.

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
