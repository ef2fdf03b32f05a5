"""Corrections of known mistakes of inductor, each with the releases of torch in which it was seen.

`torch.compile` makes the same mistakes. Without corrections the comparison at the first call would refuse such a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fdp.emit.compiled.numbers import NARROW, NUMBERS, wide
from fdp.emit.compiled.special_values import KERNEL_DECOMPOSITIONS
from fdp.trace.calls.arguments import overlaps_itself
from fdp.trace.operators.fake_rules import LOSS_GRADIENTS

_aten = torch.ops.aten


def _first_extreme(operator: Any) -> Callable[..., Any]:
    """`argmax` and `argmin` of a whole tensor, on a flat copy: of several equal elements the first counts.

    Inductor walks the tensor in memory order, and takes the first one there. Of int8 it returns other places (seen in
    torch 2.13, with `torch.compile` as well).
    """

    def place(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if x.dtype == torch.int8:
            return operator(x.to(torch.int16), dim, keepdim)
        if dim is not None or x.dim() < 2:
            return NotImplemented
        found = operator(x.reshape(-1), 0)
        return found.reshape([1] * x.dim()) if keepdim else found

    return place


def _extreme_of_bytes(operator: Any) -> Callable[..., Any]:
    """The largest or smallest values of int8 and their places; see `_first_extreme`."""

    def values_and_places(x: Any, dim: int, keepdim: bool = False) -> Any:
        if x.dtype != torch.int8:
            return NotImplemented
        values, places = operator(x.to(torch.int16), dim, keepdim)
        return values.to(torch.int8), places

    return values_and_places


def _strided_copy(x: Any, *where: Any, **named: Any) -> Any:
    """`as_strided_copy` as a copy of `as_strided`: only for the latter inductor keeps the strides of the argument (seen
    in torch 2.13, in branches of conditions, where views become copies)."""
    return _aten.as_strided.default(x, *where, **named).clone()


def _average_pool_gradient(operator: Any, dims: int) -> Any:
    """The gradient of average pooling, divided by the number of elements that each window averages.

    Inductor divides by the whole window, also where that reaches beyond the input (seen in torch 2.13 to 2.15, with
    `torch.compile` as well).
    """

    def gradient(
        grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, beyond: bool, padded: bool, divisor: Any = None
    ) -> Any:
        if not beyond or not padded or divisor is not None:
            return NotImplemented
        for dim in range(-dims, 0):
            size, step, beside = (each[dim % len(each)] for each in (kernel, stride or kernel, padding))
            first = torch.arange(grad.shape[dim], device=grad.device) * step - beside
            count = (first + size).clamp(max=x.shape[dim] + beside) - first
            grad = grad / count.view([-1] + [1] * (-1 - dim))
        return operator(grad, x, kernel, stride, padding, beyond, padded, 1)

    return gradient


def _scatter_into_copy(operator: Any) -> Callable[..., Any]:
    """A scatter into a tensor that overlaps itself, such as an expanded one: into a contiguous copy.

    Inductor scatters in place where nothing else reads the old value, and changes all elements that share memory (seen
    in torch 2.13 to 2.15, with `torch.compile` as well).
    """

    def scattered(x: Any, *how: Any, **named: Any) -> Any:
        if not overlaps_itself(x):
            return NotImplemented
        return operator(x.clone(memory_format=torch.contiguous_format), *how, **named)

    return scattered


def _put_by_mask(operator: Any) -> Callable[..., Any]:
    """`index_put` of one value by a mask, as `where`.

    Inductor does the same in place, and loses a scatter that came before (seen in torch 2.13 and 2.14, with
    `torch.compile` as well).
    """
    otherwise = _scatter_into_copy(operator)

    def put(x: Any, indices: Any, values: Any, accumulate: bool = False, *rest: Any) -> Any:
        mask = indices[0]
        if len(indices) != 1 or mask is None or mask.dtype not in (torch.bool, torch.uint8) or values.numel() != 1:
            return otherwise(x, indices, values, accumulate, *rest)
        value = values.reshape([]).to(x.device)
        mask = mask.bool().reshape([*mask.shape, *[1] * (x.dim() - mask.dim())])
        return _in_memory_order_of(torch.empty_like(x), _aten.where.self(mask, x + value if accumulate else value, x))

    return put


def _in_memory_order_of(one: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """A value in the memory order of another one, without gaps: `where`, say, has that of its mask."""
    strides = one.stride()
    if made.stride() == strides:
        return made
    order = sorted(range(one.dim()), key=lambda dim: (-strides[dim], -one.shape[dim], dim))
    back = sorted(range(one.dim()), key=lambda dim: order[dim])
    return made.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def _alone(x: Any, dim: int, half_to_float: bool) -> Any:
    """The softmax of a scalar, which is one: inductor fails on two of them, one after the other (seen in torch 2.13 to
    2.15, with `torch.compile` as well)."""
    return (x - x).exp() if x.dim() == 0 and not half_to_float else NotImplemented


def _of_no_elements(grad: Any, x: Any, *rest: Any) -> Any:
    """The gradient of a loss of no elements, which has none: torch divides by their number (seen in 2.13)."""
    return torch.zeros_like(x) if x.numel() == 0 else NotImplemented


def _sum_of_bytes(operator: Any) -> Callable[..., Any]:
    """A sum in eight bits, added up in more, and cut off in the end.

    Inductor puts the parts of a vector together wrongly (seen in torch 2.13, with `torch.compile` as well).
    """

    def total(x: Any, *how: Any, dtype: Any = None) -> Any:
        if (dtype or torch.int64) not in (torch.int8, torch.uint8):
            return NotImplemented
        return operator(x.to(dtype), *how, dtype=torch.int64).to(dtype)

    return total


def _wide_loss(operator: Any) -> Callable[..., Any]:
    """A loss of sixteen bits whose exponential would overflow in them (seen in torch 2.13, with `torch.compile`)."""

    def loss(x: Any, *given: Any) -> Any:
        return operator(wide(x), *map(wide, given)).to(x.dtype) if x.dtype in NARROW else NotImplemented

    return loss


def _any_of_bytes(operator: Any) -> Callable[..., Any]:
    """`any` of uint8, which is one of uint8; inductor makes a bool of it (seen in torch 2.13, with `torch.compile`)."""

    def found(x: Any, *how: Any, **named: Any) -> Any:
        return operator(x != 0, *how, **named).to(torch.uint8) if x.dtype == torch.uint8 else NotImplemented

    return found


_AS_IT_IS = object()
"""What a correction returns for an operator that is not taken apart at all: its kernel is called."""


def no_fractions(*numbers: Any) -> bool:
    """Whether none of some numbers is known not to be whole."""
    return not any(isinstance(each, float) and not each.is_integer() for each in numbers)


def _numbers_between(operator: Any) -> Callable[..., Any]:
    """`linspace`, `logspace`, and `arange` by fractions, rounded as their own kernels do it.

    An index may be made of them, and then another digit is another index (seen in torch 2.13, with `torch.compile` as
    well). Of tensors on a card the kernels ask for the values, for which a call would have to wait: these stay as
    inductor has them.
    """

    def between(start: Any, end: Any, *more: Any, **how: Any) -> Any:
        given = (start, end, *more)
        if operator is _aten.arange.start_step and no_fractions(*given):
            return NotImplemented
        if any(isinstance(each, torch.Tensor) and each.device.type != "cpu" for each in given):
            return NotImplemented
        if how.get("dtype") is None and not any(map(_is_complex, given)):
            return operator(*given, **{**how, "dtype": torch.get_default_dtype()})
        return _AS_IT_IS

    return between


def _is_complex(number: Any) -> bool:
    return isinstance(number, complex) or (isinstance(number, torch.Tensor) and number.is_complex())


NUMBERS_BETWEEN = (
    *(getattr(_aten.linspace, each) for each in ("default", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")),
    *(getattr(_aten.logspace, each) for each in ("default", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")),
    _aten.arange.start_step,
)
"""Operators of which `_numbers_between` leaves some calls whole."""


def _mean_of_nothing(x: Any, dim: Any = None, **how: Any) -> Any:
    """`var_mean` of no elements: inductor takes their mean for zero (seen in torch 2.13, with `torch.compile` too)."""
    if x.numel():
        return NotImplemented
    dims = list(range(x.dim())) if dim is None else dim
    return _aten.var.correction(x, dim, **how), _aten.mean.dim(x, dims, bool(how.get("keepdim")))


def _take_one(x: Any, place: Any) -> Any:
    """`take` with a place without dimensions, whose value torch asks for (seen in torch 2.13)."""
    return NotImplemented if place.dim() else _aten.take.default(x, place.reshape(1)).reshape(())


def _add_at_one(operator: Any) -> Callable[..., Any]:
    """`index_add` with a place without dimensions, which inductor cannot lower (seen in torch 2.13)."""

    def added(x: Any, dim: int, place: Any, *source: Any, **named: Any) -> Any:
        return NotImplemented if place.dim() else operator(x, dim, place.reshape(1), *source, **named)

    return added


def _multilabel_margin_loss(x: Any, target: Any, reduction: int) -> Any:
    """`multilabel_margin_loss_forward`: the targets of a row end at the first -1.

    Torch's decomposition counts what follows as the target zero (seen in torch 2.13, with `torch.compile` as well).
    """
    rows, targets = torch.atleast_2d(x), torch.atleast_2d(target)
    count = rows.shape[1]
    index = torch.arange(count, device=targets.device)
    end = torch.where(targets == -1, index, count).amin(-1, keepdim=True)
    named = index < end
    is_target = (index == torch.where(named, targets, -1).unsqueeze(-1)).any(1)
    margins = 1 - rows.gather(-1, torch.where(named, targets, 0)).unsqueeze(-1) + rows.unsqueeze(1)
    counted = named.unsqueeze(-1) & ~is_target.unsqueeze(1)
    losses = torch.where(counted, margins.clamp_min(0) / count, 0).sum((1, 2))
    loss = losses.mean() if reduction == 1 else losses.sum() if reduction == 2 else losses.reshape(target.shape[:-1])
    return loss, is_target.to(x.dtype).reshape(target.shape)


CORRECTIONS: Mapping[Any, Callable[..., Any]] = {
    **KERNEL_DECOMPOSITIONS,
    _aten._softmax.default: _alone,
    _aten.as_strided_copy.default: _strided_copy,
    _aten.var_mean.correction: _mean_of_nothing,
    _aten.take.default: _take_one,
    **{each: _numbers_between(each) for each in NUMBERS_BETWEEN},
    **{each: _add_at_one(each) for each in (_aten.index_add.default, _aten.index_add_.default)},
    _aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    **{
        each: _average_pool_gradient(each, dims)
        for each, dims in (
            (_aten.avg_pool2d_backward.default, 2),
            (_aten.avg_pool3d_backward.default, 3),
        )
    },
    **{
        each: _scatter_into_copy(each)
        for each in (
            _aten.select_scatter.default,
            _aten.slice_scatter.default,
            _aten.diagonal_scatter.default,
            _aten.as_strided_scatter.default,
        )
    },
    **{each: _put_by_mask(each) for each in (_aten.index_put.default, _aten._unsafe_index_put.default)},
    **dict.fromkeys(LOSS_GRADIENTS, _of_no_elements),
    **{each: _sum_of_bytes(each) for each in (_aten.sum.default, _aten.sum.dim_IntList)},
    _aten.soft_margin_loss.default: _wide_loss(_aten.soft_margin_loss.default),
    **{each: _any_of_bytes(each) for each in (_aten.any.default, _aten.any.dim, _aten.any.dims)},
    **{each: _extreme_of_bytes(each) for each in (_aten.max.dim, _aten.min.dim)},
    **{each: _first_extreme(each) for each in (_aten.argmax.default, _aten.argmin.default)},
}
"""Decompositions of operators that inductor computes wrongly; `NotImplemented` where inductor is right, and `_AS_IT_IS`
where neither is, but the operator's own kernel."""


def with_corrections(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """A table of decompositions in which the corrections come first."""
    # Complex sums stay whole: inductor would take them apart into views of other dtypes.
    corrected = {operator: found for operator, found in table.items() if operator is not _aten.add.Tensor}
    for corrections in (CORRECTIONS, NUMBERS):  # each before those that come earlier
        corrected |= {operator: _or_else(own, corrected.get(operator)) for operator, own in corrections.items()}
    return corrected


def _or_else(own: Callable[..., Any], otherwise: Callable[..., Any] | None) -> Callable[..., Any]:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        made = own(*args, **kwargs)
        if made is NotImplemented and otherwise is not None:
            return otherwise(*args, **kwargs)
        return NotImplemented if made is _AS_IT_IS else made

    return decomposed
