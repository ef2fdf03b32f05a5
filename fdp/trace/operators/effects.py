"""The memory effects of an operator: which of its tensors it reads, writes, or only returns views of.

The schema of an operator says most of it. The few operators whose schema says too little, or too much, are
listed here, and nowhere else.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fdp.distributed.collective import OPERATORS, Collective, collective_named
from fdp.distributed.comparable import comparable, without_addresses
from fdp.distributed.mesh import dimension_of
from fdp.pytorch.overloads import OpOverload, schema_arguments, schema_of
from fdp.pytorch.tensors import storage_id

_aten = torch.ops.aten

_UNDECLARED_WRITES: dict[Any, tuple[str, ...]] = {
    # Batch normalisation in training mode updates its running statistics; the schemas keep silent about it.
    _aten.native_batch_norm.default: ("running_mean", "running_var"),
    _aten.cudnn_batch_norm.default: ("running_mean", "running_var"),
    _aten.miopen_batch_norm.default: ("running_mean", "running_var"),
    _aten.batch_norm_update_stats.default: ("running_mean", "running_var"),
    _aten.batch_norm_gather_stats.default: ("running_mean", "running_var"),
    _aten.batch_norm_gather_stats_with_counts.default: ("running_mean", "running_var"),
}

FUSED_OPTIMIZERS = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
"""Operators that update every parameter of a list in place, with its state, and return nothing."""

_UNINITIALISED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")

_OVERWRITES = frozenset({
    # In-place operators whose result does not depend on what their first argument held before.
    "copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_", "exponential_", "random_", "cauchy_",
    "log_normal_", "geometric_",
})  # fmt: skip


_FILLS: dict[Any, str] = {
    # Not an out argument by name, and yet written without being read.
    _aten.rrelu_with_noise.default: "noise",
    _aten.rrelu_with_noise_.default: "noise",
}
_REPLACES = frozenset({
    # In-place operators that replace some elements of their first argument, and look at none of them.
    "index_put_", "index_copy_", "index_fill_", "scatter_", "masked_fill_", "masked_scatter_",
})  # fmt: skip

_SHAPE_ALONE = frozenset({
    # Operators that take their first argument for its shape, dtype and device: new values, drawn or all the same.
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_full", "fill",
})  # fmt: skip


@dataclass(frozen=True)
class Effects:
    """The memory effects of one node.

    Attributes:
        reads: nodes whose memory is read.
        writes: nodes whose memory is written.
        overwrites: the written memory is wholly replaced, so what it held before does not matter.
        view: the result is the argument's own memory under another shape; nothing is read or written.
        random: the node draws from a random number generator.
        uninitialised: the result holds whatever was in memory.
        checks: the node has no result: it is there for what it does besides, as an error where values are not allowed.
    """

    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...] = ()
    overwrites: bool = False
    view: bool = False
    random: bool = False
    uninitialised: bool = False
    checks: bool = False

    @functools.cached_property
    def read_nodes(self) -> frozenset[fx.Node]:
        """The nodes whose memory is read, to look some up in."""
        return frozenset(self.reads)

    @functools.cached_property
    def written_nodes(self) -> frozenset[fx.Node]:
        """The nodes whose memory is written, to look some up in."""
        return frozenset(self.writes)

    @property
    def pure(self) -> bool:
        """Whether the node does nothing but return its result."""
        return not self.writes and not self.random and not self.checks


def effects_of(node: fx.Node) -> Effects:
    """The memory effects of a node of a traced graph; they are kept with the node."""
    known: Effects | None = node.meta.get("effects")
    if known is None:
        known = node.meta["effects"] = _read_effects(node)
    return known


def _read_effects(node: fx.Node) -> Effects:
    target = node.target
    if node.op != "call_function" or target is operator.getitem:
        return Effects((), view=True)
    if not isinstance(target, OpOverload):
        return _effects_inside(node)
    if target.namespace == "fdp":
        return Effects(() if target is torch.ops.fdp.axis_index.default else tuple(node.all_input_nodes))
    name = operator_name(node)
    overwrites = name in _OVERWRITES
    reads: list[fx.Node] = []
    writes: list[fx.Node] = []
    view = False
    for argument, value in bound_arguments(node):
        nodes = list(nodes_in(value))
        if not nodes:
            continue
        info = argument.alias_info
        written = info is not None and info.is_write
        if written and argument.name == "grads" and name in FUSED_OPTIMIZERS:
            # They unscale gradients in place, if told to; otherwise gradients are only read.
            written = node.kwargs.get("grad_scale") is not None
        if argument.name in _UNDECLARED_WRITES.get(target, ()):
            written = _updates_statistics(node)
        view |= info is not None and not info.is_write
        if written:
            writes.extend(nodes)
        filled = argument.is_out or argument.name == _FILLS.get(target)
        if not written or not (overwrites or filled):
            reads.extend(nodes)
    return Effects(
        # bernoulli(x, p) takes x for its shape alone.
        reads=() if view or name in _UNINITIALISED or target is _aten.bernoulli.p else tuple(reads),
        writes=tuple(writes),
        overwrites=overwrites,
        view=view and not writes,
        random=torch.Tag.nondeterministic_seeded in target.tags and _draws(node),
        uninitialised=name in _UNINITIALISED,
        checks=not schema_of(target).returns and not writes and target not in _CHECKED_BY_TRACING,
    )


_CHECKED_BY_TRACING = frozenset({_aten._assert_tensor_metadata.default})
"""Operators that check what is equal at every call of a signature."""


def read_for_shape_only(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments of which a node reads only the shape, which its schema does not say.

    Such is the first argument of `rand_like`. And the backward of a convolution reads its weight for the gradient of
    the input only, and the input for that of the weight. `vmap` relies on it: where one of the two is not asked for, it
    passes memory that nothing has filled.
    """
    if getattr(node.target, "namespace", "") == "aten" and operator_name(node) in _SHAPE_ALONE:
        like, *others = (value for _, value in bound_arguments(node))
        return () if any(like in nodes_in(other) for other in others) else tuple(nodes_in(like))
    if node.target is not _aten.convolution_backward.default:
        return ()
    given = {argument.name: value for argument, value in bound_arguments(node)}
    for_input, for_weight, _ = given["output_mask"]
    named = [("weight", for_input), ("input", for_weight)]
    needed = {given["grad_output"], *(given[name] for name, read in named if read)}
    return tuple(given[name] for name, read in named if not read and given[name] not in needed)


def _effects_inside(node: fx.Node) -> Effects:
    """The effects of a higher-order operator.

    torch.cond and the like are pure, by their contract, but for random numbers. A loop of fdp's own changes some of
    what it is given: that has the same memory in its graph.
    """
    inner = [effects_of(each) for each in inner_nodes(node)]
    written = {storage for effects in inner for target in effects.writes for storage in storages_of(target)}
    writes = tuple(given for given in node.all_input_nodes if not written.isdisjoint(storages_of(given)))
    return Effects(
        tuple(node.all_input_nodes),
        writes,
        random=any(effects.random for effects in inner),
        checks=any(effects.checks for effects in inner),
    )


def storage_indexed(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that a node indexes by position in their storage, as `as_strided` does, and not by their shape.

    Such an argument needs a storage of its own, as in the trace: in the middle of other memory, the same positions
    belong to other values. A branch of a condition may index any operand of the condition; a microbatch of
    `fdp.accumulate` indexes none.
    """
    if node.op != "call_function":
        return ()
    if getattr(node.target, "namespace", "") == "higher_order":
        return tuple(node.all_input_nodes) if any(map(storage_indexed, inner_nodes(node))) else ()
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return ()
    return tuple(nodes_in(node.args[0])) if operator_name(node) in _INDEXES_STORAGE else ()


_INDEXES_STORAGE = frozenset({"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"})


def storage_indexed_memory(graph: fx.Graph) -> frozenset[int]:
    """The memory that some node of a graph indexes by position; see `storage_indexed`."""
    return frozenset(
        storage for node in graph.nodes for argument in storage_indexed(node) for storage in storages_of(argument)
    )


def replaces_elements(node: fx.Node) -> bool:
    """Whether a node writes to elements of its first argument without reading any."""
    given = {argument.name: value for argument, value in bound_arguments(node)}
    return operator_name(node) in _REPLACES and not given.get("accumulate") and given.get("reduce") is None


def inner_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the graphs that a higher-order operator holds (the branches of a torch.cond), all the way down."""
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            held = getattr(argument.graph.owning_module, str(argument.target), None)
            if isinstance(held, fx.GraphModule):
                for inner in held.graph.nodes:
                    yield inner
                    yield from inner_nodes(inner)


def operator_name(node: fx.Node) -> str:
    """The bare name of a node's operator: "_fused_adamw_" for aten._fused_adamw_.tensor_lr."""
    target = node.target
    return str(schema_of(target).name).split("::")[-1] if isinstance(target, OpOverload) else str(target)


def target_text(node: fx.Node) -> str:
    """What a node calls, as text that is equal in every process: `str` of some functions has an address in it."""
    text = str(node.target)
    return text if without_addresses(text) == text else comparable(node.target)


def bound_arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Pair each argument of an operator's schema with the value that a node gives it."""
    target: Any = node.target
    args, kwargs = node.args, node.kwargs
    for position, argument in enumerate(schema_arguments(target)):
        if position < len(args) and not argument.kwarg_only:
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def is_marker(node: fx.Node, *names: str) -> bool:
    """Whether a node is one of fdp's marker operators, of the given names if any are given."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or target.namespace != "fdp":
        return False
    return not names or operator_name(node) in names


def collective_of(node: fx.Node) -> Collective | None:
    """The collective that a node of a graph is; None if it is none."""
    if not is_marker(node, *OPERATORS):
        return None
    reduction = dict((argument.name, value) for argument, value in bound_arguments(node)).get("op")
    return collective_named(operator_name(node), reduction)


def mesh_dimension_of(node: fx.Node) -> str:
    """The dimension of the mesh along which a collective, or a rank, counts; `WHOLE` for all of them."""
    return dimension_of(dict((argument.name, value) for argument, value in bound_arguments(node))["axis"])


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors of a result or of arguments, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for item in value for x in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def storages(value: object) -> tuple[int, ...]:
    """Identify the memory behind a node's example value: one number for each tensor in it.

    Two tensors of one trace share memory exactly if they have a number in common: example values are fake
    tensors that the trace keeps alive, so that no number is used twice.
    """
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return (id(value),)
        return (storage_id(value.untyped_storage()),)
    if isinstance(value, (list, tuple)):
        return tuple(number for item in value for number in storages(item))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (id(value),)  # a number read from a tensor varies, or not, like memory does
    return ()


def tensors_with_storage(value: object) -> Iterator[tuple[int, torch.Tensor]]:
    """The tensors of an example value, each with its memory as `storages` has it; numbers are left out."""
    for tensor in tensors_in(value):
        (number,) = storages(tensor)
        yield number, tensor


def storages_of(node: fx.Node) -> tuple[int, ...]:
    """Identify the memory behind a node's result."""
    return storages(node.meta.get("val"))


def entries_of(node: fx.Node) -> int | None:
    """The number of list entries that an operator treats independently of each other; None if it does not.

    Fused optimizers and `_foreach` operators do the same to each entry of their lists, and nothing across.
    """
    name = operator_name(node)
    if not isinstance(node.target, OpOverload):
        return None
    if name not in FUSED_OPTIMIZERS and not name.startswith("_foreach_"):
        return None
    lengths = {len(value) for _, value in list_arguments(node) if len(value)}
    return lengths.pop() if len(lengths) == 1 else None


def list_arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """The arguments of a node that are lists of one length (or empty)."""
    for argument, value in bound_arguments(node):
        if isinstance(value, (list, tuple)) and argument.type.kind() == "ListType":
            yield argument, value


def _draws(node: fx.Node) -> bool:
    """Whether an operator that can draw random numbers does so: attention without dropout, and evaluation mode, do not.

    (`native_dropout` and `bernoulli` with a probability of zero do, though nothing shows in their results.)
    """
    target: Any = node.target
    given = {argument.name: value for argument, value in bound_arguments(node)}
    for argument in schema_arguments(target):
        value = given.get(argument.name, argument.default_value)
        if argument.name in ("dropout_p", "dropout") and value == 0 and isinstance(value, (int, float)):
            return False
        if argument.name in ("train", "training") and value is False:
            return False
    return True


def _updates_statistics(node: fx.Node) -> bool:
    for argument, value in bound_arguments(node):
        if argument.name in ("training", "train"):
            return bool(value)
    return True


def nodes_in(value: object) -> Iterator[fx.Node]:
    """The nodes in an argument, in order."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from nodes_in(item)


def is_view(node: fx.Node) -> bool:
    """Whether a node returns a view of its first argument."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    aliases = [returned.alias_info for returned in schema_of(node.target).returns]
    return len(aliases) == 1 and aliases[0] is not None and not aliases[0].is_write


def whole_of(node: fx.Node) -> fx.Node:
    """The base of a view, as far back as the dtype is the same, so that offsets count the same elements."""
    counted = node.meta["val"].dtype
    while node.op == "call_function" and is_view(node):
        first: Any = node.args[0]
        if node.target is operator.getitem and not is_view(first):
            break  # one of several results
        one = first.meta["val"]
        if isinstance(one, torch.Tensor) and one.dtype != counted:
            break
        node = first
    return node
