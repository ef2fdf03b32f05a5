"""A trace in the compiler's operators: the trace's graph in its own order, decomposed.

What PyTorch does on the way, functionalization and decompositions, is what it does to a program that is compiled, too,
and is trusted. All that fdp decides is left out: there is no plan, no bucket, and nothing shares memory. Collectives
stay what they are; updates by fused optimizers, loops, and what draws random numbers become calls of one operator that
changes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fdp.pytorch.overloads import OpOverload, schema_of
from fdp.pytorch.tensors import storage_id
from fdp.trace.capture.capture import Geometry, capture_functional
from fdp.trace.capture.functional import bring_up_to_date, keep_strides
from fdp.trace.trace import Trace
from fdp.verify.combined import OPERATORS
from fdp.verify.failure import VerificationError
from fdp.verify.higher import draws_in
from fdp.verify.schemas import HIDDEN_VIEWS, operator_of

_aten = torch.ops.aten
_library = torch.library.Library("fdp_verify", "DEF")
_library.define("changed(Tensor[] changed, Tensor[] tensors, int number) -> Tensor[]")
_library.impl("changed", lambda changed, tensors, number: [x.clone() for x in changed], "CompositeExplicitAutograd")
torch.library.register_fake(
    "fdp_verify::changed", lambda changed, tensors, number: [torch.empty_like(x) for x in changed], lib=_library
)
CHANGED = torch.ops.fdp_verify.changed.default
"""(tensors that are changed, all tensors, a number) -> what the former are after the call of that number."""
torch.fx.has_side_effect(CHANGED)  # a draw of which nothing is used is one


@dataclass(frozen=True)
class Call:
    """A call that changes some of its arguments, or draws random numbers.

    Attributes:
        node: in the trace.
        tensors: the nodes of the tensors that it is given, each once.
        changed: those that it changes.
        made: how its results in new memory lie: what `CHANGED` changes before the others. (Of a draw alone.)
        draws: whether it draws. The numbers then depend on how all tensors lie in the trace.
    """

    node: fx.Node
    tensors: tuple[fx.Node, ...]
    changed: tuple[fx.Node, ...]
    made: tuple[torch.Tensor, ...] = ()
    draws: bool = False


@dataclass(frozen=True)
class Decomposed:
    """A decomposed trace.

    Attributes:
        graph: takes the inputs of the step and then what it closes over; returns the step's results. Inputs that the
            step changes are changed at its very end.
        calls: those that are calls of `CHANGED` in it, by number.
        closed_over: the nodes of the trace that hold the tensors that are closed over, in the order of its inputs.
        markers: for the node of each collective in it, the node in the trace.
    """

    graph: fx.GraphModule
    calls: tuple[Call, ...]
    closed_over: tuple[fx.Node, ...]
    markers: Mapping[fx.Node, str]


def decompose(trace: Trace, decompositions: Mapping[Any, Callable[..., Any]], draws_alike: bool) -> Decomposed:
    """Decompose a trace.

    Args:
        trace: it.
        decompositions: how the compiler wants operators taken apart.
        draws_alike: whether draws are to stay what they are. If not, they are taken apart as the compiler likes.

    Returns:
        The trace, taken apart.
    """
    module = trace.graph
    placeholders = module.graph.find_nodes(op="placeholder")
    held = {node: getattr(module, str(node.target), None) for node in module.graph.find_nodes(op="get_attr")}
    closed_over = tuple(node for node, value in held.items() if isinstance(value, torch.Tensor))
    inputs: list[Geometry] = [(i.shape, i.stride, i.offset, i.dtype, i.device) for i in trace.inputs]
    for node in closed_over:
        value = node.meta["val"]
        inputs.append((value.shape, value.stride(), value.storage_offset(), value.dtype, value.device))
    calls: list[Call] = []
    loops = {loop.node: loop.body for loop in trace.loops}
    first = _first_seen(module.graph)

    def carry_out(*values: torch.Tensor) -> list[torch.Tensor]:
        calls.clear()
        env: dict[fx.Node, Any] = dict(held)
        env.update(zip((*placeholders, *closed_over), values, strict=True))
        for node in module.graph.nodes:
            if node.op == "call_function":
                drawn = draws_alike and is_draw(node)
                made = _drawn(node, env, calls) if drawn else _carry_out(node, env, calls, loops, first)
                env[node] = _with_strides(node, made)
                _straighten(node, first, env)
        returned: Any = module.graph.output_node().args[0]
        return [env[node] for node in returned]

    graph = capture_functional(carry_out, inputs, decompositions)
    names = [node.name for node in module.graph.nodes if _sends(node)]
    found = [node for node in graph.graph.nodes if _sends(node)]
    return Decomposed(graph, tuple(calls), closed_over, dict(zip(found, names, strict=True)))


def _sends(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).name in OPERATORS


def _carry_out(
    node: fx.Node,
    env: Mapping[fx.Node, Any],
    calls: list[Call],
    loops: Mapping[str, Trace],
    first: Mapping[int, fx.Node],
) -> Any:
    target: Any = node.target
    args: Any = fx.map_arg(node.args, env.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, env.__getitem__)
    if target is operator.getitem:
        return args[0][args[1]]
    args = _seen_whole(node, args, first, env)
    bring_up_to_date(target, args)
    if not isinstance(target, OpOverload):
        args = [_Inner(each) if isinstance(each, fx.GraphModule) else each for each in args]
    if is_opaque(node):
        tensors = tuple(each for each in node.all_input_nodes if isinstance(env[each], torch.Tensor))
        call = Call(node, tensors, tuple(each for each in tensors if each in _written(node, loops)))
        given = [env[each] for each in call.changed]
        for tensor, new in zip(given, CHANGED(given, [env[each] for each in tensors], len(calls)), strict=True):
            tensor.copy_(new)
        calls.append(call)
        return None
    if target in (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default):
        # Those whose schemas say that they update the statistics.
        x, weight, bias, mean, variance, *rest = args
        if mean is None:
            found = _aten._native_batch_norm_legit.no_stats(x, weight, bias, *rest)
        else:
            found = _aten._native_batch_norm_legit.default(x, weight, bias, mean, variance, *rest)
        reserved = x.new_zeros((0,), dtype=torch.uint8)
        return found if target is _aten.native_batch_norm.default else (*found, reserved)
    if target is _aten.native_dropout.default and args[2] is False:
        # A new tensor on a CPU; other kernels hand their argument back.
        kept = args[0].clone() if args[0].device.type == "cpu" else args[0]
        return kept, torch.ones_like(args[0], dtype=torch.bool)
    return HIDDEN_VIEWS.get(target, target)(*args, **kwargs)


class _Inner(fx.Interpreter):
    """The arguments of a higher-order function, as values with the strides of the trace."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._first = _first_seen(module.graph)

    __call__ = fx.Interpreter.run

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        held = super().get_attr(target, args, kwargs)
        return _Inner(held) if isinstance(held, fx.GraphModule) else held

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return _seen_whole(n, args, self._first, self.env), kwargs

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        bring_up_to_date(target, args)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        made = _with_strides(n, super().run_node(n))
        _straighten(n, self._first, self.env)
        return made


def _with_strides(node: fx.Node, made: Any) -> Any:
    """New tensors with the strides of the trace, because its views are views of those."""
    if node.op != "call_function" or node.target is operator.getitem:
        return made
    several = isinstance(made, (list, tuple))
    examples: Any = node.meta.get("val")
    results, examples = (made, examples) if several else ([made], [examples])
    own: Sequence[int] = range(len(results))
    if isinstance(node.target, OpOverload):
        known = operator_of(node.target)
        own = () if known.views else known.new if len(known.results) == len(results) else own if known.new else ()
    laid = list(results)
    for at in own:
        value, example = results[at], examples[at]
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and _differ(value, example.stride()):
            if _repeats(example):
                continue
            laid[at] = torch.empty_strided(value.shape, example.stride(), dtype=value.dtype, device=value.device)
            laid[at].copy_(value)
    return laid if several else laid[0]


def _first_seen(graph: fx.Graph) -> dict[int, fx.Node]:
    """For each piece of memory, the node of the tensor that all others are views of."""
    found: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor) and value.layout is torch.strided:
            found.setdefault(storage_id(value.untyped_storage()), node)
    return found


def _seen_whole(node: fx.Node, args: Any, first: Mapping[int, fx.Node], env: Mapping[fx.Node, Any]) -> Any:
    """The arguments of a call. What looks at places through a view looks at what has that memory, and is no view.

    Changes through the former are not taken apart. Where the memory begins is known while all values begin at zero.
    """
    if node.target is not _aten.as_strided.default:
        return args
    seen = node.meta["val"]
    origin = first[storage_id(seen.untyped_storage())]
    view, whole, beyond = args[0], env[origin], seen.storage_offset() - origin.meta["val"].storage_offset()
    if view is whole or any(each.dtype != seen.dtype or each.is_conj() or each.is_neg() for each in (seen, whole)):
        return args
    if beyond == 0:
        return whole, *args[1:3]
    return args if beyond < 0 or whole.storage_offset() else (whole, *args[1:3], beyond)


def _straighten(node: fx.Node, first: Mapping[int, fx.Node], env: Mapping[fx.Node, Any]) -> None:
    """After a change in place, restore the strides of the tensor that owns the memory."""
    if isinstance(node.target, OpOverload) and not is_opaque(node):
        known = operator_of(node.target)
        given = known.bind(node.args, node.kwargs)
        for each in (each for at in known.written(given) for each in _nodes_in(given[at])):
            origin = first[storage_id(each.meta["val"].untyped_storage())]
            example: Any = origin.meta["val"]
            if not _repeats(example):
                keep_strides(env[origin], example.stride())
                if _differ(example, env[origin].detach().stride()):  # a view has the strides of the newest value
                    raise VerificationError(f"{node} changes how {origin} lies in memory")


def _repeats(value: torch.Tensor) -> bool:
    """Whether several elements share one address, so that nothing can be copied there."""
    return any(step == 0 and size != 1 for step, size in zip(value.stride(), value.shape, strict=True))


def _differ(value: torch.Tensor, stride: Sequence[int]) -> bool:
    wide = [at for at, size in enumerate(value.shape) if size != 1]
    return value.numel() > 0 and any(value.stride(at) != stride[at] for at in wide)


def is_draw(node: fx.Node) -> bool:
    """Whether a node draws random numbers: an operator, or a higher-order function of such; but no loop."""
    target = node.target
    if node.op != "call_function":
        return False
    if not isinstance(target, OpOverload):
        return target is not operator.getitem and not is_opaque(node) and any(map(draws_in, _held_by(node)))
    found = operator_of(target)
    return found.random and not found.name.startswith("fdp") and found.draws(found.bind(node.args, node.kwargs))


def _held_by(node: fx.Node) -> list[Any]:
    """The arguments of a node that are objects of the graph itself."""
    return [getattr(node.graph.owning_module, str(a.target), None) for a in node.all_input_nodes if a.op == "get_attr"]


def _drawn(node: fx.Node, env: Mapping[fx.Node, Any], calls: list[Call]) -> Any:
    """A call that draws. It changes new memory for each result, and the tensors that it fills."""
    example: Any = node.meta["val"]
    examples = list(example) if isinstance(example, (list, tuple)) else [example]
    tensors = tuple(each for each in node.all_input_nodes if isinstance(env[each], torch.Tensor))
    owners: list[Any] = [None] * len(examples)
    changed: tuple[fx.Node, ...] = ()
    if isinstance(node.target, OpOverload):
        found = operator_of(node.target)
        given = found.bind(node.args, node.kwargs)
        owners = [None if at is None else given[at] for at in found.results]
        changed = tuple(each for at in found.written(given) for each in _nodes_in(given[at]))
    made = tuple(
        each for each, owner in zip(examples, owners, strict=True) if owner is None and isinstance(each, torch.Tensor)
    )
    new = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in made]
    old = [env[each] for each in changed]
    results = CHANGED([*new, *old], [env[each] for each in tensors], len(calls))
    calls.append(Call(node, tensors, changed, made, draws=True))
    for tensor, value in zip(old, results[len(new) :], strict=True):
        tensor.copy_(value)
    fresh = iter(results)
    returned = [
        env[owner] if owner is not None else next(fresh) if isinstance(each, torch.Tensor) else each
        for each, owner in zip(examples, owners, strict=True)
    ]
    return returned if isinstance(example, (list, tuple)) else returned[0]


def is_opaque(node: fx.Node) -> bool:
    """Whether a call changes memory in a way that functionalization does not take: fused optimizers, and loops."""
    target = node.target
    if isinstance(target, OpOverload):
        return (
            schema_of(target).name.startswith("aten::_fused_")
            and schema_of(target).is_mutable
            and not schema_of(target).returns
        )
    return getattr(target, "__name__", "") == "run_loop"


def _written(node: fx.Node, loops: Mapping[str, Trace]) -> set[fx.Node]:
    """The arguments that an opaque call changes."""
    if node.name in loops:
        operands: Any = node.args[2]
        return {operands[at] for at in changed_by(loops[node.name])}
    operator = operator_of(node.target)
    given = operator.bind(node.args, node.kwargs)
    return {each for at in operator.written(given) for each in _nodes_in(given[at])}


def changed_by(body: Trace) -> frozenset[int]:
    """The operands that a loop changes: those that its body changes. (Its first input is a number.)"""
    placeholders = body.graph.graph.find_nodes(op="placeholder")[1:]
    memory = [storage_id(node.meta["val"].untyped_storage()) for node in placeholders]
    written = set()
    for node in body.graph.graph.nodes:
        if isinstance(node.target, OpOverload):
            operator = operator_of(node.target)
            given = operator.bind(node.args, node.kwargs)
            for at in operator.written(given):
                written |= {storage_id(each.meta["val"].untyped_storage()) for each in _nodes_in(given[at])}
    return frozenset(at for at, number in enumerate(memory) if number in written)


def _nodes_in(value: object) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    return [node for each in value for node in _nodes_in(each)] if isinstance(value, (list, tuple)) else []
