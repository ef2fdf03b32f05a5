"""Compiled steps draw what the step itself draws, and leave the generator where the step would leave it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fdp


def unused_dropout(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    F.dropout(x, 0.5)
    return w + F.dropout(x, 0.5).sum(0)


def unused_of_all_kinds(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    positive = x.abs() + 0.1
    torch.bernoulli(x.sigmoid())
    torch.bernoulli(x.double().sigmoid())
    torch.multinomial(positive, 2)
    torch.poisson(positive)
    torch.normal(x, 1.0)
    torch.randint(5, (3,))
    torch.randperm(3)
    torch.rand_like(x)
    torch.native_dropout(x, 0.5, True)
    F.rrelu(x, training=True)
    torch.empty(3).exponential_()
    torch.empty(3, dtype=torch.int64).random_()
    q = x[None, None]
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    return w + torch.rand(4)


def used_in_part(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    _, mask = torch.native_dropout(x, 0.5, True)
    leads_nowhere = torch.rand(3) * 2
    leads_nowhere += 1
    return w + mask.sum(0) + torch.rand(4)


def bernoulli_of_each_dtype(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    likely = x.sigmoid()
    drawn = [torch.bernoulli(likely.to(dtype)) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    drawn.append(torch.empty_like(x).bernoulli_(likely.double()))
    drawn.append(torch.empty_like(x, dtype=torch.float64).bernoulli_(likely))
    drawn.append(torch.bernoulli(x, 0.3))
    drawn.append(torch.distributions.Bernoulli(logits=x).sample())
    weights = 2.0 ** torch.arange(len(drawn))
    return w + sum(weight * one.float().sum(0) for weight, one in zip(weights, drawn, strict=True))


FUNCTIONS = [unused_dropout, unused_of_all_kinds, used_in_part, bernoulli_of_each_dtype]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_same_numbers_are_drawn_whether_they_are_used_or_not(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    step = fdp.data_parallel(function, compile=True, batch_argnums=(), check_replication=False)
    w, x = torch.ones(4), torch.randn(5, 4)
    for seed in range(3):
        torch.manual_seed(seed)
        found, after = step(w, x), torch.rand(2)
        torch.manual_seed(seed)
        torch.testing.assert_close(found, function(w, x))
        assert torch.equal(after, torch.rand(2))
