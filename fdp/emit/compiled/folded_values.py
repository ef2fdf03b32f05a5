"""Values that inductor computes while it compiles, rounded as their dtypes round.

Inductor computes with constants, and writes positions (of `arange`, say) as expressions of loop indices. It does so
with numbers of any size: `arange(300).to(torch.uint8)` goes on behind 255, and `full((4,), 0.1, dtype=torch.bfloat16)`
is 0.1 to whatever is computed from it. (Seen in torch 2.13 to 2.15, with `torch.compile` as well.)
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fdp.emit.compiled.numbers import NARROW, nearest
from fdp.trace.capture.silent_changes import replaced


@contextmanager
def folded_values_are_rounded(propagation: Any, lowering: Any, ranges: Any, bounded: Any) -> Iterator[None]:
    """Let inductor fold only what it folds exactly, and round constants as their dtype does.

    What is not folded is computed in the kernel, and inductor takes for its bounds those of numbers of any size. It
    would leave out checks of an index that wraps, and read beyond a tensor. So it is told no bounds.

    Args:
        propagation: the module `index_propagation`. `IndexPropagation.propagate_sympy` folds one operation; `fallback`
            leaves it to the kernel. A folded value has an `expr` and a `dtype`.
        lowering: its `_full` makes a tensor of one number.
        ranges: the module `value_ranges`. `bound_sympy` says between which numbers an expression lies, by the ranges of
            its indices; `ValueRanges.unknown` are the bounds of what may be anything.
        bounded: `BoundVars`. `get_bounds` returns the bounds of what a kernel computes.
    """
    # All that is used later is asked for here, where one that is missing says so.
    folding, variable, typed = propagation.IndexPropagation, propagation.IndexPropVar, propagation.TypedExpr
    left_to_kernel, folded, is_constant = folding.fallback, variable.new_symbolic, typed.is_constant
    bounds, unknown = ranges.bound_sympy, ranges.ValueRanges.unknown

    def exactly(otherwise: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(otherwise)
        def propagate(self: Any, name: str, args: Any, kwargs: Any) -> Any:
            result = otherwise(self, name, args, kwargs)
            if not isinstance(result, variable) or not result.is_symbolic:
                return result
            value = result.value
            if is_constant(value):
                if not _rounds(name, args, value.dtype):
                    return result
                return folded(typed(_rounded(value.expr, value.dtype), value.dtype))
            if _fits(bounds(value.expr, dict(self.var_to_range)), value.dtype):
                return result
            return left_to_kernel(self, name, args, kwargs)

        return propagate

    def of_dtype(otherwise: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(otherwise)
        def full(fill_value: Any, device: Any, dtype: torch.dtype, size: Any) -> Any:
            return otherwise(_rounded(fill_value, dtype), device, dtype, size)

        return full

    with (
        replaced(folding, "propagate_sympy", exactly),
        replaced(lowering, "_full", of_dtype),
        replaced(bounded, "get_bounds", lambda _: lambda self: defaultdict(unknown)),
    ):
        yield


def _rounds(name: str, args: Any, dtype: torch.dtype) -> bool:
    """Whether an operation rounds its result.

    A number beside sixteen bits becomes a constant of that dtype, and is cast to the same dtype. Both leave it as it
    is.
    """
    if name == "to_dtype":
        return bool(args[0].value.dtype != dtype)
    return name != "constant" or dtype not in NARROW


def _rounded(number: Any, dtype: torch.dtype) -> Any:
    """A constant as a tensor of the dtype holds it; what is no constant, or whole, as it is."""
    is_number = isinstance(number, int | float) or getattr(number, "is_number", False)
    return nearest(float(number), dtype) if dtype.is_floating_point and is_number else number


def _fits(bounds: Any, dtype: torch.dtype) -> bool:
    """Whether a dtype has all whole numbers of a range, as they are."""
    if dtype == torch.int64 and not (bounds.lower.is_Integer and bounds.upper.is_Integer):
        return True  # an expression with a number that is read at each call: a kernel computes it in 64 bits
    if dtype == torch.bool:
        least, most = 0, 1
    elif dtype.is_floating_point:
        most = round(2 / torch.finfo(dtype).eps)
        least = -most
    else:
        info = torch.iinfo(dtype)
        least, most = info.min, info.max
    return bool(bounds.lower >= least and bounds.upper <= most)
