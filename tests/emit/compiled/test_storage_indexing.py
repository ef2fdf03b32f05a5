"""What reads values by their places in memory finds the elements that lie there in the trace."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from samples import ALL_SAMPLES, exhaustive
from torch import Tensor

import fdp


def added_through_a_view(x: Tensor, y: Tensor) -> Tensor:
    product = x.t() @ y
    product.t().add_(y @ x)
    return product


VALUES = {
    "added through a view": added_through_a_view,
    "turned": lambda x, y: (x * 2).t(),
    "of turned ones": lambda x, y: (x.t() + y).t() * 3,
    "cut": lambda x, y: (x * 2)[1:],
    "cut in columns": lambda x, y: (x * 2)[:, 1:],
    "repeated": lambda x, y: (x * 2)[0].expand(4, 4),
    "one of two": lambda x, y: (x.t() * 2).chunk(2, 1)[1],
    "one of rows": lambda x, y: (x * 2).unbind(1)[1].expand(4, 4),
    "one of unlike parts": lambda x, y: (x + y).split([1, 3])[1],
    "chosen by a mask": lambda x, y: torch.index_put((x * 2).t(), [y > 0], x.sum()),
    "an input": lambda x, y: x.t()[1:],
    "bits": lambda x, y: added_through_a_view(x, y).view(torch.int32),
    "pairs": lambda x, y: torch.view_as_real(torch.complex(added_through_a_view(x, y), x)),
}


def squares(p: Tensor) -> Tensor:
    return (p.as_strided((2, 2), (1, 2)) ** 2).sum()


READS = {
    "as_strided": lambda v: v.as_strided((2, 2), (1, 2)) * 2,
    "as_strided_copy": lambda v: torch.as_strided_copy(v, (2, 2), (1, 2)),
    "gradient": lambda v: torch.func.grad(squares)(v) if v.dtype == torch.float32 else v * 2,
    "twice": lambda v: v.as_strided((2, 2), (1, 2)).as_strided((3,), (1,)) * 2,
}
NUMBERS = torch.randint(-3, 4, (2, 4, 4), generator=torch.Generator().manual_seed(3)).float()  # bits are compared


CASES = list(itertools.product(VALUES, READS))
if not ALL_SAMPLES:  # each is a kernel or more
    CASES = [("added through a view", "as_strided"), ("cut in columns", "gradient"), ("one of rows", "twice")]


def read_all(x: Tensor, y: Tensor) -> Any:
    return x, {(value, read): READS[read](VALUES[value](x, y)) for value, read in CASES}


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators:UserWarning")
def test_places_are_those_of_the_trace() -> None:
    given = NUMBERS[0].clone(), NUMBERS[1].clone()
    due = read_all(*given)[1]
    for compile in (False, True):
        step = fdp.data_parallel(read_all, compile=compile, check_trace=False, check_replication=False)
        found = step(*given)[1]
        for name, one in found.items():
            torch.testing.assert_close(one, due[name], msg=lambda text, name=name: f"{name}: {text}")


@exhaustive
def test_in_a_branch_another_place_is_refused() -> None:
    def branching(x: Tensor, y: Tensor) -> Any:
        def of_an_operand(v: Tensor) -> Tensor:
            return v.as_strided((2, 2), (1, 2)).clone()

        def other(v: Tensor) -> Tensor:
            return v[:2, :2].t() * 1

        return x, torch.cond(x.sum() > 0, of_an_operand, other, (added_through_a_view(x, y),))

    step = fdp.data_parallel(branching, compile=True, check_replication=False)
    with pytest.raises(fdp.CompileError, match="rounding does not explain it"):
        step(NUMBERS[0].clone(), NUMBERS[1].clone())


def changed_by_places(state: Tensor, y: Tensor) -> Any:
    first = y.view_as(y) * 1
    same = first.view_as(first)
    same.as_strided_(same.shape, same.stride())
    same.add_(first)
    turned = (y * 2).view(8, 2).t()
    corners = turned.as_strided((2,), (15,))
    corners.mul_(5.0)
    half = (y * 3).chunk(2)[1].as_strided((2,), (1,))
    half.sub_(4.0)
    return state, [first, same, turned, corners, half]


@exhaustive
def test_what_is_changed_by_places_may_be_a_view() -> None:
    due = changed_by_places(NUMBERS[0], NUMBERS[1].clone())[1]
    for compile in (False, True):
        step = fdp.data_parallel(changed_by_places, compile=compile, check_replication=False)
        found = step(NUMBERS[0].clone(), NUMBERS[1].clone())[1]
        assert [x.tolist() for x in found] == [x.tolist() for x in due]
