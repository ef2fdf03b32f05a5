"""The costs and the network that a plan was made for, and its predicted time, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from fdp.plan.cost.costs import Costs
from fdp.plan.cost.network import Network, network_text
from fdp.tables import Printed, count, heading, ms


@dataclass(frozen=True)
class Alternative:
    """Buckets that the planner considered, with their predicted time.

    Attributes:
        name: the caps, as one would pass them to `bucket_cap_mb`; or how else they were chosen.
        buckets: their number.
        step_s: seconds of a step, simulated.
        exposed_s: seconds of it in which messages are under way and nothing is computed.
    """

    name: str
    buckets: int
    step_s: float
    exposed_s: float


@dataclass(frozen=True, repr=False)
class Forecast(Printed):
    """The simulation that a plan rests on.

    Attributes:
        network: between the ranks.
        world_size: number of ranks.
        costs: of the step's operations.
        chosen: the plan itself.
        alternatives: what fixed caps would have given; empty if the caps were the user's.
        optimal: whether it is proven that no way to cut the gradients into buckets gives an earlier end under these
            costs, on this network.
    """

    network: Network
    world_size: int
    costs: Costs
    chosen: Alternative
    alternatives: tuple[Alternative, ...] = ()
    optimal: bool = False

    def __repr__(self) -> str:
        return f"<Forecast for {count(self.world_size, 'rank')}: a step of {ms(self.chosen.step_s)} ms>"

    def __str__(self) -> str:
        compute_s = sum(self.costs.operations_s)
        lines = [
            f"Expected with {self.costs.origin} costs ({ms(compute_s)} ms of computing) on "
            f"{count(self.world_size, 'rank')} ({network_text(self.network)}): a step of {ms(self.chosen.step_s)} ms, "
            f"{ms(self.chosen.exposed_s)} ms of it exposed"
        ]
        if self.optimal:
            lines[0] += "; no other buckets end earlier"
        for other in self.alternatives:
            name = other.name if other.name.startswith("auto") else f"caps {other.name} MiB"
            lines.append(
                f"  {name}: {ms(other.step_s)} ms, {ms(other.exposed_s)} ms exposed, {count(other.buckets, 'bucket')}"
            )
        return heading("\n".join(lines))
