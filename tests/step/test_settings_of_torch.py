"""Autocast, the default dtype and torch.compile, around a step and inside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import same_bits
from torch import nn

import fdp

Tree = Any


def autocast_step(w: Tree, b: Tree) -> Tree:
    y = b @ w
    with torch.autocast("cpu", enabled=False):
        z = b @ w
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = b @ w
    return fdp.pmean((y, z, x))


def test_autocast_around_the_call_converts_a_parameter_once() -> None:
    """Its gradients by several uses are added up in the narrow dtype, as in plain PyTorch."""
    w, b = torch.randn(6, 6), torch.randn(12, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fdp.data_parallel(lambda w, b: fdp.grad(lambda w: (b @ w @ w).float().square().mean())(w))(w, b)
        leaf = w.clone().requires_grad_()
        value = (b @ leaf @ leaf).float().square().mean()
    assert same_bits(found, torch.autograd.grad(value, leaf)[0])


def test_autocast_around_the_call_and_inside_the_step() -> None:
    w, b = torch.randn(3, 3), torch.randn(3, 3)
    transform = fdp.data_parallel(autocast_step)
    for _ in range(2):
        assert same_bits(transform(w, b), autocast_step(w, b))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = transform(w, b), autocast_step(w, b)
        assert [x.dtype for x in found] == [torch.bfloat16, torch.float32, torch.bfloat16]
        assert same_bits(found, expected)
    assert transform.traces == 2
    with torch.autocast("cpu", dtype=torch.float16):
        assert same_bits(transform(w, b), autocast_step(w, b))
    assert transform.traces == 3


def test_gradients_under_autocast() -> None:
    def step(w: Tree, b: Tree) -> Tree:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fdp.grad(lambda p: (b @ p).float().square().mean())(w)

    w, b = torch.randn(3, 3), torch.randn(3, 3)
    assert same_bits(fdp.data_parallel(step)(w, b), step(w, b))


def test_the_default_dtype_is_part_of_the_signature() -> None:
    transform = fdp.data_parallel(lambda w, b: torch.zeros(2) + fdp.pmean(b).sum())
    assert transform(torch.ones(1), torch.ones(1)).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert transform(torch.ones(1), torch.ones(1)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_step_that_dynamo_is_to_leave_alone_is_a_step() -> None:
    """It is not compiled by anything; what fdp.value_and_grad and others return is such a function."""
    w, x = torch.ones(2), torch.ones(3, 2)
    loss = lambda w, x: (w * x).sum()  # noqa: E731
    for step in (fdp.grad(loss), torch.compiler.disable(fdp.grad(loss))):
        assert torch.equal(fdp.data_parallel(step)(w, x), torch.full((2,), 3.0))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_function_under_torch_compile_is_traced_through() -> None:
    """It runs uncompiled inside of the step, with the step's own lines; or is refused. It is never wrong."""
    scaled = torch.compile(lambda x: torch.sin(x) * 2, backend="eager")
    module = torch.compile(nn.Linear(2, 2), backend="eager")
    for p in module.parameters():
        p.requires_grad_(False)

    def step(w: Tree, b: Tree) -> Tree:
        grads = fdp.grad(lambda p: scaled(p * b).sum())(w)
        return grads, fdp.pmean(module(b))

    plain = torch.sin
    w, b = torch.randn(2), torch.randn(2)
    transform = fdp.data_parallel(step)
    for _ in range(2):
        grads, out = transform(w, b)
        torch.testing.assert_close(grads, torch.func.grad(lambda p: (plain(p * b) * 2).sum())(w))
        torch.testing.assert_close(out, module._orig_mod(b))
