"""Which out variants compute what their functional forms do, independent of the old content of their places.

Torch has an out variant of every operator. Most were made by a program, and are seldom called with places that hold
something; their schemas say nothing of that. So those are listed here that were tried out, on arguments that lie in all
sorts of ways and places that hold NaN (tests/verify/test_kernels.py). Of another one it is not known whether it adds to
what was there. A step that calls an out variant by itself says so in its trace, and means that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fdp.verify.memory import View
from fdp.verify.schemas import Operator

_WRITE_ONCE_TEXT = """
    addmm addmv baddbmm bmm linear mm
    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data amax amin cumsum linalg_vector_norm mean sum
    cat gather index_select scatter scatter_add tril triu
    avg_pool2d avg_pool2d_backward max_pool2d_with_indices max_pool2d_with_indices_backward native_batch_norm
    elu_backward hardsigmoid_backward hardswish hardtanh_backward leaky_relu_backward softplus_backward
    mse_loss_backward nll_loss_backward nll_loss_forward
"""
WRITE_ONCE = frozenset(f"aten::{name}" for name in _WRITE_ONCE_TEXT.split())
"""Those that were tried out, beside operators on each element by itself."""


def why_not_trusted(operator: Operator, given: Sequence[Any]) -> str | None:
    """Why the result of an out variant may depend on the old content; None if it does not.

    Args:
        operator: what is called.
        given: what it is given for each of its parameters, with views in place of tensors.
    """
    if not operator.pointwise and operator.name not in WRITE_ONCE:
        return f"it is not known that the out variant of {operator.name} writes all of its results, and reads none"
    if operator.name == "aten::native_batch_norm" and not _in_a_memory_format(given[0]):
        return "native_batch_norm adds the statistics of an argument that lies like this one to what was there"
    return None


def _in_a_memory_format(view: View) -> bool:
    """Whether a tensor is contiguous, or channels last."""
    rank = len(view.shape)
    orders: list[Sequence[int]] = [range(rank - 1, -1, -1)]
    if rank in (4, 5):
        orders.append((1, *range(rank - 1, 1, -1), 0))
    return any(_in_order(view, order) for order in orders)


def _in_order(view: View, order: Sequence[int]) -> bool:
    step = 1
    for dimension in order:
        if view.shape[dimension] != 1:
            if view.stride[dimension] != step:
                return False
            step *= view.shape[dimension]
    return True
