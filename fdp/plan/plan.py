"""The plan of a step, as values: buckets, and the order in which operations, starts and waits follow each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fdp.distributed.collective import COLLECTIVES, Collective
from fdp.distributed.mesh import WHOLE, text_along
from fdp.errors import ArgumentError, build_message
from fdp.plan.cost.costs import Costs
from fdp.plan.cost.estimate import estimate
from fdp.plan.cost.forecast import Forecast
from fdp.plan.cost.network import Network
from fdp.tables import Printed, Table, count, format_bytes, short_name
from fdp.timeline.timeline import Timeline
from fdp.trace.trace import Trace
from fdp.tracebacks import hiding_frames

if TYPE_CHECKING:
    from fdp.distributed.group import Ranks
    from fdp.emit.memory.memory_plan import MemoryPlan
    from fdp.emit.memory.peak import MemoryForecast
    from fdp.runtime import Emitted


@dataclass(frozen=True, repr=False)
class Bucket:
    """Reductions that share a message.

    Attributes:
        index: position among the buckets, which is the order in which they start on every rank.
        op: the name of its collective, as of a `Reduction`.
        root: the root rank of a broadcast, else 0.
        dtype: the dtype that all of it is sent in.
        device: device of all of it.
        members: indices of its reductions in `Trace.reductions`, in production order.
        offsets: where each member begins, in elements; of several rows, in each of them.
        numel: elements that this rank contributes, with what lies between members so that each begins aligned.
        size_bytes: bytes of its members on this rank, as they are sent.
        accumulate_dtype: the dtype that it is added up in, if that is not the one that it is sent in.
        rows: of how many equal rows it consists: one for each rank where values are split between ranks, each with that
            rank's part of every member; else 1.
        pairs: of a permutation, which rank sends to which.
        along: the dimension of the mesh along which ranks exchange it; `WHOLE` for all ranks.
        pieces: where it is reduced in two levels, within hosts and between them, in how many pieces: one for each rank
            of a host. Otherwise 0.
    """

    index: int
    op: str
    root: int
    dtype: torch.dtype
    device: torch.device
    members: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    size_bytes: int
    accumulate_dtype: torch.dtype | None = None
    rows: int = 1
    pairs: tuple[tuple[int, int], ...] = ()
    along: str = WHOLE
    pieces: int = 0

    @property
    def collective(self) -> Collective:
        """The collective of its message."""
        return COLLECTIVES[self.op]

    @property
    def op_along(self) -> str:
        """Its collective, with the dimension of the mesh that it is along."""
        return text_along(self.op, self.along)

    @property
    def is_wide(self) -> bool:
        """Whether it takes two messages of its size: members go to the ranks that add them up in a wider dtype, and the
        means come back."""
        return self.accumulate_dtype is not None and self.collective.in_place

    @property
    def has_stages(self) -> bool:
        """Whether it takes several messages, one after the other."""
        return self.is_wide or self.pieces > 0

    @property
    def row_numel(self) -> int:
        """Elements of a row."""
        return self.numel // self.rows

    def __repr__(self) -> str:
        what = f"{self.op_along} of {count(len(self.members), 'value')}, {format_bytes(self.size_bytes)}"
        return f"<Bucket {self.index}: {what}, {str(self.dtype).removeprefix('torch.')} on {self.device}>"


@dataclass(frozen=True)
class Run:
    """Run an operation; several indices are entries of one operator call.

    Attributes:
        operations: indices in `Trace.operations`.
    """

    operations: tuple[int, ...]


@dataclass(frozen=True)
class Start:
    """Pack a bucket and start its collective."""

    bucket: int


@dataclass(frozen=True)
class Wait:
    """Wait for the collective of a bucket; from here on its results may be read."""

    bucket: int


Item = Run | Start | Wait


@dataclass(frozen=True, repr=False)
class Plan(Printed):
    """The order of everything in a step; made without a process group, and the same on every rank.

    Attributes:
        trace: what was planned.
        buckets: the messages, in the order in which they start.
        schedule: every operation, start and wait, in order.
        bucket_cap_mb: the caps that it was planned for, in MiB: of the first bucket, the next, ...; the last
            one holds for all that follow. Empty if buckets were chosen by what they cost.
        forecast: the network and the costs that it was planned for, and what it is expected to take; None if it was
            planned without.
        bodies: plans of the bodies of `Trace.loops`, one each; none of a plan that is only simulated.
    """

    trace: Trace
    buckets: tuple[Bucket, ...]
    schedule: tuple[Item, ...]
    bucket_cap_mb: tuple[float, ...]
    forecast: Forecast | None = None
    bodies: tuple[Plan, ...] = ()

    @property
    def messages(self) -> str:
        """The schedule as ranks compare it: one line for each reduction, in the order in which they are sent."""
        lines = []
        for bucket in self.buckets:
            op = f"{bucket.op_along} from rank {bucket.root}" if bucket.collective.rooted else bucket.op_along
            if bucket.pieces:
                op += f" in {bucket.pieces} pieces"
            if bucket.collective.paired:
                op += f" of {', '.join(f'{source} to {destination}' for source, destination in bucket.pairs)}"
            for member in bucket.members:
                reduction = self.trace.reductions[member]
                lines.append(
                    f"bucket {bucket.index}, {op}: {reduction.name} {list(reduction.shape)} {bucket.dtype} on "
                    f"{bucket.device.type}" + self._added_in(bucket)
                )
        if any(bucket.is_wide for bucket in self.buckets):
            # Their second messages are sent between others: at which, the order of starts and waits says.
            order = (str(item) for item in self.schedule if isinstance(item, (Start, Wait)))
            lines.append(f"order: {', '.join(order)}")
        return "\n".join(lines)

    def _added_in(self, bucket: Bucket) -> str:
        if bucket.accumulate_dtype is None:
            return ""
        return f", added in {str(bucket.accumulate_dtype).removeprefix('torch.')}"

    @hiding_frames
    def emit(self, group: Ranks = None, compile: bool | Mapping[str, object] = False) -> Emitted:
        """Make the function that carries the plan out.

        Args:
            group: the ranks to run on, as for `data_parallel`; None for the default process group. It must have
                as many ranks as the step was traced for.
            compile: as for `data_parallel`. What is compiled here is not compared with anything, and other ranks do
                not wait for it: their first call may.

        Returns:
            A function of the step's arguments; its attribute `source` is the program that it runs.

        Raises:
            ArgumentError: the group has another size, or an option has no meaning.
            CompileError: the compiler cannot take an operator.
        """
        from fdp.runtime.emitted import emit_plan

        return emit_plan(self, group, compile)

    @hiding_frames
    def memory(self) -> MemoryForecast:
        """Predict what a rank holds in memory while the step runs operator by operator.

        Returns:
            The prediction, in bytes: state, batch, the block that the step keeps, and what lies elsewhere. It prints as
            a table, and `draw(path)` shows it against time. `Emitted.memory` says what lies where in the block.

        Example:
            >>> import torch, fdp
            >>> step = fdp.data_parallel(lambda w, x: w - 0.1 * fdp.grad(lambda w: (x @ w).square().mean())(w))
            >>> step.plan(torch.ones(256, 256), torch.ones(4, 256)).memory().devices[0].state_bytes
            262144
        """
        from fdp.emit.memory.peak import forecast_memory

        return forecast_memory(self)

    def memory_plan(self) -> MemoryPlan:
        """Decide where each value lies while the step runs operator by operator, from when to when, and why.

        Returns:
            The decisions. They print as a table, and `draw(path)` shows address against time.

        Example:
            >>> import torch, fdp
            >>> step = fdp.data_parallel(lambda w, x: w - 0.1 * fdp.grad(lambda w: (x @ w).square().mean())(w))
            >>> step.plan(torch.ones(256, 256), torch.ones(4, 256)).memory_plan()
            <MemoryPlan of <lambda>: 6 pieces, 260.0 KiB>
        """
        from fdp.emit.memory.decisions import plan_memory

        return plan_memory(self, communicates=self.trace.world_size > 1)

    @hiding_frames
    def timeline(
        self, network: Network | None = None, world_size: int | None = None, costs: Costs | None = None
    ) -> Timeline:
        """Predict when everything happens, without running it.

        Args:
            network: between the ranks; None for the one that was planned for.
            world_size: number of ranks; None for as many as were planned for. Another number asks what the same plan
                would do on so many ranks with the same batch on each.
            costs: seconds of every operation; None for those that were planned with, or without any for an estimate on
                the default `Machine`, a data-centre accelerator.

        Returns:
            The `Timeline`: what computes and what is under way at any time.

        Raises:
            ArgumentError: there is no network; or the costs are those of another trace.
        """
        if self.forecast is not None:
            network, costs = network or self.forecast.network, costs or self.forecast.costs
            world_size = self.forecast.world_size if world_size is None else world_size
        if network is None:
            raise ArgumentError(
                build_message(
                    f"the timeline of step {self.trace.name!r} without a network.",
                    remedy="pass network=fdp.Network(latency_s=..., bandwidth_bytes_per_s=...).",
                )
            )
        from fdp.plan.simulate import simulate

        return simulate(self, costs or estimate(self.trace), network, world_size)

    def __repr__(self) -> str:
        total = format_bytes(sum(bucket.size_bytes for bucket in self.buckets))
        return (
            f"<Plan of {short_name(self.trace.name)}: {count(len(self.buckets), 'bucket')}, {total}, "
            f"{count(self.trace.world_size, 'rank')}>"
        )

    def __str__(self) -> str:
        caps = ", ".join(f"{cap:g}" for cap in self.bucket_cap_mb)
        caps = f"caps {caps} MiB" if caps else "chosen by cost"
        total = sum(bucket.size_bytes for bucket in self.buckets)
        title = (
            f"Plan of {self.trace.name} ({self.trace.source}), {count(self.trace.world_size, 'rank')}: "
            f"{count(len(self.buckets), 'bucket')}, {format_bytes(total)}, {caps}"
        )
        table = Table(title, ("bucket", "op", "dtype", "gradients", "bytes", "starts after", "waited for before"))
        starts, waits = self._neighbours()
        for bucket in self.buckets:
            table.add(
                bucket.index, bucket.op_along + ", two levels" * (bucket.pieces > 0),
                str(bucket.dtype).removeprefix("torch.") + self._added_in(bucket),
                self._contents(bucket),
                bucket.size_bytes, starts[bucket.index], waits[bucket.index],
            )  # fmt: skip
        return str(table) if self.forecast is None else f"{table}\n{self.forecast}"

    def _contents(self, bucket: Bucket) -> str:
        parts = []
        for kind, gradient in (("gradient", True), ("other value", False)):
            names = [
                self.trace.reductions[member].name
                for member in bucket.members
                if (self.trace.reductions[member].kind == "gradient") is gradient
            ]
            shown = names if len(names) <= 4 else [names[0], f"... {len(names) - 2} more ...", names[-1]]
            if names:
                parts.append(f"{count(len(names), kind)}: {', '.join(shown)}")
        return "; ".join(parts)

    def _neighbours(self) -> tuple[dict[int, str], dict[int, str]]:
        """For each bucket, the operation that it starts after and the one that it is waited for before."""
        starts: dict[int, str] = {}
        waits: dict[int, str] = {}
        before, asking = "the beginning", list[int]()
        for item in self.schedule:
            if isinstance(item, Start):
                starts[item.bucket] = before
            elif isinstance(item, Wait):
                asking.append(item.bucket)
            elif not self.trace.operations[item.operations[0]].view:
                before = self._describe(item)
                waits.update(dict.fromkeys(asking, before))
                asking.clear()
        waits.update(dict.fromkeys(asking, "the end"))
        return starts, waits

    def _describe(self, run: Run) -> str:
        operation = self.trace.operations[run.operations[0]]
        name = operation.target.removeprefix("aten.").rsplit(".", 1)[0]
        many = f" of {len(run.operations)}" if operation.entry is not None else ""
        return f"#{run.operations[-1]} {name}{many}" + (f" ({operation.source})" if operation.source else "")
