"""Values of a graph to be compiled have the strides of the trace.

A decomposition may give its result other strides than the operator's kernel does. The views that follow are those of
the trace. With other strides they would have other elements (`as_strided`), or would not exist (`view`). The same goes
for a value that is changed through a view: functionalization makes its new value from the view's. Such values are
copied, which a compiler fuses with the computation around.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from fdp.emit.memory.elements import has_each_element_once, has_strides
from fdp.pytorch.overloads import OpOverload, schema_of
from fdp.trace.capture.functional import bring_up_to_date, keep_strides
from fdp.trace.operators.effects import effects_of, storages_of

_aten = torch.ops.aten


def empty_like(example: torch.Tensor) -> torch.Tensor:
    """An empty tensor with the strides of an example."""
    return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)


def with_strides_of(example: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value with the strides of an example; a copy if it had others."""
    if has_strides(value, example.stride()) or value.numel() == 0 or not has_each_element_once(example):
        return value
    return empty_like(example).copy_(value)


def with_traced_strides(target: Any, example: Any, result: Any) -> Any:
    """The result of a call, with new tensors in the strides of the trace.

    Args:
        target: what was called. What it says to be its argument, or a view of it, stays that.
        example: the result in the trace.
        result: the result.
    """
    if isinstance(result, (list, tuple)):
        owned = [each.alias_info is not None for each in schema_of(target).returns] if _has_schema(target) else [False]
        owned = owned if len(owned) == len(result) else owned * len(result)
        laid = [one if old else _restrided(at, one) for at, one, old in zip(example, result, owned, strict=True)]
        return tuple(laid) if isinstance(result, tuple) else laid
    return result if _has_schema(target) and schema_of(target).returns[0].alias_info else _restrided(example, result)


def _has_schema(target: Any) -> bool:
    return isinstance(target, OpOverload) and len(schema_of(target).returns) > 0


def _restrided(example: Any, value: Any) -> Any:
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return with_strides_of(example, value) if is_strided else value


class StrideKeeper:
    """Keeps the strides of memory that a functionalized graph changes.

    Args:
        graph: of a trace, or of a branch.
        inside: inputs that begin in the middle of their memory, where the graph has them begin at zero.
    """

    def __init__(self, graph: fx.Graph, inside: Collection[fx.Node] = ()) -> None:
        self._inside = inside
        self._makers: dict[int, fx.Node] = {}
        for node in graph.nodes:
            if isinstance(node.meta.get("val"), torch.Tensor):
                for memory in storages_of(node):
                    self._makers.setdefault(memory, node)

    def applied_to_base(self, node: fx.Node, args: Any, value_of: Callable[[fx.Node], Any]) -> Any:
        """The arguments of a call; for `as_strided` of a view those that select the same elements of the base.

        Functionalization takes changes through `as_strided` of a whole, and refuses them of a view.

        Args:
            node: what will be called.
            args: with these arguments.
            value_of: the tensor of an earlier node.
        """
        if node.target is not _aten.as_strided.default or len(memory := storages_of(node)) != 1:
            return args
        maker = self._makers[memory[0]]
        seen, example, whole = node.meta["val"], maker.meta["val"], value_of(maker)
        if not isinstance(whole, torch.Tensor) or whole is args[0] or not has_strides(whole, example.stride()):
            return args
        if any((each.dtype, each.is_conj(), each.is_neg()) != (seen.dtype, False, False) for each in (seen, example)):
            return args
        place = seen.storage_offset() - example.storage_offset()
        if place == 0:
            return whole, *args[1:3]
        # The new value of an input begins at zero, wherever the input does: no number is its place before and after.
        known = place > 0 and maker not in self._inside and whole.storage_offset() == 0
        return (whole, *args[1:3], place) if known else args

    def restore_strides(self, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> None:
        """Restore the strides of what a node changed.

        Args:
            node: what was called just now.
            value_of: the tensor of an earlier node.
        """
        for memory in {each for target in effects_of(node).writes for each in storages_of(target)}:
            maker = self._makers.get(memory)
            value = None if maker is None else value_of(maker)
            if maker is not None and isinstance(value, torch.Tensor) and value.layout is torch.strided:
                example = maker.meta["val"]
                if example.shape == value.shape and has_each_element_once(example):
                    keep_strides(value, example.stride())


class Branch(fx.Interpreter):
    """Runs a branch of an operator such as `cond`; its values have the strides of the trace, too."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._changes = StrideKeeper(module.graph)

    def __call__(self, *operands: Any) -> Any:
        """Its results."""
        return self.run(*operands)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What the graph holds."""
        found = super().get_attr(target, args, kwargs)
        return Branch(found) if isinstance(found, fx.GraphModule) else found

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """What a function is called with."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return self._changes.applied_to_base(n, args, self.env.get), kwargs

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What a function makes of arguments."""
        bring_up_to_date(target, args)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """The result of one call."""
        result = super().run_node(n)
        if n.op == "call_function":
            result = with_traced_strides(n.target, n.meta.get("val"), result)
            self._changes.restore_strides(n, self.env.get)
        return result
