"""Predictions of a step on other numbers of ranks, compared with DDP under one cost model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fdp.errors import ArgumentError, build_message
from fdp.plan.build import plan_trace
from fdp.plan.cost.costs import Costs
from fdp.plan.cost.estimate import estimate
from fdp.plan.cost.network import Network, network_text, rank_count
from fdp.plan.ddp import plan_as_ddp
from fdp.plan.plan import Plan
from fdp.plan.simulate import simulate
from fdp.tables import Printed, Table, count, ms, short_name
from fdp.tracebacks import hiding_frames

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORLD_SIZES = tuple(2**k for k in range(11))


@dataclass(frozen=True, repr=False)
class Scale:
    """A step on one number of ranks.

    Attributes:
        world_size: number of ranks.
        planned_s: seconds of a step with the buckets of the plan.
        replanned_s: seconds of a step with buckets that were planned for this number of ranks.
        replanned_buckets: how many those are.
        ddp_s: seconds of a step of DDP as it is by default.
    """

    world_size: int
    planned_s: float
    replanned_s: float
    replanned_buckets: int
    ddp_s: float

    def __repr__(self) -> str:
        seconds = f"{ms(self.planned_s)} ms, replanned {ms(self.replanned_s)} ms, DDP {ms(self.ddp_s)} ms"
        return f"<Scale of {count(self.world_size, 'rank')}: {seconds}>"


@dataclass(frozen=True, repr=False)
class Scaling(Printed):
    """A step on several numbers of ranks, each of which has the batch that it was planned with (weak scaling).

    Attributes:
        name: the user's function.
        alone_s: seconds that a rank computes when there is no other: what efficiency is measured by.
        network: between the ranks.
        origin: of the costs, "measured" or "estimated".
        buckets: how many the plan has.
        ddp_buckets: how many DDP has.
        planned_for: the number of ranks that the plan was made for.
        scales: one for each number of ranks.
    """

    name: str
    alone_s: float
    network: Network
    origin: str
    buckets: int
    ddp_buckets: int
    planned_for: int
    scales: tuple[Scale, ...]

    def efficiency(self, step_s: float) -> float:
        """The work of a rank in a second, as a share of its work when alone.

        Args:
            step_s: seconds of the step.

        Returns:
            The share: 1 is perfect.
        """
        return self.alone_s / step_s if step_s else 1.0

    def draw(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the time of a step, and the efficiency, against the number of ranks.

        Args:
            path: the file to write, whose suffix says how: .png, .svg or .pdf; None writes nothing.

        Returns:
            The figure, of matplotlib.

        Raises:
            ArgumentError: matplotlib is not installed, or the suffix names no kind of picture.
        """
        from fdp.plan.scaling_picture import draw_scaling

        return draw_scaling(self, path)

    def __repr__(self) -> str:
        sizes = [str(scale.world_size) for scale in self.scales]
        shown = ", ".join(sizes if len(sizes) <= 4 else [*sizes[:2], "...", sizes[-1]])
        return f"<Scaling of {short_name(self.name)}: {shown} rank{'' if shown == '1' else 's'}>"

    def __str__(self) -> str:
        title = (
            f"Scaling of {self.name}, {self.origin} costs: a rank alone computes {ms(self.alone_s)} ms; "
            f"{count(self.buckets, 'bucket')} as planned, {self.ddp_buckets} of DDP\n{network_text(self.network)}"
        )
        steps = ("as planned, ms", "replanned, ms", "DDP, ms")
        shares = ("efficiency", "replanned", "DDP")
        table = Table(title, ("ranks", *steps, "buckets replanned", *shares))
        for scale in self.scales:
            seconds = (scale.planned_s, scale.replanned_s, scale.ddp_s)
            table.add(
                scale.world_size, *map(ms, seconds), scale.replanned_buckets,
                *(f"{self.efficiency(step_s):.1%}" for step_s in seconds),
            )  # fmt: skip
        return str(table)


@hiding_frames
def scaling(
    plan: Plan, *, network: Network, world_sizes: Sequence[int] = WORLD_SIZES, costs: Costs | None = None
) -> Scaling:
    """Predict the step on other numbers of ranks, for fdp and for DDP's default, on one model of costs.

    Each rank keeps its batch. fdp is shown twice: with the buckets of `plan`, and with those that "auto" chooses for
    each number of ranks. DDP has a first bucket of 1 MiB and then 25 MiB, copies gradients into its buckets and out
    of them, and runs the optimizer after the last wait. There are no stragglers, and nothing else is on the network.

    Args:
        plan: of the step; it may be traced for any number of ranks.
        network: between the ranks.
        world_sizes: numbers of ranks.
        costs: seconds of its operations; None for those that the plan was made with, or without any for an estimate on
            the default `Machine`.

    Returns:
        The figures, to print and to draw.

    Raises:
        ArgumentError: there is no such number of ranks, or the costs are those of another trace.

    Example:
        >>> import torch, fdp
        >>> step = fdp.data_parallel(lambda w, x: fdp.grad(lambda w: (x @ w).square().mean())(w))
        >>> plan = step.plan(torch.ones(1024, 1024), torch.ones(64, 1024))
        >>> network = fdp.Network(latency_s=5e-6, bandwidth_bytes_per_s=12.5e9)
        >>> [scale.world_size for scale in fdp.scaling(plan, network=network, world_sizes=[1, 8, 64]).scales]
        [1, 8, 64]
    """
    try:
        sizes = [rank_count(size) for size in world_sizes]
    except TypeError:
        sizes = []
    if not sizes:
        raise ArgumentError(
            build_message(
                f"fdp.scaling() with world_sizes={world_sizes!r}.",
                remedy="pass a sequence of numbers of ranks, at least one: world_sizes=[8, 16].",
            )
        )
    if costs is None:
        costs = estimate(plan.trace) if plan.forecast is None else plan.forecast.costs
    ddp, ddp_costs = plan_as_ddp(plan.trace, costs)
    scales = []
    for size in sizes:
        planned = simulate(plan, costs, network, size)
        replanned = plan_trace(plan.trace, "auto", costs, network, size)
        scales.append(
            Scale(
                size,
                planned.step_s,
                simulate(replanned, costs, network, size).step_s,
                len(replanned.buckets),
                simulate(ddp, ddp_costs, network, size).step_s if size > 1 else planned.step_s,
            )
        )
    return Scaling(
        name=plan.trace.name,
        alone_s=simulate(plan, costs, network, 1).step_s,
        network=network,
        origin=costs.origin,
        buckets=len(plan.buckets),
        ddp_buckets=len(ddp.buckets),
        planned_for=plan.trace.world_size if plan.forecast is None else plan.forecast.world_size,
        scales=tuple(scales),
    )
