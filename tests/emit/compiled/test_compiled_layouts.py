"""Values of a compiled step lie as they lie in the trace, whatever their operators are taken apart into."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

import fdp

Function = Callable[[torch.Tensor], torch.Tensor]


def relaid(x: torch.Tensor) -> torch.Tensor:
    """Its kernel makes a tensor without gaps; what it is taken apart into keeps the order of the one that holds any."""
    return torch.cat([torch.empty(0), x.t()])


def looked_at_by_places(x: torch.Tensor) -> torch.Tensor:
    return relaid(x).as_strided((6,), (1,)) * 2


def written_by_places(x: torch.Tensor) -> torch.Tensor:
    y = relaid(x)
    y.as_strided((3,), (2,)).zero_()
    return y


def under_another_shape(x: torch.Tensor) -> torch.Tensor:
    return relaid(x).view(6) * 1.5


def changed_under_another_shape(x: torch.Tensor) -> torch.Tensor:
    y = relaid(x)
    y.view(6).mul_(torch.arange(6.0))
    return y + 1


def one_of_several(x: torch.Tensor) -> torch.Tensor:
    deviation, mean = torch.std_mean(relaid(x), 1, keepdim=True)
    return deviation.view(3) + mean.as_strided((3,), (1,))


def in_a_branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: relaid(x).view(6) * 2, lambda x: x.reshape(6) + 1, (x,))


def in_a_branch_by_places(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, looked_at_by_places, lambda x: x.reshape(6) + 1, (x,))


def in_a_branch_of_a_branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, in_a_branch_by_places, lambda x: x.reshape(6) * 3, (x,))


def what_a_branch_returns(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, relaid, lambda x: x.t().contiguous() + 1, (x,)).view(6) * 2


@pytest.mark.parametrize(
    "function",
    [
        looked_at_by_places, written_by_places, under_another_shape, changed_under_another_shape, one_of_several,
        in_a_branch, in_a_branch_by_places, in_a_branch_of_a_branch, what_a_branch_returns,
    ],
)  # fmt: skip
def test_views_see_the_elements_that_they_see_in_the_trace(function: Function) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return fdp.per_rank(function(x))

    compiled = fdp.data_parallel(step, compile=True)
    x = torch.arange(6.0).view(2, 3) - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that the step is not compiled
        for each in (x, -x):
            torch.testing.assert_close(compiled(each), function(each), rtol=0, atol=0)


def test_what_nothing_reads_in_a_branch_is_no_mistake() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        x.exp()
        return torch.cat([torch.empty(0), x]) * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        return fdp.per_rank(torch.cond(x.sum() > 0, branch, lambda x: x + 1, (x,)))

    x = torch.arange(6.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fdp.data_parallel(step, compile=True)(x), x * 2)
