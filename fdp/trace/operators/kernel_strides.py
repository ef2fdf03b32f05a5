"""The strides of a kernel's results, where the rule for fake tensors may predict others.

The rules follow the kernels well where all that they are given is contiguous. Of other values some kernels make
contiguous results and some do not, and of dimensions of size one nearly each makes strides of its own. A trace that
follows the rule takes `x.contiguous()` for a copy where it is `x` itself, or the other way round. So such a call is
made once with zeros, for what it is given in shape and strides, and its results are looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fdp.context.ambient import plain_context
from fdp.pytorch.overloads import OpOverload, schema_of
from fdp.trace.operators.effects import tensors_in

_MOST_ELEMENTS = 2**28
"""For larger values the rule is trusted: making the call would take time and memory."""

_TRUSTED = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "empty_like", "zeros_like", "ones_like", "full_like",
     "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "_to_copy", "clone"}
)  # fmt: skip
"""Operators whose rules always agree with their kernels."""


class KernelStrides:
    """Finds out how the kernels of operators lay out their results, for one trace.

    Kernels are chosen as when the program runs: without autocast around the call.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Sequence[tuple[int, ...]] | None] = {}

    def of(
        self, func: object, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]
    ) -> Sequence[tuple[int, ...]] | None:
        """Find the strides of the results of a call.

        Args:
            func: an operator.
            args: what it is given, in fake tensors.
            kwargs: likewise, by name.
            results: what its rule makes.

        Returns:
            Strides for each tensor among the results, in order; None if the rule is to be believed.
        """
        if not _is_unsure(func):
            return None
        given = tensors_in([*args, *kwargs.values()])
        if any(each.layout != torch.strided for each in (*given, *results)):
            return None
        if not all(isinstance(n, int) for each in (*given, *results) for n in (*each.shape, *each.stride())):
            return None  # not known ahead
        if not any(map(_has_other_layouts, results)):
            return None
        size = sum(each.numel() for each in (*given, *results))
        if not given or size > _MOST_ELEMENTS or all(map(_is_in_rows, given)):
            return None
        try:
            key = (func, _what_strides_depend_on(args), _what_strides_depend_on(kwargs))
            if key not in self._known:
                with plain_context():
                    self._known[key] = _measured(func, args, kwargs, results)
            return self._known[key]
        except TypeError:  # something that it is given cannot be hashed
            return None


@functools.cache
def _is_unsure(func: object) -> bool:
    if not isinstance(func, OpOverload) or func.namespace != "aten" or schema_of(func).is_mutable:
        return False
    name = schema_of(func).name.removeprefix("aten::")
    return (
        name not in _TRUSTED
        and torch.Tag.nondeterministic_seeded not in func.tags
        and all(result.alias_info is None for result in schema_of(func).returns)
    )


def _measured(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]
) -> Sequence[tuple[int, ...]] | None:
    try:
        with torch.no_grad():
            made = tensors_in(func(*_with_zeros(args), **_with_zeros(dict(kwargs))))
    except Exception:  # zeros may be nothing that it takes
        return None
    if [(each.shape, each.dtype, each.layout) for each in made] != [(x.shape, x.dtype, x.layout) for x in results]:
        return None
    return [tuple(each.stride()) for each in made]


_READ: Mapping[type, Any] = {torch.SymFloat: 1.0, torch.SymInt: 1, torch.SymBool: True}
"""Numbers that are read from tensors at each call, and what stands for one. To ask for their values ends the trace."""


def _with_zeros(value: object) -> Any:
    """The arguments with zeros in place of each tensor, with its strides."""
    if isinstance(value, torch.Tensor):
        span = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
        flat = torch.zeros(span if value.numel() else 0, dtype=value.dtype, device=value.device)
        return flat.as_strided(value.shape, value.stride())
    if type(value) in _READ:
        return _READ[type(value)]
    if isinstance(value, (list, tuple)):
        return [_with_zeros(each) for each in value]
    return {key: _with_zeros(each) for key, each in value.items()} if isinstance(value, dict) else value


def _what_strides_depend_on(value: object) -> Any:
    """The part of a value that strides depend on."""
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), tuple(value.stride()), value.dtype, value.device
    if type(value) in _READ:
        return type(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_what_strides_depend_on, value))
    if isinstance(value, Mapping):
        return tuple((key, _what_strides_depend_on(each)) for key, each in value.items())
    return type(value), value


def _has_other_layouts(value: torch.Tensor) -> bool:
    return value.dim() > 1 and value.numel() > 0


def _is_in_rows(value: torch.Tensor) -> bool:
    """Whether a tensor has exactly the strides of a new contiguous one, also in dimensions of size one."""
    step = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if stride != step:
            return False
        step *= max(size, 1)
    return True
