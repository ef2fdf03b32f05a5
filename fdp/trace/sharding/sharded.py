"""A step with sharded state: traced on whole values, then rewritten for one rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fdp.distributed.mesh import Dimensions
from fdp.errors import TraceError, build_message
from fdp.state.containers import lies_in_parts
from fdp.state.shards import contiguous_strides, layout_in, sharded
from fdp.tables import format_bytes
from fdp.trace.calls.arguments import Flat
from fdp.trace.graph.variance import ever_varying
from fdp.trace.sharding.gathers import origin_of
from fdp.trace.sharding.inserted import Link
from fdp.trace.sharding.placements import placements
from fdp.trace.sharding.spmd import for_rank
from fdp.trace.trace import Input, Output


@dataclass(frozen=True)
class WholeExample:
    """Stands for the whole of a sharded tensor while a step is traced; has what the tracer asks for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def stride(self) -> tuple[int, ...]:
        """Its strides, in elements."""
        return contiguous_strides(self.shape)


@dataclass(frozen=True)
class ForOneRank:
    """A step as one rank computes it.

    Attributes:
        module: its graph.
        outputs: what it returns.
        links: which collectives were put in.
    """

    module: fx.GraphModule
    outputs: list[Output]
    links: tuple[Link, ...]


def whole_inputs(inputs: Sequence[Input], flat: Flat) -> list[Input]:
    """The inputs of a step, with sharded ones as whole ones."""
    found = []
    shards = [it for it, leaf in zip(sharded(flat.spec), flat.leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    for item, shard in zip(inputs, shards, strict=True):
        if shard is not None:
            shape = tuple(layout_in(shard).shape)
            item = replace(item, shape=shape, stride=contiguous_strides(shape), offset=0, role="state")
        found.append(item)
    return found


def examples_of(inputs: Sequence[Input], flat: Flat) -> list[Any]:
    """The example inputs with which a step is traced on whole values."""
    return [
        tensor if item.part is None else WholeExample(item.shape, item.dtype, item.device)
        for item, tensor in zip(inputs, flat.tensors, strict=True)
    ]


def refuse_held(name: str, held: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse a step that closes over sharded leaves, which have no whole value for it.

    Raises:
        TraceError: names each.
    """
    offenders = [f"{known}: a DTensor of shape {list(tensor.shape)}" for known, tensor in held if lies_in_parts(tensor)]
    if offenders:
        raise TraceError(
            build_message(
                f"step {name!r} closes over sharded leaves.",
                offenders,
                remedy="pass them as arguments; inside of the step they are whole.",
            )
        )


def for_one_rank(
    name: str,
    module: fx.GraphModule,
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    sources: Sequence[int | None],
    varying: Sequence[fx.Node],
    again: frozenset[str] = frozenset(),
    dimensions: Dimensions = (),
) -> ForOneRank:
    """Rewrite a step for one rank.

    Args:
        name: the user's function.
        module: its graph, on whole values; it is not changed.
        inputs: of that.
        outputs: of that.
        sources: for each output the input in whose container it comes out, if there is one.
        varying: the placeholders that differ from rank to rank.
        again: the names of the nodes whose values are gathered again in each forward and backward pass.
        dimensions: of the mesh.

    Returns:
        The step as a rank computes it.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    divided = {node: item.part for node, item in zip(placeholders, inputs, strict=True) if item.part is not None}
    results: Any = module.graph.output_node().args[0] or ()
    returns = [output.name for output in outputs if output.node is not None]
    names = {origin_of(node): name for node, name in zip(results, returns, strict=True)}
    names.update((node, item.name) for node, item in zip(placeholders, inputs, strict=True))
    parts = placements(module.graph, divided, varying, dimensions)
    made, returned = [], []
    for output, source in zip(outputs, sources, strict=True):
        part = None if source is None else inputs[source].part
        if source is not None and part is not None:
            output = replace(output, container=inputs[source].container)
        if output.node is not None:
            returned.append(part)
        if part is not None:
            assert output.shape is not None
            output = replace(output, part=part, shape=part.of(output.shape))
        slot = output.slot
        if slot is not None and inputs[slot].part != part:
            output = replace(output, slot=None)  # the memory is that of a part, and this is whole; or the other way
        made.append(output)
    ever = ever_varying(module.graph, varying, dimensions)
    done = for_rank(module, parts, divided, names, returned, again, dimensions, ever)
    nodes = iter(done.module.graph.output_node().args[0])  # type: ignore[arg-type]
    made = [output if output.node is None else replace(output, node=next(nodes).name) for output in made]
    if not again:  # what is returned whole is the same at a second try
        _warn_of_gathered(name, [output for output in made if output.node is not None], done.gathered, inputs)
    return ForOneRank(done.module, made, tuple(done.links))


def _warn_of_gathered(name: str, outputs: Sequence[Output], gathered: Sequence[int], inputs: Sequence[Input]) -> None:
    """Warn once of sharded state that is returned whole: that may be a mistake."""
    shapes = {item.shape for item in inputs if item.part is not None}
    found = [outputs[at] for at in gathered if outputs[at].slot is None and outputs[at].shape in shapes]
    if found:
        sizes = [torch.Size(o.shape or ()).numel() * (o.dtype or torch.float32).itemsize for o in found]
        warnings.warn(
            f"fdp: step {name!r} returns {', '.join(o.name for o in found[:3])}"
            f"{' and more' if len(found) > 3 else ''} whole: {format_bytes(sum(sizes))} are gathered on each rank. "
            "What comes back under the key path of a sharded argument stays sharded.",
            stacklevel=2,
        )
