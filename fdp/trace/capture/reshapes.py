"""Operators that change the shape or the storage of a tensor in place: in the graph they become views.

In plain torch `h.t_()` turns the object `h` for all who hold it. In a graph every use of `h` after that call names
the call's own result already. So the call can be replaced by the view `h.t()`, a value of its own, and no program ever
turns an object that something else names: not a view that stands for its base, and not the tensor of a caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fdp import pytree
from fdp.errors import PurityError, TraceError, build_message
from fdp.pytorch.overloads import OpOverload, overload_name_of, schema_of
from fdp.pytorch.tensors import negative_view
from fdp.trace.operators.effects import bound_arguments, effects_of, operator_name, storages, storages_of, whole_of
from fdp.trace.operators.source import located
from fdp.trace.trace import Input

_aten = torch.ops.aten

_VIEWS = frozenset({
    "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_", "detach_",
})  # fmt: skip
"""Each does in place what the operator of the same name without the underscore does as a view."""


def reshape_by_views(
    name: str, graph_module: fx.GraphModule, inputs: Sequence[Input], names: Mapping[int, str]
) -> None:
    """Replace the operators of a traced graph that change the shape or the storage of a tensor in place.

    Args:
        name: the user's function, for messages.
        graph_module: the graph; it is changed.
        inputs: of the step.
        names: of closed-over tensors, by `id`.

    Raises:
        PurityError: as `refuse_foreign` does.
        TraceError: what the change means cannot be said by a view. It names every operator and its line.
    """
    graph = graph_module.graph
    owners = _owners(graph, graph_module, [item.name for item in inputs], names)
    refuse_foreign(name, graph, graph_module, [item.name for item in inputs], names)
    _refuse_wrong_derivatives(name, graph)
    order = {node: index for index, node in enumerate(graph.nodes)}
    reshaped, unclear = [], []
    for node in list(graph.nodes):
        for given, value, is_out in _reshaped_in_place(node):
            if (replace := _replacement(node, given, value, is_out, order)) is None:
                unclear.append(located(node))
            else:
                replace()
                reshaped.append(node)
    if unclear:
        raise TraceError(
            build_message(
                f"step {name!r} gives tensors another shape in place, in a way that a traced step cannot follow.",
                unclear,
                remedy="make a new tensor of the right shape (torch.empty, or no out= at all) where another one would "
                "have to grow; use views, such as x[:n] and x.view(shape), where it would shrink.",
            )
        )
    for node in reversed(reshaped):
        if not node.users and effects_of(node).pure:
            graph.erase_node(node)
    for module in graph_module.modules():  # branches of conditions as well
        if isinstance(module, fx.GraphModule):
            _make_windows_strided(module.graph)
    _apply_as_strided_to_base(graph, owners)


def refuse_foreign(name: str, graph: fx.Graph, holder: object, inputs: Sequence[str], names: Mapping[int, str]) -> None:
    """Refuse in-place changes of the shape or the storage of tensors that the step does not own.

    Args:
        name: the user's function, for messages.
        graph: the graph, or as much of it as there is: to the tracer a closed-over tensor keeps the shape that it had,
            so that what comes after may fail, and this is the cause.
        holder: has the closed-over tensors as attributes.
        inputs: the names of the step's inputs, as many as there are placeholders.
        names: of closed-over tensors, by `id`.

    Raises:
        PurityError: an argument, or a closed-over tensor, is changed so: its owner would find it in another shape.
    """
    owners = _owners(graph, holder, inputs, names)
    foreign = [
        f"{owners[owner]}: {located(node)}"
        for node in graph.nodes
        for given, value, _ in _reshaped_in_place(node)
        if (owner := _object(given)) in owners and _memory_and_layout(given.meta["val"]) != _memory_and_layout(value)
    ]
    if foreign:
        raise PurityError(
            build_message(
                f"step {name!r} gives tensors another shape, or other memory, in place that it does not own.",
                foreign,
                remedy="make a view and use that, as in w = w.t() for w.t_(): the caller's tensor stays as it is.",
            )
        )


def _refuse_wrong_derivatives(name: str, graph: fx.Graph) -> None:
    """Refuse an in-place change of shape after which autograd may confuse two views.

    When memory was changed in place, autograd finds the history of its views anew. For tensors with values it goes by
    where in memory a view lies. For those of a trace it repeats how the view was made, on a base that may have another
    shape by now. (Seen with torch 2.13: the derivative of `k` in `k = h[:]; h.t_()` is turned.)

    Raises:
        TraceError: a value that gradients may pass is changed so, and another view of it is used afterwards; or a view
            is changed so, and its memory is written to afterwards. It names every line.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    last = max((order[node] for node in order if node.meta.get("backward")), default=-1)
    at_fault = [
        located(node)
        for node in order
        if order[node] < last and not node.meta.get("backward")
        for given, value, _ in _reshaped_in_place(node)
        if _memory_and_layout(given.meta["val"]) != _memory_and_layout(value)
        and _other_view_is_used(given, node, order)
    ]
    if at_fault:
        raise TraceError(
            build_message(
                f"step {name!r} gives a tensor another shape in place that shares memory with a view, and is "
                "differentiated: in a trace the view would get the derivative of another one.",
                at_fault,
                remedy="make a view and use that, as in h = h.t() for h.t_(): the derivative is that of plain PyTorch.",
            )
        )


def _other_view_is_used(given: fx.Node, node: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    """Whether another view is used after an in-place change of shape; if a view was changed, whether its memory is
    written."""
    memory, changed = set(storages_of(given)), _object(given)
    sharing = [other for other in order if not memory.isdisjoint(storages_of(other))]
    if changed.op == "call_function" and effects_of(changed).view:
        writes = (written for other in order if order[other] > order[node] for written in effects_of(other).writes)
        return any(not memory.isdisjoint(storages_of(written)) for written in writes)
    before = [other for other in sharing if order[other] < order[node] and _object(other) is not changed]
    return any(order[user] > order[node] for other in before for user in other.users)


def _owners(graph: fx.Graph, holder: object, inputs: Sequence[str], names: Mapping[int, str]) -> dict[fx.Node, str]:
    """The tensors of a step's caller, with names."""
    owners = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in graph.find_nodes(op="get_attr"):
        held = getattr(holder, str(node.target), None)
        owners[node] = names.get(id(held), f"a closed-over tensor of shape {list(getattr(held, 'shape', ()))}")
    return owners


def _reshaped_in_place(node: fx.Node) -> Iterator[tuple[fx.Node, Any, bool]]:
    """Of the tensors that a node changes and returns, those that may have another layout or storage afterwards."""
    for given, value, is_out in _changed_in_place(node):
        moves = operator_name(node) in (*_VIEWS, "resize_", "resize_as_", "set_")
        if moves or _memory_and_layout(given.meta["val"]) != _memory_and_layout(value):
            yield given, value, is_out


def _make_windows_strided(graph: fx.Graph) -> None:
    """Write `unfold` as `as_strided`, where windows do not overlap and are written to.

    What functionalization makes of a change of windows has zeros wherever there is no window.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.unfold.default):
        whole, _, size, step = node.args
        if size <= step and _is_written_to(node):
            value = node.meta["val"]
            node.target, node.args = _aten.as_strided.default, (whole, list(value.shape), list(value.stride()))
            node.meta.pop("effects", None)


def _is_written_to(view: fx.Node) -> bool:
    """Whether anything is written through a view, or through views of it."""
    return any(
        view in effects_of(user).writes or (effects_of(user).view and _is_written_to(user))
        for user in view.users
        if user.op == "call_function"
    )


def _apply_as_strided_to_base(graph: fx.Graph, owners: Mapping[fx.Node, str]) -> None:
    """Apply `as_strided` of a view to the base of the view, which has the same elements.

    Functionalization, which compiled steps need, refuses changes of it otherwise. Of arguments it is not known here
    where in their memory they begin.
    """
    foreign = {number for node in owners for number in storages_of(node)}
    for node in graph.find_nodes(op="call_function", target=_aten.as_strided.default):
        view, size, stride, *offset = node.args
        whole = whole_of(view)
        if whole is view or view.meta["val"].is_conj() or not foreign.isdisjoint(storages_of(whole)):
            continue
        place = offset[0] if offset and offset[0] is not None else view.meta["val"].storage_offset()
        node.args, node.kwargs = (whole, size, stride, place), {}


def _changed_in_place(node: fx.Node) -> Iterator[tuple[fx.Node, Any, bool]]:
    """The tensors that a node changes and returns: argument, result, and whether it is an out argument."""
    target, result = node.target, node.meta.get("val")
    if node.op != "call_function" or not isinstance(target, OpOverload) or not schema_of(target).is_mutable:
        return
    values = list(result) if isinstance(result, (list, tuple)) else [result]
    for argument, given in bound_arguments(node):
        if not isinstance(given, fx.Node) or argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for returned, value in zip(schema_of(target).returns, values, strict=False):
            alias = returned.alias_info
            if alias is not None and alias.before_set & argument.alias_info.before_set:
                yield given, value, argument.is_out


def _memory_and_layout(value: Any) -> tuple[Any, ...]:
    """The storage of a tensor, and its layout there: equal for tensors that are the same elements in the same order."""
    return (
        storages(value), tuple(value.shape), tuple(value.stride()), value.storage_offset(), value.dtype,
        value.is_conj(), value.is_neg(),
    )  # fmt: skip


def _object(node: fx.Node) -> fx.Node:
    """The node that first named the object that a node stands for: an operator in place returns what it is given."""
    while True:
        given = next((given for given, _, _ in _changed_in_place(node)), None)
        if given is None:
            return node
        node = given


def _replacement(
    node: fx.Node, given: fx.Node, value: torch.Tensor, is_out: bool, order: Mapping[fx.Node, int]
) -> Callable[[], None] | None:
    """A function that replaces an in-place operator by a view, or a resized out argument by a new tensor; else None."""
    name, target = operator_name(node), node.target
    bound = {argument.name: argument_value for argument, argument_value in bound_arguments(node)}

    def become(operator: Any, *args: Any, **kwargs: Any) -> None:
        node.target, node.args, node.kwargs = operator, args, kwargs
        node.meta.pop("effects", None)

    if name in _VIEWS:
        view = _view_of(target)
        return lambda: become(view, *node.args, **node.kwargs)
    if _memory_and_layout(given.meta["val"]) == _memory_and_layout(value):
        return lambda: become(_aten.alias.default, given)
    if target is _aten.set_.source_Tensor:
        return lambda: become(_aten.alias.default, bound["source"])
    if name in ("resize_", "resize_as_") and _end(value) <= _known_bytes(given, order, order[node]):
        # Without a place of its own, it begins where what it is a view of begins.
        return lambda: become(_aten.as_strided.default, given, list(value.shape), list(value.stride()))
    if _memory_is_used_later(given, node, order):
        return None
    made: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    later = [other for other, index in order.items() if index >= order[node]]
    if name in ("resize_", "resize_as_"):
        if given.meta["val"].numel():
            return None  # what is added holds whatever was in memory

        def begin() -> None:
            _give_new_storage(given, later)
            become(_aten.empty_strided.default, list(value.shape), list(value.stride()), **made)

        return begin
    if not is_out:
        return None

    def give_another() -> None:
        moved = _give_new_storage(given, later)
        with node.graph.inserting_before(node):
            new = node.graph.call_function(_aten.empty_strided.default, (list(value.shape), list(value.stride())), made)
        new.meta.update(val=moved[id(value)], source=node.meta.get("source"), backward=node.meta.get("backward"))
        node.replace_input_with(given, new)
        node.meta.pop("effects", None)

    return give_another


def _give_new_storage(given: fx.Node, later: Iterable[fx.Node]) -> dict[int, Any]:
    """Give new storage to the values of nodes: an operator moved them out of a storage that was too small.

    torch keeps the storage, and gives it other memory; a trace tells memory by the storage. (A gradient that was
    averaged lies in its bucket, say, where there is room for it alone.)

    Args:
        given: what lay in the memory first.
        later: nodes from the one that left it on.

    Returns:
        What each example value became, by the `id` of what it was.
    """
    left = set(storages_of(given))
    nodes = [node for node in later if not left.isdisjoint(storages_of(node))]
    values = {
        id(value): value
        for node in nodes
        for value in pytree.leaves_of(node.meta["val"])
        if not left.isdisjoint(storages(value))
    }
    first = next(iter(values.values()))
    memory = first.new_empty(max(map(_end, values.values())), dtype=torch.uint8).untyped_storage()

    def elsewhere(value: Any) -> Any:
        lies = value.new_empty(0).set_(memory, value.storage_offset(), value.shape, value.stride())
        lies = lies.conj() if value.is_conj() else lies
        return negative_view(lies) if value.is_neg() else lies

    moved = {number: elsewhere(value) for number, value in values.items()}
    for node in nodes:
        node.meta["val"] = pytree.map_leaves(lambda value: moved.get(id(value), value), node.meta["val"])
        node.meta.pop("effects", None)
    return moved


def _view_of(target: object) -> Any:
    """The view operator of the same effect as an in-place operator."""
    packet = getattr(_aten, schema_of(target).name.removeprefix("aten::").removesuffix("_"))
    overload = overload_name_of(target)
    return getattr(packet, overload if overload in packet.overloads() else "int")  # transpose_ is transpose.int


def _end(value: torch.Tensor) -> int:
    """The end of a tensor, in bytes from the beginning of its storage."""
    if value.numel() == 0:
        return 0
    steps = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return int(value.storage_offset() + steps + 1) * value.element_size()


def _known_bytes(given: fx.Node, order: Mapping[fx.Node, int], at: int) -> int:
    """The bytes that the storage of a tensor certainly has: those in use before a position of the graph.

    (Not the size of the storage of its example value, which may have grown since.)
    """
    memory = set(storages_of(given))
    before = (node for node, index in order.items() if index < at and isinstance(node.meta.get("val"), torch.Tensor))
    return max(_end(node.meta["val"]) for node in before if not memory.isdisjoint(storages_of(node)))


def _memory_is_used_later(given: fx.Node, node: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    """Whether any other tensor of the same memory, or the argument itself, is used after an in-place operator."""
    memory = set(storages_of(given))
    own = {given, node}
    return any(
        order.get(user, -1) > order[node]
        for other, index in order.items()
        if index < order[node] and not memory.isdisjoint(storages_of(other)) and other not in own
        for user in other.users
    ) or any(order.get(user, -1) > order[node] for user in given.users)
