"""What gradients are: tensors as torch.autograd.grad returns them."""

from __future__ import annotations

import pytest
import torch

import fdp


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_gradients_are_no_views(dtype: torch.dtype, accumulated: bool) -> None:
    """As those of torch.autograd.grad: `detach_` may be called of them, of parameters in another order as well."""

    def step(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gradient = fdp.grad(lambda p, x: (p.abs() ** 2).sum() * x.mean())
        found = (fdp.accumulate(gradient, 2) if accumulated else gradient)(p, x)
        found.detach_()
        return p - found.mul_(0.25)

    p = torch.randn(3, 4, dtype=dtype, generator=torch.Generator().manual_seed(0)).t()
    torch.testing.assert_close(fdp.data_parallel(step)(p, torch.ones(4)), p / 2)
