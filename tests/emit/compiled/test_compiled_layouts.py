"""Values of a compiled step lie as they lie in the trace, whatever their operators are taken apart into."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from samples import ALL_SAMPLES, exhaustive, some

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


@pytest.mark.parametrize("checked", some([False, True]))
@pytest.mark.parametrize(
    "function",
    some([
        looked_at_by_places, written_by_places, under_another_shape, changed_under_another_shape, one_of_several,
        a_view_after_a_change_through_another, a_view_before_a_change_through_another,
        places_after_a_change_through_another, places_written_after_a_change_through_another,
        places_after_a_change_of_the_whole, parts_of_several_changed_through_others,
        changed_through_others_in_a_branch, in_a_branch, in_a_branch_by_places, in_a_branch_of_a_branch,
        what_a_branch_returns,
    ], 6),
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


@exhaustive
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


_TO, _ROW = torch.tensor([1]), torch.zeros(1, 3, 4, dtype=torch.long)
IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "masked_fill_": lambda x, m: x.masked_fill_(m > 0, 1.0),
    "index_put_": lambda x, m: x.__setitem__(m > 0, 1.0),
    "masked_scatter_": lambda x, m: x.masked_scatter_(m > 0, torch.arange(48.0)),
    "put_": lambda x, m: x.put_(_TO, torch.ones(1)),
    "scatter_": lambda x, m: x.scatter_(0, _ROW, m),
    "scatter_reduce_": lambda x, m: x.scatter_reduce_(0, _ROW, m, "amax"),
    "index_copy_": lambda x, m: x.index_copy_(0, _TO, m[:1]),
    "index_add_": lambda x, m: x.index_add_(0, _TO, m[:1]),
    "lerp_": lambda x, m: x.lerp_(m, 0.5),
    "cumsum_": lambda x, m: x.cumsum_(0),
    "tril_": lambda x, m: x.tril_(),
    "renorm_": lambda x, m: x.renorm_(2, 0, 1.0),
    "mul_": lambda x, m: x.mul_(m),
}
"""Changes of which the new value lies as its operator likes, and not as the tensor that is changed."""


def turned(x: torch.Tensor) -> torch.Tensor:
    """A view whose elements lie in another order."""
    return torch.stack([x, x * 2, x * 3]).permute(2, 0, 1)


def seen_again(changed: torch.Tensor) -> torch.Tensor:
    """A view of a view that was changed, of a shape that only the strides of the former allow."""
    return changed.permute(1, 2, 0).view(-1) * 2


def test_a_view_of_a_view_that_was_changed() -> None:
    changes = dict(list(IN_PLACE.items())[:: 1 if ALL_SAMPLES else 4])

    def step(x: torch.Tensor, m: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for change in changes.values():
            changed = turned(x)
            change(changed, m)
            found.append(seen_again(changed))
        return found

    given = torch.arange(-8.0, 8.0).view(4, 4), torch.tensor([-1.0, 1.0]).repeat(24).view(4, 3, 4)
    found = fdp.data_parallel(step, compile=True, check_replication=False)(*given)
    for name, one, due in zip(changes, found, step(*given), strict=True):
        torch.testing.assert_close(one, due, msg=lambda text, name=name: f"{name}: {text}")


@exhaustive
def test_a_view_of_a_view_that_was_changed_in_a_branch() -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        changed = turned(x)
        changed.cumsum_(0)
        return seen_again(changed)

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, change, lambda x: torch.stack([x, x, x]).view(-1) * 1, (x,))

    compiled = fdp.data_parallel(step, compile=True, check_replication=False)
    for x in (torch.arange(16.0).view(4, 4), -torch.arange(16.0).view(4, 4)):
        found = compiled(x)
        torch.testing.assert_close(found, change(x) if x.sum() > 0 else torch.stack([x, x, x]).view(-1))
