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


def a_view_after_a_change_through_another(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.t().triu_()  # its new value lies as the transposed view does
    return y.view(6) * 2


def a_view_before_a_change_through_another(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    v = y.view(6)
    y.t().triu_()
    v.mul_(2)
    return y + v.sum()


def places_after_a_change_through_another(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, :2].t().cumsum_(0)
    return y.as_strided((6,), (1,)) * 1


def places_written_after_a_change_through_another(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.t().triu_()
    y.as_strided((3,), (2,)).zero_()
    return y


def places_after_a_change_of_the_whole(x: torch.Tensor) -> torch.Tensor:
    y = x.t() * 1
    y.triu_()
    return y.as_strided((6,), (1,)) * 1


def parts_of_several_changed_through_others(x: torch.Tensor) -> torch.Tensor:
    both = torch.stack([x * 1, x * 1])
    both.transpose(0, 2).cumsum_(0)
    _, last = both.unbind(0)
    last.t().tril_()
    return both.view(-1) + last.view(-1).sum()


def changed_through_others_in_a_branch(x: torch.Tensor) -> torch.Tensor:
    def branch(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.t().triu_()
        y.view(6).mul_(torch.arange(6.0))
        return y.as_strided((4,), (1,), 1) * 2

    return torch.cond(x.sum() > 0, branch, lambda x: x.reshape(6)[:4] + 1, (x,))


def in_a_branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: relaid(x).view(6) * 2, lambda x: x.reshape(6) + 1, (x,))


def in_a_branch_by_places(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, looked_at_by_places, lambda x: x.reshape(6) + 1, (x,))


def in_a_branch_of_a_branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, in_a_branch_by_places, lambda x: x.reshape(6) * 3, (x,))


def what_a_branch_returns(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, relaid, lambda x: x.t().contiguous() + 1, (x,)).view(6) * 2


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        looked_at_by_places, written_by_places, under_another_shape, changed_under_another_shape, one_of_several,
        a_view_after_a_change_through_another, a_view_before_a_change_through_another,
        places_after_a_change_through_another, places_written_after_a_change_through_another,
        places_after_a_change_of_the_whole, parts_of_several_changed_through_others,
        changed_through_others_in_a_branch, in_a_branch, in_a_branch_by_places, in_a_branch_of_a_branch,
        what_a_branch_returns,
    ],
)  # fmt: skip
def test_views_see_the_elements_that_they_see_in_the_trace(function: Function, checked: bool) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return fdp.per_rank(function(x))

    compiled = fdp.data_parallel(step, compile=True, check_trace=checked)
    x = torch.arange(6.0).view(2, 3) - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that the step is not compiled
        for each in (x, -x):
            torch.testing.assert_close(compiled(each), function(each), rtol=0, atol=0)


def test_donated_state_that_is_changed_through_another_view() -> None:
    def step(state: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state.t().triu_()
        state.view(-1).add_(fdp.pmean(batch))
        return state, fdp.per_rank(state.view(-1) * 2)

    compiled, plain = (fdp.data_parallel(step, donate_argnums=0, compile=how) for how in (True, False))
    one, two = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3)
    for number in range(3):
        one, found = compiled(one, torch.tensor(float(number)))
        two, expected = plain(two, torch.tensor(float(number)))
        assert torch.equal(found, expected) and torch.equal(one, two)


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
