"""Each element is judged by itself: a large one, or a noisy one, excuses no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compared import numbers

import fdp
from fdp.compare import leaves
from fdp.compare.lockstep import _beyond_rounding

LARGE = 1e6
SHAPES = [(64, 16), (4096,)]


def with_one_large(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = numbers(*shape).to(dtype)
    values.view(-1)[0] = LARGE
    return values


def offends(found: torch.Tensor, expected: torch.Tensor, old: torch.Tensor | None = None) -> bool:
    return bool(leaves.different(["it"], [found], [expected], lambda index, new: old))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", SHAPES)
def test_small_results_beside_a_large_one_are_compared(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    expected = with_one_large(shape, dtype)
    rounded = expected * (1 + 2 * torch.finfo(dtype).eps)
    assert not offends(rounded, expected)
    found = expected.clone()
    found.view(-1)[5] += 0.5 if dtype != torch.bfloat16 else 2
    assert offends(found, expected)
    found = expected.clone()
    found.view(-1)[1:] = 0
    assert offends(found, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_small_update_beside_a_large_one_is_compared(shape: tuple[int, ...]) -> None:
    old = numbers(*shape)
    update = numbers(*shape, seed=1) * 1e-3
    update.view(-1)[0] = 1.0
    new = old + update
    assert not offends(new + 1e-7 * update, new, old)
    lost = new.clone()
    lost[1:9] = old[1:9]
    assert offends(lost, new, old)


def test_numbers_that_are_not_finite_are_no_size() -> None:
    expected = numbers(100)
    expected[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert not offends(expected.clone(), expected) and not offends(expected * (1 + 1e-7), expected)
    found = expected.clone()
    found[50] *= 1.01
    assert offends(found, expected)
    assert offends(expected.nan_to_num(1.0, 2.0, 3.0), expected)


def moved(values: torch.Tensor, by: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What an operator computes of inputs in whose last places something has changed."""
    generator = torch.Generator().manual_seed(0)
    return [(values, values * (1 + by * (torch.rand(values.shape, generator=generator) - 0.5))) for _ in range(4)]


def test_an_operator_is_wrong_in_a_small_element_beside_a_large_one() -> None:
    own = with_one_large((64, 16))
    variants = moved(own, 5e-7)
    assert _beyond_rounding(own, own * (1 + 3e-7), variants) is None
    shown = own.clone()
    shown[3, 3] *= 1.01
    assert _beyond_rounding(own, shown, variants) is not None
    shown[3, 3] = torch.nan
    assert _beyond_rounding(own, shown, variants) is not None


def test_rounding_that_makes_no_number_excuses_no_number() -> None:
    own = numbers(64)
    one, two = own.clone(), own.clone()
    two[5] = torch.nan
    shown = own.clone()
    shown[5] = torch.nan
    assert _beyond_rounding(own, shown, [(one, two)]) is None
    shown[5] = own[5] + 1
    assert _beyond_rounding(own, shown, [(one, two)]) is not None
    shown[5], shown[6] = own[5], torch.nan
    assert _beyond_rounding(own, shown, [(one, two)]) is not None


def test_an_update_of_a_rare_row_that_is_lost_is_found() -> None:
    """A table of which one row has a large gradient: of the others nothing must be lost."""
    sizes = torch.ones(32, 1)
    sizes[0] = 1e5
    calls: list[int] = []

    def step(table: torch.Tensor, x: torch.Tensor) -> Any:
        calls.append(1)
        scale = sizes if len(calls) == 1 else sizes * torch.tensor([1.0] + [0.0] * 31).unsqueeze(1)
        return table - 1e-3 * scale * fdp.pmean(x)

    wrong = fdp.data_parallel(step)
    with pytest.raises(fdp.TraceError, match="does not compute what the step"):
        wrong(numbers(32, 8), numbers(32, 8, seed=1))
