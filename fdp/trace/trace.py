"""The trace of a step, as values: inputs, outputs, operations, and the reductions in production order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx

from fdp import pytree
from fdp.distributed.collective import COLLECTIVES, Collective
from fdp.distributed.mesh import WHOLE, mesh_text, place_along, sharded_along, text_along
from fdp.distributed.wire import Wire
from fdp.errors import ArgumentError, build_message
from fdp.state.containers import PLAIN, Container, Role
from fdp.state.shards import Part
from fdp.tables import Printed, Table, count, cut_short, format_bytes, heading, short_name
from fdp.trace.operators.effects import storages_of
from fdp.trace.sharding.inserted import Link
from fdp.tracebacks import hiding_frames

if TYPE_CHECKING:
    from fdp.plan import Costs, Network, Plan
    from fdp.plan.buckets import Caps


@dataclass(frozen=True, repr=False)
class Input:
    """A tensor that goes into the step.

    Attributes:
        name: key path, such as `state['params']['w']`.
        shape: its shape.
        dtype: its dtype.
        device: its device.
        stride: its strides, in elements.
        offset: where it begins in its memory, in elements.
        role: "batch" (differs from rank to rank), "state" (equal on every rank), "per rank" (labelled state) or "part"
            (this rank's part of sharded state, of which shape, strides and offset are told).
        donated: whether the step may write its new value into it.
        shares_memory: whether it overlaps itself or another input, so that writing into it is unsafe.
        part: how sharded state is divided; None for what is whole.
        container: the one that it lies in outside of the step.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]
    offset: int
    role: Literal["batch"] | Role
    donated: bool
    shares_memory: bool
    part: Part | None = None
    container: Container = PLAIN

    def __repr__(self) -> str:
        return f"<Input {cut_short(self.name)}: {self.role}, {_short(self.dtype)} {list(self.shape)} on {self.device}>"

    @property
    def replicated(self) -> bool:
        """Whether all ranks hold the same bits."""
        return self.role == "state"


@dataclass(frozen=True, repr=False)
class Output:
    """A leaf of what the step returns.

    Attributes:
        name: key path, such as `output[0]['params']['w']`.
        node: the operation that makes it; None for a leaf that is no tensor.
        shape: its shape, None if it is no tensor.
        dtype: its dtype, None if it is no tensor.
        varying: whether it may differ from rank to rank.
        per_rank: whether it was declared with `fdp.per_rank`.
        constant: the leaf itself, if it is no tensor.
        slot: the index of the donated input whose memory its value goes to, if there is one.
        part: how it is divided, if it comes out sharded: it takes the place of a sharded input.
        container: that of the input that it is the new value of, or that the step put it into.
    """

    name: str
    node: str | None
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    varying: bool
    per_rank: bool
    constant: Any = None
    slot: int | None = None
    part: Part | None = None
    container: Container = PLAIN

    def __repr__(self) -> str:
        shape = "constant" if self.shape is None else f"{_short(self.dtype)} {list(self.shape)}"
        return f"<Output {cut_short(self.name)}: {shape}, {'varying' if self.varying else 'replicated'}>"

    @property
    def labelled(self) -> bool:
        """Whether it comes out labelled: it takes the place of a labelled input."""
        return self.container.role == "per rank"


@dataclass(frozen=True, repr=False)
class Operation:
    """One operator call, or one entry (of the lists) of a call that can be taken apart.

    Attributes:
        node: the name of its node in the graph.
        target: the operator.
        needs: indices of the operations that must have run before it: those that make what it reads, and those
            that must not see what it writes. All are smaller than its own index.
        entry: which entry of the lists, None for a call that stays whole.
        reduction: index of the reduction that it is, None for an operator that runs on this rank alone.
        view: whether it only looks at its argument under another shape, at no cost.
        backward: whether autograd called it in a backward pass.
        source: the line of the user's code that it comes from, as text.
    """

    node: str
    target: str
    needs: tuple[int, ...]
    entry: int | None = None
    reduction: int | None = None
    view: bool = False
    backward: bool = False
    source: str = ""

    def __repr__(self) -> str:
        return f"<Operation {cut_short(self.node, 30)}: {cut_short(self.target, 30)}>"


@dataclass(frozen=True, repr=False)
class Reduction:
    """A value that ranks combine: a gradient, a metric, a statistic, or what a derivative sends back.

    Attributes:
        name: key path of the parameter for a gradient, else the collective with the key path in its argument.
        kind: "gradient", "value", "transpose" (of a collective that was differentiated) or "tangent" (of one that was
            differentiated forwards).
        op: the name of its collective: "mean", "sum", "max", "min", "all_gather", "broadcast", "sum_scatter",
            "mean_scatter", "all_to_all" or "permute".
        root: the root rank of a broadcast, else 0.
        shape: shape on one rank; of what is split between ranks, with a row for each rank first.
        dtype: the dtype that it is sent in.
        device: its device.
        size_bytes: bytes that one rank contributes; those of the wire, if it is sent in a narrower dtype than its own.
        accumulate_dtype: the dtype that it is added up in, if that is not the one that it is sent in.
        produced_by: the operator that makes it.
        position: index of the operation that makes it; reductions are sorted by it.
        operation: index of the operation that it is.
        source: the line of the user's code that it comes from, as text.
        pairs: of a permutation, which rank sends to which.
        along: the dimension of the mesh along which ranks combine it; `WHOLE` for all ranks.
    """

    name: str
    kind: str
    op: str
    root: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    size_bytes: int
    produced_by: str
    position: int
    operation: int
    source: str
    accumulate_dtype: torch.dtype | None = None
    pairs: tuple[tuple[int, int], ...] = ()
    along: str = WHOLE

    def __repr__(self) -> str:
        return f"<Reduction {cut_short(self.name)}: {self.op_along} of {_short(self.dtype)} {list(self.shape)}>"

    @property
    def collective(self) -> Collective:
        """How ranks combine it."""
        return COLLECTIVES[self.op]

    @property
    def op_along(self) -> str:
        """Its collective, with the dimension of the mesh that it is along."""
        return text_along(self.op, self.along)

    @property
    def numel(self) -> int:
        """Number of elements on one rank."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Loop:
    """A loop of a step: a body, and how often it runs.

    Attributes:
        node: the name of the node that stands for it in the graph.
        count: how many times.
        body: one time, as a trace of its own: its first input is the number of the time, the others are the arguments
            of the node, some of which it changes in place.
    """

    node: str
    count: int
    body: Trace


@dataclass(frozen=True, repr=False)
class Trace(Printed):
    """Everything that a step does, as a value; nothing was computed for it.

    Attributes:
        name: the user's function.
        source: the line where it is defined, as text.
        world_size: number of ranks that it was traced for.
        inputs: every tensor that goes in.
        outputs: every leaf that comes out.
        operations: every operator call in the order of the user's program.
        reductions: everything that ranks combine, in the order in which it is produced.
        replicated_constants: non-tensor arguments, by key path; part of what ranks compare.
        closed_over: tensors that the step uses without being passed them: attribute of `graph`, and name.
        replicated_calls: the calls that replicated results come from, numbers and all, as ranks compare them.
        graph: the graph itself, of operators on example values. Read it; do not change it.
        in_spec: tree structure of the arguments.
        out_spec: tree structure of what the step returns.
        wire: in which dtype gradients are sent; None for their own.
        loops: what it does several times.
        whole: the same step on whole values, where some are sharded: what it was before it was written anew for a rank.
        links: which collectives were put in then, and what they stand for.
        dimensions: of a mesh of several dimensions, their names and sizes.
    """

    name: str
    source: str
    world_size: int
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    operations: tuple[Operation, ...]
    reductions: tuple[Reduction, ...]
    replicated_constants: tuple[tuple[str, str], ...]
    closed_over: tuple[tuple[str, str], ...]
    replicated_calls: tuple[str, ...]
    graph: fx.GraphModule = field(compare=False, repr=False)
    in_spec: pytree.Spec = field(compare=False, repr=False)
    out_spec: pytree.Spec = field(compare=False, repr=False)
    wire: Wire | None = None
    loops: tuple[Loop, ...] = ()
    whole: Trace | None = field(default=None, compare=False, repr=False)
    links: tuple[Link, ...] = ()
    dimensions: tuple[tuple[str, int], ...] = ()

    def ranks_along(self, dimension: str) -> int:
        """The number of ranks along a dimension of the mesh.

        Args:
            dimension: its name; empty for all ranks.

        Returns:
            The number.
        """
        return dict(self.dimensions)[dimension] if dimension else self.world_size

    def place_along(self, rank: int, dimension: str) -> int:
        """The place of a rank along a dimension of the mesh.

        Args:
            rank: among all ranks.
            dimension: its name; empty for all ranks.

        Returns:
            The place, from 0 on; the rank itself if it is among all of them.
        """
        return place_along(rank, self.dimensions, dimension)

    @property
    def sharded_along(self) -> str:
        """The dimension of the mesh that sharded state is divided along; `WHOLE` for all ranks."""
        return sharded_along(self.dimensions)

    @property
    def gradients(self) -> tuple[Reduction, ...]:
        """The gradients in the order in which the backward pass produces them."""
        return tuple(reduction for reduction in self.reductions if reduction.kind == "gradient")

    @cached_property
    def nodes(self) -> Mapping[str, fx.Node]:
        """The nodes of the graph, by name."""
        return {node.name: node for node in self.graph.graph.nodes}

    def marker(self, reduction: int) -> fx.Node:
        """Find the node that stands for a reduction.

        Args:
            reduction: its index in `reductions`.

        Returns:
            The node, of `graph`.
        """
        return self.nodes[self.operations[self.reductions[reduction].operation].node]

    def refuse_other_ranks(self, world_size: int) -> None:
        """Refuse another number of ranks for a step with sharded state, or on a mesh: both have one number of ranks.

        Args:
            world_size: number of ranks.

        Raises:
            ArgumentError: the step has sharded state or is on a mesh, and was traced for another number.
        """
        if world_size == self.world_size or (self.whole is None and not self.dimensions):
            return
        on_mesh = f"is on a mesh of {mesh_text(self.dimensions)}"
        raise ArgumentError(
            build_message(
                f"step {self.name!r} {on_mesh if self.dimensions else 'has sharded state'}: its trace for "
                f"{self.world_size} ranks says nothing of {world_size}.",
                remedy="trace it with a mesh of that many ranks."
                if self.dimensions
                else "trace it with state that is sharded among that many ranks.",
            )
        )

    @cached_property
    def depends_on_storage_offsets(self) -> bool:
        """Whether the step may compute something else if an input has another storage offset."""
        inputs = {number for node in self.graph.graph.find_nodes(op="placeholder") for number in storages_of(node)}
        for module in self.graph.modules():
            for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
                # Only there an offset is a number in the graph. (Of what a condition holds, inputs are not known.)
                if "as_strided" in str(node.target) and (
                    module is not self.graph
                    or any(not inputs.isdisjoint(storages_of(argument)) for argument in node.all_input_nodes)
                ):
                    return True
        return False

    @hiding_frames
    def plan(
        self,
        bucket_cap_mb: Caps = "auto",
        costs: Costs | None = None,
        network: Network | None = None,
        world_size: int | None = None,
    ) -> Plan:
        """Decide on buckets and on the order of everything; no process group is needed.

        Args:
            bucket_cap_mb: as for `data_parallel`; with a network, "auto" finds the buckets with which the simulated
                step ends earliest.
            costs: seconds of every operation; None for an estimate, where there is a network.
            network: an `fdp.Network` between the ranks; None for none, and "auto" is then a first bucket of 1 MiB, and
                25 MiB for those that follow.
            world_size: number of ranks to plan for; None for as many as the step was traced for.

        Returns:
            The `Plan`.

        Raises:
            ArgumentError: `bucket_cap_mb` has no meaning; or there are costs, or a world size, but no network.
        """
        from fdp.plan.build import plan_trace

        return plan_trace(self, bucket_cap_mb, costs, network, world_size)

    def _loops_text(self) -> str:
        bodies = [f"{loop.count} times {count(len(loop.body.operations), 'operation')}" for loop in self.loops]
        return f" ({count(len(bodies), 'loop')}: {'; '.join(bodies)})" if bodies else ""

    def __repr__(self) -> str:
        operations, ranks = count(len(self.operations), "operation"), count(self.world_size, "rank")
        return f"<Trace of {short_name(self.name)}: {operations}, {ranks}>"

    def __str__(self) -> str:
        total = sum(reduction.size_bytes for reduction in self.gradients)
        head = (
            f"Trace of {self.name} ({self.source}), {count(self.world_size, 'rank')}: "
            f"{count(len(self.inputs), 'input')}, {count(len(self.outputs), 'output')}, "
            f"{count(len(self.operations), 'operation')}{self._loops_text()}, "
            f"{count(len(self.gradients), 'gradient')} of {format_bytes(total)}"
        )
        reductions = Table("reductions, in the order in which they are produced",
                           ("#", "name", "kind", "op", "shape", "dtype", "bytes", "produced by", "line"))  # fmt: skip
        for index, r in enumerate(self.reductions):
            reductions.add(index, r.name, r.kind, r.op_along, list(r.shape), _short(r.dtype),
                           r.size_bytes, r.produced_by, r.source)  # fmt: skip
        inputs = Table("inputs", ("name", "shape", "dtype", "role", "donated"))
        for i in self.inputs:
            inputs.add(i.name, list(i.shape), _short(i.dtype), i.role, "yes" if i.donated else "")
        outputs = Table("outputs", ("name", "shape", "dtype", "across ranks", "made by"))
        for o in self.outputs:
            across = "in parts" if o.part else o.container.adjective or ("per rank" if o.per_rank else "")
            across = across or ("varying" if o.varying else "replicated")
            shape = "" if o.shape is None else list(o.shape)
            outputs.add(o.name, shape, _short(o.dtype), across, o.node or repr(o.constant))
        return "\n\n".join([heading(head), str(inputs), str(reductions), str(outputs)])


def _short(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")
