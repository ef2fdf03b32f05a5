"""The cheapest way to call an operator is a function that calls just this operator."""

from __future__ import annotations

import torch

from fdp.emit.codegen.bindings import bind


def example(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_a_function_is_taken_if_it_calls_just_this_operator() -> None:
    aten, x = torch.ops.aten, example(4, 4)
    assert bind(aten.mm.default, (x, x), {}) is torch.mm
    assert bind(aten.mm.out, (x, x), {"out": x}) is torch.mm
    # torch.add(x, 1) calls add.Tensor, so it does not stand for add.Scalar.
    assert bind(aten.add.Scalar, (x, 1), {}) is aten.add.Scalar._op
    assert bind(aten.add.Tensor, (x, 1), {}) is torch.add
    # No function of that name; no tensor to take the device from; a change of the example itself.
    assert bind(aten.threshold_backward.default, (x, x, 0), {}) is aten.threshold_backward.default._op
    assert bind(aten.ones.default, ([2],), {}) is aten.ones.default._op
    assert bind(aten.squeeze_.dim, (x, 0), {}) is aten.squeeze_.dim._op
    assert x.shape == (4, 4)
    # A list is known by all that is in it: torch.index_put takes no None.
    index, values = example(2).long(), example(2)
    assert bind(aten.index_put.default, (example(4, 4, 4), [index, index, index], values), {}) is torch.index_put
    without = bind(aten.index_put.default, (example(4, 4, 4), [index, index, None], example(2, 4)), {})
    assert without is aten.index_put.default._op
