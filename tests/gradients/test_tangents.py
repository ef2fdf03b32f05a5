"""Forward mode is not lost on the way through a step, a collective or Dynamo."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.func import jvp

import fdp


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, when it first goes forwards
def test_a_maximum_has_no_tangent() -> None:
    step = fdp.data_parallel(lambda w, b: jvp(lambda w: fdp.pmax(w * b), (w,), (w,))[1])
    with pytest.raises(fdp.FdpError, match=r"pmax was differentiated, and has no derivative here"):
        step(torch.ones(2), torch.ones(2))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_a_tangent_is_not_lost_under_dynamo() -> None:
    w = torch.tensor([1.0, 2.0])
    both = torch.compile(lambda w: jvp(lambda w: fdp.psum((w**2).sum()), (w,), (w,)), backend="eager")
    with pytest.raises(Exception, match=r"fdp\.all_reduce was differentiated forwards under torch\.compile") as caught:
        both(w)
    assert "FdpError" in str(caught.value) or isinstance(caught.value, fdp.FdpError)


def over_both(w: torch.Tensor, b: torch.Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, torch.ones_like(w))
        return torch.autograd.forward_ad.unpack_dual(fdp.pmean((dual**2 * b).sum()))


def over_gradient(w: torch.Tensor, b: torch.Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, torch.ones_like(w))
        loss, slope = fdp.value_and_grad(lambda w: (w**3 * b).sum())(dual)
        assert not loss.requires_grad and not slope.requires_grad
        return fdp.pmean(torch.autograd.forward_ad.unpack_dual(loss)), torch.autograd.forward_ad.unpack_dual(slope)


def dual_numbers() -> None:
    b = torch.tensor([1.0, 2.0]) + dist.get_rank()
    w = torch.tensor([3.0, 5.0])
    mean = torch.tensor([1.5, 2.5])
    value, tangent = fdp.data_parallel(over_both)(w, b)
    torch.testing.assert_close((value, tangent), ((w**2 * mean).sum(), (2 * w * mean).sum()))
    expected = ((w**3 * mean).sum(), (3 * w**2 * mean).sum()), (3 * w**2 * mean, 6 * w * mean)
    for run in (fdp.data_parallel(over_gradient), over_gradient):
        torch.testing.assert_close(tuple(map(tuple, run(w, b))), expected)


def test_dual_numbers() -> None:
    ranks.run(2, dual_numbers)
