"""Out variants: operators that write their results to given memory.

An emitted step computes on the same shapes again and again. Where every result has its place, no step asks the
allocator for memory, pages that were touched once stay touched, and a gradient is written straight into its bucket.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fdp.pytorch.overloads import OpOverload, has_kernel, schema_of
from fdp.trace.operators.effects import bound_arguments, effects_of, operator_name

_aten = torch.ops.aten

_WITH_OUT_UNDER_ANOTHER_NAME: dict[Any, tuple[Any, tuple[Any, ...]]] = {
    # What `relu` calls in turn; `relu.out` itself computes a new tensor and copies it.
    _aten.relu.default: (_aten.clamp_min.out, (0,)),
    # Numbers become tensors of no dimension on the way in, which take part in the choice of the dtype as numbers do.
    _aten.add.Scalar: (_aten.add.out, ()),
    _aten.sub.Scalar: (_aten.sub.out, ()),
    _aten.mul.Scalar: (_aten.mul.out, ()),
    _aten.div.Scalar: (_aten.div.out, ()),
}

_SCALED: dict[Any, Any] = {
    # The product of `mm.out`, times a number, in the same pass over memory.
    _aten.mm.out: _aten.addmm.out,
}

_WRITES_IN_PLACE_TEXT = """
    abs add addcdiv addcmul atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min
    cos div elu elu_backward eq erf exp exp2 expm1 floor fmax fmin fmod ge gelu gelu_backward gt hardsigmoid
    hardsigmoid_backward hardswish hardtanh hardtanh_backward le leaky_relu leaky_relu_backward lerp log log10 log1p
    log2 logical_and logical_not logical_or logical_xor lt maximum minimum mish mul ne neg pow reciprocal remainder
    round rsqrt sgn sigmoid sigmoid_backward sign silu silu_backward sin softplus softplus_backward sqrt sub tan
    tanh tanh_backward threshold threshold_backward trunc where xlogy
    addmm addmv baddbmm bmm mm
    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data amax amin cumsum linalg_vector_norm mean sum
    cat gather index_select scatter scatter_add tril triu
    avg_pool2d avg_pool2d_backward max_pool2d_with_indices max_pool2d_with_indices_backward native_batch_norm
    mse_loss_backward nll_loss_backward nll_loss_forward
"""
_WRITES_IN_PLACE = frozenset(_WRITES_IN_PLACE_TEXT.split())
"""Operators whose out variants are known (and tested) to write each result once, to the given memory. Others may resize
it, or compute elsewhere and copy."""

_COPIES = (_aten.clone.default, _aten._to_copy.default)
_FILLED: dict[str, float] = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FILLED_WITH_ARGUMENT = ("full", "full_like", "new_full")


@dataclass(frozen=True)
class OutVariant:
    """How a node is computed into given memory.

    Attributes:
        kind: "out" (call `operator` with the node's arguments, `extra` ones and out arguments), "copy" (copy its first
            argument), "fill" (with `value`), or "nothing" (the node only takes memory).
        operator: for "out".
        names: of the out arguments, one for each result.
        extra: arguments behind the node's own.
        value: for "fill".
        pointwise: each element of the result depends only on the same element of the arguments, so that the
            result may take an argument's place.
    """

    kind: str
    operator: Any = None
    names: tuple[str, ...] = ("",)
    extra: tuple[Any, ...] = ()
    value: Any = None
    pointwise: bool = False

    @property
    def scaled(self) -> Any:
        """An operator (out, *arguments, beta=0, alpha=number, out=out) that also multiplies; None if there is none."""
        return _SCALED.get(self.operator)


def out_variant_of(node: fx.Node) -> OutVariant | None:
    """The out variant of a node; None if its operator has none.

    Args:
        node: a call of an operator in a traced graph.

    Returns:
        A variant whose results have the bits, the shape and the strides of the node's.
    """
    target, values = node.target, _results(node)
    if not isinstance(target, OpOverload) or target.namespace != "aten" or not values:
        return None
    if not all(_is_plain(value) for value in values):
        return None
    device = values[0].device
    if any(value.device != device for value in values):
        return None
    name = operator_name(node)
    if name == "native_batch_norm" and not _is_contiguous(node.args[0]):
        return None  # its out variant adds the statistics of such an input to what the place held before
    if len(values) == 1 and target in _COPIES:
        source = node.args[0]
        same = isinstance(source, fx.Node) and source.meta["val"].device == device
        return OutVariant("copy", pointwise=True) if same else None
    if effects_of(node).uninitialised:
        return OutVariant("nothing")
    if name in _FILLED:
        return OutVariant("fill", value=_FILLED[name])
    if name in _FILLED_WITH_ARGUMENT:
        given = {argument.name: value for argument, value in bound_arguments(node)}
        value = given.get("fill_value")
        return OutVariant("fill", value=value) if isinstance(value, (int, float)) else None
    if target in _WITH_OUT_UNDER_ANOTHER_NAME and device.type in ("cpu", "cuda") and not _takes_alpha(node):
        operator, extra = _WITH_OUT_UNDER_ANOTHER_NAME[target]
        names = _out_names(operator)
        return OutVariant("out", operator, names, extra, pointwise=_is_pointwise(target))
    operator = _out_variant(target, device.type)
    if operator is None:
        return None
    names = _out_names(operator)
    return OutVariant("out", operator, names, pointwise=_is_pointwise(target)) if len(names) == len(values) else None


def _results(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)) and all(isinstance(item, torch.Tensor) for item in value):
        return list(value)
    return []


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a result is dense, covers its storage from the beginning to the end, and has a known size."""
    return (
        value.layout == torch.strided
        and all(isinstance(number, int) for number in (*value.shape, *value.stride()))
        and value.numel() > 0
        and value.storage_offset() == 0
        and not value.is_conj()
        and not value.is_neg()
        and not value.is_quantized
        and value.untyped_storage().nbytes() == value.numel() * value.itemsize
        and torch.ops.aten.is_non_overlapping_and_dense.default(value)
    )


def _is_contiguous(node: Any) -> bool:
    """Whether a value is contiguous in one of torch's memory formats."""
    value = node.meta["val"]
    formats = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}.get(value.dim(), ())
    return any(value.is_contiguous(memory_format=format) for format in (torch.contiguous_format, *formats))


def _takes_alpha(node: fx.Node) -> bool:
    """Whether a call is x + alpha * number, with alpha by position; the out variant takes it by name only."""
    return len(node.args) > 2 or bool(node.kwargs)


@functools.cache
def _out_variant(target: Any, device: str) -> Any:
    """The overload that writes into an argument and has a kernel of its own for the device.

    torch generates an out overload for every operator; most of the generated ones compute as usual and copy.
    """
    backend = {"cpu": "CPU", "cuda": "CUDA"}.get(device)
    if backend is None or schema_of(target).name.removeprefix("aten::") not in _WRITES_IN_PLACE:
        return None
    wanted = [(a.name, str(a.type)) for a in schema_of(target).arguments]
    for overload in _overloads(target.overloadpacket):
        arguments = schema_of(overload).arguments
        outs = [a for a in arguments if a.is_out]
        if not outs or any(str(a.type) != "Tensor" for a in outs):
            continue
        if [(a.name, str(a.type)) for a in arguments if not a.is_out] != wanted:
            continue
        # Generated ones have a kernel for any backend alone. Were it true of more, those would be called: slower, as
        # right.
        if has_kernel(overload, backend):
            return overload
    return None


def _overloads(packet: Any) -> Iterator[Any]:
    for name in packet.overloads():
        yield getattr(packet, name)


def _out_names(operator: object) -> tuple[str, ...]:
    return tuple(argument.name for argument in schema_of(operator).arguments if argument.is_out)


def _is_pointwise(target: Any) -> bool:
    return torch.Tag.pointwise in target.tags
