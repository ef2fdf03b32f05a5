"""Values that are known before a step runs are so to the proof as well, by whatever name and under whatever dtype.

What the proof takes for another value costs a plainer program and a warning, which is an error here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import exhaustive

import fdp

Function = Callable[[torch.Tensor], torch.Tensor]


def turned(batch: torch.Tensor) -> torch.Tensor:
    """Positions as in Llama: a complex constant, and views between real and complex numbers."""
    turn = torch.polar(torch.ones(2), torch.arange(2.0) / 10)
    return torch.view_as_real(torch.view_as_complex(batch.reshape(2, 2).contiguous()) * turn).flatten()


def numbers(rank: Any) -> torch.Tensor:
    return torch.arange(4.0) - 2 - rank


WITH_RANK: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "one hot": lambda batch, rank: F.one_hot(rank, 4).float() * batch,
    "compared": lambda batch, rank: (torch.arange(4) == rank).float() * batch,
    "cast": lambda batch, rank: (torch.arange(4) + 4 * rank).float().sin() * batch,
    "expanded": lambda batch, rank: (torch.arange(4) + rank).expand(3, 4).double().sum(0) * batch,
    "clamped": lambda batch, rank: torch.relu(numbers(rank)) * batch,
    "a layer": lambda batch, rank: F.linear(numbers(rank).view(1, 4), torch.arange(16.0).view(4, 4), batch).sum(0),
    "a scaled product": lambda batch, rank: (
        torch.addmm(numbers(rank), torch.ones(1, 4), torch.arange(16.0).view(4, 4), alpha=0.5).sum(0) * batch
    ),
    "lists": lambda batch, rank: torch._foreach_add([numbers(rank), torch.ones(3)], 2)[0] * batch,
    "in place": lambda batch, rank: numbers(rank).add_(torch.arange(2.0)[1]).mul_(2) * batch,
}

WITHOUT: dict[str, Function] = {
    "turned": turned,
    "bits": lambda batch: torch.arange(4.0).view(torch.int32) * batch,
    "a conjugate": lambda batch: ((torch.arange(4) * 1j).conj() * batch).imag,
    "real": lambda batch: (torch.arange(4) * (1 + 2j)).real * batch,
    "a spectrum": lambda batch: torch.fft.fft(torch.arange(4.0)).abs() * batch,
    "unsafe views": lambda batch: torch.arange(8.0).unsafe_chunk(2)[1] * batch,
    "unsafe pieces": lambda batch: torch.unsafe_split_with_sizes(torch.arange(8.0), [4, 4])[0] * batch,
}


def check(function: Callable[[torch.Tensor, Any], torch.Tensor], compile: bool) -> None:
    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        def loss(state: torch.Tensor) -> torch.Tensor:
            return function(state * batch.mean(), fdp.axis_index()).sum()

        return state - fdp.grad(loss)(state), fdp.psum(function(batch, fdp.axis_index()))

    state, fitted = torch.ones(4), fdp.data_parallel(step, compile=compile)
    for call in range(2):
        batch = torch.linspace(1, 2 + call, 4)
        own = state.clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(own * batch.mean(), torch.tensor(0)).sum(), own)
        found = fitted(state, batch)
        torch.testing.assert_close(found, (state - grad, function(batch, torch.tensor(0))))


def test_a_product_that_is_added_first_and_known_later_is_one_value() -> None:
    """The sum has the product as a part of it, before the product by itself is known by its bytes."""

    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        ones, numbers, total = torch.ones(4, 4), torch.arange(16.0).view(4, 4).sin(), batch * 2
        total.addmm_(ones, numbers)
        masked = torch.ones(4, 4).masked_fill_(numbers > 0, 3)
        return state, fdp.per_rank(
            (total, ones @ numbers, masked * batch, torch.ones(4, 4).masked_fill(numbers > 0, 3))
        )

    fitted, batch = fdp.data_parallel(step), torch.ones(4, 4)
    _, found = fitted(torch.ones(1), batch)
    ones, numbers = torch.ones(4, 4), torch.arange(16.0).view(4, 4).sin()
    mask = torch.ones(4, 4).masked_fill(numbers > 0, 3)
    expected = (batch * 2).addmm(ones, numbers), ones @ numbers, mask * batch, mask
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", WITH_RANK)
def test_what_depends_on_the_rank_alone(name: str) -> None:
    check(WITH_RANK[name], compile=False)


@pytest.mark.parametrize("name", WITHOUT)
def test_what_depends_on_nothing(name: str) -> None:
    check(lambda batch, rank: WITHOUT[name](batch), compile=False)


@exhaustive
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning")
def test_compiled() -> None:
    functions = [lambda batch, rank, f=f: f(batch) for f in WITHOUT.values()]
    check(lambda batch, rank: sum(f(batch, rank) for f in (*WITH_RANK.values(), *functions)), compile=True)
