"""Costs and messages in whole nanoseconds, so that sums do not depend on their order.

The simulator and the planner add up the same seconds in different orders. In whole numbers they get the same sums, so
the planner can prove that no other plan ends earlier. (Where messages slow computing down, times are not whole.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fdp.distributed.collective import COLLECTIVES
from fdp.distributed.mesh import Dimensions, text_along
from fdp.errors import ArgumentError, build_message
from fdp.plan.cost.costs import Costs
from fdp.plan.cost.network import Network
from fdp.trace.trace import Trace

TICKS_PER_S = 1e9


@dataclass(frozen=True)
class Ticks:
    """The nanoseconds of all operations and messages of a step on a network: whole numbers, as floats.

    Attributes:
        operations: for each of `Trace.operations`; nothing for views and reductions.
        start: to start a message, on the compute lane.
        pack: to copy each of `Trace.reductions` into its bucket, on the compute lane.
        on_link: what the bytes of each of `Trace.reductions` take on the link.
        latency: for each operation of a message, and dimension that it is along, what it takes without its bytes.
        in_flight: as in `Network`.
        slowdown: as `compute_slowdown` in `Network`.
        silent: there is one rank: no bucket is packed, and no message sent.
    """

    operations: tuple[float, ...]
    start: float
    pack: tuple[float, ...]
    on_link: tuple[float, ...]
    latency: dict[str, float]
    in_flight: int
    slowdown: float
    silent: bool

    def message(self, op: str, on_link: float) -> tuple[float, float]:
        """The time of a message whose bytes take `on_link`, and the time that it occupies the link."""
        whole = self.latency[op] + on_link
        return whole, whole if self.in_flight == 1 else max(on_link, float(round(whole / self.in_flight)))


def _in_two_levels(op: str, dimensions: Dimensions, parts: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    """The costs of a sum or mean over a mesh that goes within hosts and between them; small ones do not, and cost less.

    Args:
        op: it.
        dimensions: of the mesh.
        parts: the costs of each collective along each dimension: seconds for any size, and for each byte.
    """
    *between, (within, size) = dimensions
    stages = [(parts[text_along(f"{op}_scatter", within)], 1.0), (parts[text_along("all_gather", within)], 1 / size)]
    stages += [(parts[text_along(op, name)], 1 / size) for name, _ in between]
    latency_s = sum(stage_s for (stage_s, _), _ in stages)
    return latency_s, sum(s_per_byte * share for (_, s_per_byte), share in stages)


def ticks_of(trace: Trace, costs: Costs, network: Network, world_size: int) -> Ticks:
    """Round the costs of a step to ticks.

    Args:
        trace: of the step.
        costs: of its operations.
        network: between its ranks.
        world_size: number of ranks.

    Returns:
        The same in nanoseconds.

    Raises:
        ArgumentError: the costs are those of another trace, or below zero; or what is given is of another type.
    """
    given = {"network": (network, Network), "costs": (costs, Costs)}
    if other := [f"{name}={value!r:.80}" for name, (value, kind) in given.items() if not isinstance(value, kind)]:
        raise ArgumentError(
            build_message(
                f"step {trace.name!r} cannot be simulated with these arguments.",
                other,
                remedy="pass network=fdp.Network(latency_s=..., bandwidth_bytes_per_s=...), and costs of fdp's own or "
                "none.",
            )
        )
    if len(costs.operations_s) != len(trace.operations):
        raise ArgumentError(
            build_message(
                f"costs of {len(costs.operations_s)} operations for step {trace.name!r}, which has "
                f"{len(trace.operations)}.",
                remedy="pass costs that were estimated or measured for this trace.",
            )
        )
    numbers = {"start_s": costs.start_s, "pack_s_per_byte": costs.pack_s_per_byte}
    numbers |= {f"operations_s[{index}]": seconds for index, seconds in enumerate(costs.operations_s)}
    wrong = [f"{name}: {value!r}" for name, value in numbers.items() if not 0 <= value < math.inf]
    if wrong:
        raise ArgumentError(
            build_message(
                f"costs for step {trace.name!r} that have no meaning.", wrong, remedy="pass seconds, 0 or more."
            )
        )
    parts = {op: network.parts(op, world_size) for op in COLLECTIVES}
    stride = 1
    for dimension, size in reversed(trace.dimensions):
        parts |= {text_along(op, dimension): network.parts_along(op, size, stride, world_size) for op in COLLECTIVES}
        stride *= size
    if len(trace.dimensions) > 1:
        parts |= {op: _in_two_levels(op, trace.dimensions, parts) for op in ("sum", "mean")}
    silent = world_size == 1
    return Ticks(
        operations=tuple(
            0.0 if operation.view or operation.reduction is not None else float(round(seconds * TICKS_PER_S))
            for operation, seconds in zip(trace.operations, costs.operations_s, strict=True)
        ),
        start=0.0 if silent else float(round(costs.start_s * TICKS_PER_S)),
        pack=tuple(
            0.0 if silent else float(round(costs.pack_s_per_byte * reduction.size_bytes * TICKS_PER_S))
            for reduction in trace.reductions
        ),
        on_link=tuple(
            float(round(parts[reduction.op_along][1] * reduction.size_bytes * TICKS_PER_S))
            for reduction in trace.reductions
        ),
        latency={op: float(round(latency_s * TICKS_PER_S)) for op, (latency_s, _) in parts.items()},
        in_flight=network.in_flight,
        slowdown=network.compute_slowdown,
        silent=silent,
    )
