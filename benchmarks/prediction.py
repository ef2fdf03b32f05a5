"""What fdp predicts of a contender's step, from what it measures by itself: its operations, and the network."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from contenders import Contender

from fdp.distributed.group import resolve_group
from fdp.measure import measure_agreed_costs, measure_network
from fdp.plan import Network


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A predicted step.

    Attributes:
        step_s: seconds of the step.
        exposed_s: seconds of it in which messages are under way and nothing is computed.
        buckets_mib: the size of each bucket of its plan.
        network: as it was measured.
    """

    step_s: float
    exposed_s: float
    buckets_mib: list[float]
    network: Network


def predict(running: Contender) -> Prediction | None:
    """Predicts the step of a contender on all ranks of its group, which call this together.

    Args:
        running: the contender.

    Returns:
        The prediction; None of a contender that has no plan, or no other ranks.
    """
    if running.planned is None or not dist.is_initialized():
        return None
    plan, tensors = running.planned()
    network = measure_network(resolve_group(None), torch.device("cpu"))
    costs = measure_agreed_costs(plan.emit(), tensors)
    timeline = plan.timeline(network, costs=costs)
    sizes = [bucket.size_bytes / 2**20 for bucket in plan.buckets]
    return Prediction(timeline.step_s, timeline.exposed_s, sizes, network)
