"""The costs of a step's parts on a rank, in seconds, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from fdp.tables import count, ms


@dataclass(frozen=True, repr=False)
class Costs:
    """Seconds for everything that a plan's schedule runs on this rank.

    Attributes:
        operations_s: one entry for each of `Trace.operations`; zero for views and reductions.
        start_s: seconds to start one message, on the compute lane.
        pack_s_per_byte: seconds for each byte that is copied into a bucket, on the compute lane.
        origin: "measured" or "estimated".
    """

    operations_s: tuple[float, ...]
    start_s: float
    pack_s_per_byte: float
    origin: str

    def __repr__(self) -> str:
        operations = count(len(self.operations_s), "operation")
        return f"<Costs of {operations}: {ms(sum(self.operations_s))} ms of computing, {self.origin}>"
