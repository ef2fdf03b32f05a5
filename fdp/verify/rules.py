"""The axioms: which calls of operators compute the same as others. One entry each, with its reason.

They hold for both sides alike: a call in the trace and a call in the program become terms here, in one way. Any other
call is an unknown function of its arguments. `machine.py`, which reads calls, holds further axioms: an operator in
place, or with an out argument, computes what its functional form does; overloads of one operator differ in how they
take arguments alone; a `_foreach` operator or a fused optimizer does to each entry of its lists the same, one after the
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fdp.verify.combined import OPERATORS, axis_dimension, combination_of
from fdp.verify.memory import View
from fdp.verify.terms import Term
from fdp.verify.values import ReadArguments, Values

Unread = dict[Any, Any]
"""Arguments before they are read: views and literals, by name."""

TermRule = Callable[[Values, ReadArguments, Unread, Any, Any, torch.dtype], "Term | None"]
"""(values, arguments, given, index of the result, its shape, its dtype) -> the value; None where it does not apply."""


def _copied(name: str) -> TermRule:
    """The same numbers, in the shape and dtype of what they are written to."""

    def rule(v: Values, a: ReadArguments, given: Unread, index: Any, shape: Any, dtype: torch.dtype) -> Term | None:
        source = a.get(name)
        return v.cast(v.expand(source, shape), dtype) if type(source) is Term else None

    return rule


def _filled(name: str | None, value: Any = None) -> TermRule:
    """One number everywhere, however it gets there."""

    def rule(v: Values, a: ReadArguments, given: Unread, index: Any, shape: Any, dtype: torch.dtype) -> Term | None:
        number = value if name is None else given.get(name)
        if isinstance(number, View):
            number = v.number_in(a[name])
        known = type(number) in (bool, int, float, complex)
        return v.full(number, shape, dtype) if known else None

    return rule


def _relu(v: Values, a: ReadArguments, given: Unread, index: Any, shape: Any, dtype: torch.dtype) -> Term:
    """relu(x) = clamp_min(x, 0): torch's own definition of it."""
    return v.apply("aten::clamp_min", {"self": a["self"], "min": 0}, shape, dtype)


def _product(v: Values, one: Term, two: Term) -> Term:
    return v.apply("aten::mm", {"self": one, "mat2": two}, (one.shape[0], two.shape[1]), one.dtype)


def _addmm(v: Values, a: ReadArguments, given: Unread, index: Any, shape: Any, dtype: torch.dtype) -> Term | None:
    """addmm(x, a, b) = x + a @ b, which is rounded once less; and with beta=0 it is a @ b times alpha, x unread."""
    beta, alpha = given.get("beta", 1), given.get("alpha", 1)
    one, two = a.get("mat1"), a.get("mat2")
    if type(one) is not Term or type(two) is not Term or one.dtype is None:
        return None
    if beta == 0:
        product = _product(v, one, two)
        return (
            product if alpha == 1 else v.apply("aten::mul", {"self": product, "other": v.encode(alpha)}, shape, dtype)
        )
    if beta == 1 and alpha == 1:
        return v.apply("aten::add", {"self": a["self"], "other": _product(v, one, two)}, shape, dtype)
    return None


def _linear(v: Values, a: ReadArguments, given: Unread, index: Any, shape: Any, dtype: torch.dtype) -> Term | None:
    """linear(x, w, b) = addmm(b, x, w.T), for matrices."""
    weight, bias = given["weight"], a.get("bias")
    if bias is None or len(a["input"].shape) != 2:
        return None
    product = _product(v, a["input"], v.read(weight.transposed()))
    return v.apply("aten::add", {"self": bias, "other": product}, shape, dtype)


def _foreach_add(v: Values, a: ReadArguments, given: Unread, index: Any, shape: Any, dtype: torch.dtype) -> Term | None:
    """x + number, where the number is a tensor without dimensions: added in the dtype of x either way."""
    name = next((name for name in ("scalar", "scalars", "other") if name in a), None)
    if name is None or a.get("alpha", 1) != 1 or not (dtype.is_floating_point or dtype in _INTEGERS):
        return None
    number = given[name] if type(given[name]) in (int, float) else None
    if number is None and a[name] is not None and getattr(a[name], "dtype", None) == dtype:
        number = v.number_in(a[name])
    if number is None or not math.isfinite(number) or torch.tensor(number, dtype=dtype, device="cpu").item() != number:
        return None
    number = int(number) if number == int(number) else number
    return v.apply("aten::add", {"self": a["self"], "other": v.encode(number)}, shape, dtype)


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _combined(operator: str) -> TermRule:
    """What a marker of a collective stands for; of one rank, its argument, if the result lies where that lay."""

    def rule(v: Values, a: ReadArguments, given: Unread, index: Any, shape: Any, dtype: torch.dtype) -> Term:
        return v.combined(combination_of(operator, given), a["x"])

    return rule


def _own_rank(v: Values, a: ReadArguments, given: Unread, index: Any, shape: Any, dtype: torch.dtype) -> Term:
    """The rank of a process is a constant of its program, and so is its place along a dimension of the mesh."""
    return v.full(v.ranks.along(axis_dimension(given["axis"])).own, shape, dtype)


RULES: dict[str, TermRule] = {
    "aten::copy": _copied("src"),
    "aten::_foreach_copy": _copied("src"),
    "aten::clone": _copied("self"),
    "aten::_to_copy": _copied("self"),
    "aten::lift_fresh_copy": _copied("self"),
    "aten::alias_copy": _copied("self"),
    "aten::detach_copy": _copied("self"),
    "fdp::vary": _copied("x"),  # "may differ between ranks" is said of the value, and changes none
    "aten::zeros": _filled(None, 0),
    "aten::zeros_like": _filled(None, 0),
    "aten::new_zeros": _filled(None, 0),
    "aten::zero": _filled(None, 0),
    "aten::_foreach_zero": _filled(None, 0),
    "aten::ones": _filled(None, 1),
    "aten::ones_like": _filled(None, 1),
    "aten::new_ones": _filled(None, 1),
    "aten::full": _filled("fill_value"),
    "aten::full_like": _filled("fill_value"),
    "aten::new_full": _filled("fill_value"),
    "aten::fill": _filled("value"),
    "aten::scalar_tensor": _filled("s"),
    "aten::relu": _relu,
    "aten::addmm": _addmm,
    "aten::linear": _linear,
    "aten::_foreach_add": _foreach_add,
    **{operator: _combined(operator) for operator in OPERATORS},
    "fdp::axis_index": _own_rank,
}

NEEDS_NO_ARGUMENT: dict[str, Callable[[Unread], tuple[str, ...]]] = {
    # addmm with beta=0 does not read what it adds to.
    "aten::addmm": lambda given: ("self",) if given.get("beta") == 0 else (),
}
