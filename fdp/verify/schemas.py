"""What an operator does to its arguments, from its schema: what it reads, writes, and uses without reading.

Where schemas say too little or too much, the knowledge is in the tables of this file. It is kept apart from
`trace/operators/effects.py` on purpose: what that file gets wrong must show here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fdp.pytorch.overloads import OpOverload, has_kernel, schema_of

_aten = torch.ops.aten

_STATISTICS = ("running_mean", "running_var")
_WRITES_UNDECLARED: dict[str, tuple[str, ...]] = {
    # Batch normalisation in training mode changes its running statistics.
    "aten::native_batch_norm": _STATISTICS,
    "aten::cudnn_batch_norm": _STATISTICS,
    "aten::miopen_batch_norm": _STATISTICS,
    "aten::batch_norm_update_stats": _STATISTICS,
    "aten::batch_norm_gather_stats": _STATISTICS,
    "aten::batch_norm_gather_stats_with_counts": _STATISTICS,
}
_FILLED: dict[str, tuple[str, ...]] = {
    # Written, and not read, though no out argument by name.
    "aten::rrelu_with_noise": ("noise",),
}
HIDDEN_VIEWS: dict[Any, Any] = {
    _aten._unsafe_view.default: _aten.view.default,
    _aten.unsafe_split.Tensor: _aten.split.Tensor,
    _aten.unsafe_split_with_sizes.default: _aten.split_with_sizes.default,
}
"""Operators that return views, which their schemas do not say, and those of the same views that do say so."""

_HIDDEN = frozenset(schema_of(hidden).name for hidden in HIDDEN_VIEWS)

_FOR_SHAPE_ALONE: dict[str, str] = {
    **dict.fromkeys(
        (f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")), "self"
    ),
    **dict.fromkeys((f"new_{name}" for name in ("empty", "empty_strided", "zeros", "ones", "full")), "self"),
    "bernoulli.p": "self",
    "axis_index": "like",
    "loop_begin": "like",
}
"""Arguments that are looked at for shape, dtype and device alone: by operator, or by one overload of it."""

_OVERWRITTEN = frozenset({
    # In place, and the result does not depend on what was there.
    "copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_", "exponential_", "random_", "cauchy_",
    "log_normal_", "geometric_", "_foreach_copy_", "_foreach_zero_",
})  # fmt: skip
_UNINITIALISED = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
_NUMBERS = frozenset({"sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "is_contiguous", "dim"})
_LAYOUT_ALONE = frozenset({"memory_format", "pin_memory", "non_blocking", "requires_grad"})
"""Arguments that decide on how a result lies in memory, or on nothing, and not on its value."""


@dataclass(frozen=True, eq=False)
class Parameter:
    """An argument of an operator.

    Attributes:
        name: its name.
        default: its default value, None if it has none.
        written: whether what it is given is changed.
        read: whether the values of what it is given matter.
        matters: whether the result depends on it at all.
        entries: whether it is a list with one entry for each tensor of an entrywise operator.
        returned: which result is what it was given, changed; None if none is.
    """

    name: str
    default: Any
    written: bool
    read: bool
    matters: bool
    entries: bool
    returned: int | None


@dataclass(frozen=True, eq=False)
class Operator:
    """The known effects of an operator.

    Attributes:
        name: of its functional form: in-place forms, forms with out arguments and overloads are all one.
        parameters: its arguments.
        results: for each result, the index of the argument that is returned, or None for a new tensor.
        views: results are its first argument under another shape; nothing is computed.
        reshapes: it changes in place under which shape a tensor looks at its memory.
        number: its result is no tensor, and is no value that is read from memory.
        entrywise: it does the same to each entry of its lists, one after the other.
        random: it may draw random numbers.
        uninitialised: its result holds what happened to be in memory.
        known: whether all it does is what its schema says: not so of operators of other libraries.
        out: whether it writes its results to a given place.
    """

    name: str
    parameters: tuple[Parameter, ...]
    results: tuple[int | None, ...]
    views: bool
    reshapes: bool
    number: bool
    entrywise: bool
    random: bool
    uninitialised: bool
    known: bool
    out: bool

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The value of each argument."""
        values = list(args)
        for parameter in self.parameters[len(values) :]:
            values.append(kwargs.get(parameter.name, parameter.default))
        return values

    def by_name(self, values: Sequence[Any]) -> dict[str, Any]:
        """The value of each argument, by its name."""
        return dict(zip(self._names, values, strict=True))

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(parameter.name for parameter in self.parameters)

    @functools.cached_property
    def new(self) -> tuple[int, ...]:
        """Which results are new tensors, by position."""
        return tuple(at for at, owner in enumerate(self.results) if owner is None)

    def draws(self, values: Sequence[Any]) -> bool:
        """Whether a call draws random numbers: attention without dropout and evaluation do not.

        (A probability of zero is drawn for all the same.)
        """
        if not self.random:
            return False
        for parameter, value in zip(self.parameters, values, strict=True):
            if parameter.name in ("train", "training") and value is False:
                return False
            if parameter.name in ("dropout_p", "dropout") and isinstance(value, (int, float)) and value == 0:
                return False
        return True

    @functools.cached_property
    def pointwise(self) -> bool:
        """Whether each element of the result depends on the same element of the arguments alone, and is written after
        that was read. (PyTorch tags such operators, but not every overload of them.)"""
        namespace, name = self.name.split("::")
        if self.entrywise or name in ("copy", "fill", "zero", "clone", "_to_copy"):
            return True
        packets = [getattr(getattr(torch.ops, namespace), each, None) for each in (name, f"{name}_")]
        overloads = [getattr(packet, each) for packet in packets if packet is not None for each in packet.overloads()]
        return any(torch.Tag.pointwise in overload.tags for overload in overloads)

    @functools.cached_property
    def _declared(self) -> tuple[int, ...]:
        return tuple(at for at, parameter in enumerate(self.parameters) if parameter.written)

    def written(self, values: Sequence[Any]) -> list[int]:
        """Which arguments a call changes, by position."""
        if self.name not in _WRITES_UNDECLARED and not self.name.startswith("aten::_fused_"):
            return [at for at in self._declared if values[at] is not None]
        given = self.by_name(values)
        undeclared: tuple[str, ...] = ()
        if given.get("training", given.get("train", True)):
            undeclared = _WRITES_UNDECLARED.get(self.name, ())
        found = []
        for at, parameter in enumerate(self.parameters):
            if values[at] is None:
                continue
            writes = parameter.written
            if parameter.name == "grads" and self.name.startswith("aten::_fused_"):
                # They unscale gradients in place if they are asked to; otherwise the schema says too much.
                writes = given.get("grad_scale") is not None
            if writes or parameter.name in undeclared:
                found.append(at)
        return found

    def unread(self, values: Sequence[Any]) -> tuple[str, ...]:
        """Arguments of a call whose values do not matter, though those of other calls do."""
        if self.name != "aten::convolution_backward":
            return ()
        # The weight takes part in the gradient of the input alone, and the other way round.
        given = self.by_name(values)
        for_input, for_weight, _ = given["output_mask"]
        return tuple(name for name, read in (("weight", for_input), ("input", for_weight)) if not read)


@functools.cache
def operator_of(target: Any) -> Operator:
    """The known effects of an overload of an operator of torch, or of another library."""
    schema = schema_of(target)
    namespace, base = schema.name.split("::")
    mutable = schema.is_mutable
    functional = base
    if mutable and base.endswith("_") and not base.endswith("__"):
        functional = base[:-1]
    name = f"{namespace}::{functional}"
    owner = {
        found: at
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for found in argument.alias_info.before_set
    }
    results = tuple(
        None
        if result.alias_info is None or not result.alias_info.is_write
        else next((owner[each] for each in result.alias_info.before_set if each in owner), None)
        for result in schema.returns
    )
    returned = {at: index for index, at in enumerate(results) if at is not None}
    entrywise = namespace == "aten" and (base.startswith("_foreach_") or base.startswith("_fused_")) and any(
        argument.type.kind() == "ListType" and "Tensor" in str(argument.type) for argument in schema.arguments
    )  # fmt: skip
    views = not mutable and any(
        argument.alias_info is not None and not argument.alias_info.is_write for argument in schema.arguments
    )
    tags = target.tags
    return Operator(
        name=name,
        parameters=tuple(
            _parameter(name, base, schema.overload_name, argument, entrywise, returned.get(at))
            for at, argument in enumerate(schema.arguments)
        ),
        results=results,
        views=views or name in _HIDDEN,
        reshapes=torch.Tag.inplace_view in tags,
        number=base in _NUMBERS,
        entrywise=entrywise,
        # Markers of fdp's have the tag so that no value is frozen in them.
        random=torch.Tag.nondeterministic_seeded in tags and namespace != "fdp",
        uninitialised=base in _UNINITIALISED,
        known=namespace in ("aten", "prims", "fdp", "fdp_generator"),
        out=any(argument.is_out for argument in schema.arguments),
    )


def _parameter(name: str, base: str, overload: str, argument: Any, entrywise: bool, returned: int | None) -> Parameter:
    info = argument.alias_info
    filled = argument.name in _FILLED.get(name, ())
    shape_alone = argument.name in (_FOR_SHAPE_ALONE.get(base), _FOR_SHAPE_ALONE.get(f"{base}.{overload}"))
    overwritten = base in _OVERWRITTEN and argument.name == "self"
    return Parameter(
        name=argument.name,
        default=argument.default_value if argument.has_default_value() else None,
        written=filled or (info is not None and info.is_write),
        read=not (argument.is_out or filled or overwritten or shape_alone),
        matters=argument.name not in _LAYOUT_ALONE and not argument.is_out,
        entries=entrywise and argument.type.kind() == "ListType",
        returned=returned,
    )


def is_taken_apart(target: object) -> bool:
    """Whether an operator is implemented as a function of others (and perhaps by a kernel as well)."""
    if not isinstance(target, OpOverload):
        return False
    return has_kernel(target, "CompositeImplicitAutograd")
