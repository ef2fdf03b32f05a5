"""Compiled steps draw what the step itself draws, and leave the generator where the step would leave it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from samples import exhaustive, some
from torch._subclasses.fake_tensor import FakeTensorMode

import fdp
from fdp.emit.compiled import inductor


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


def draws_that_decide_nothing(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """With probabilities of zero and one, and of constants: the generator goes on all the same."""
    torch.bernoulli(x, 0.0)
    torch.native_dropout(x, 0.0, True)
    drawn = [torch.bernoulli(x, 0.0), torch.bernoulli(torch.ones(5, 4), 0.0), x.clone().bernoulli_(0)]
    drawn += [torch.bernoulli(x, 1.0), x.clone().bernoulli_(torch.zeros(4)), torch.zeros(5, 4).bernoulli_(0)]
    drawn += [torch.native_dropout(x, p, train)[0] for p in (0.0, 1.0) for train in (True, None, False)]
    drawn += [torch.empty_like(x).normal_(0, 0), torch.empty_like(x).uniform_(1, 1)]
    return w + sum(one.sum(0) for one in drawn) + torch.rand(4)


def nothing_is_drawn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Layers that drop nothing, or everything, look at no generator; nor do draws of no elements."""
    dropped = [F.dropout(x, 0.0), F.dropout(x, 1.0), F.alpha_dropout(x, 0.0, True), F.rrelu(x, training=False)]
    q = x[None, None]
    dropped.append(F.scaled_dot_product_attention(q, q, q, dropout_p=0.0)[0, 0])
    return w + sum(one.sum(0) for one in dropped) + torch.empty(0).bernoulli_(0.0).sum() + torch.rand(4)


FUNCTIONS = [
    unused_dropout,
    unused_of_all_kinds,
    used_in_part,
    bernoulli_of_each_dtype,
    draws_that_decide_nothing,
    nothing_is_drawn,
]


@pytest.mark.parametrize(
    "function",
    [pytest.param(each, marks=() if each is unused_dropout else exhaustive) for each in FUNCTIONS],
    ids=lambda function: function.__name__,
)
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


@pytest.mark.parametrize("compiled", some([False, True]))
@pytest.mark.parametrize(
    "function",
    [draws_that_decide_nothing, pytest.param(nothing_is_drawn, marks=exhaustive)],
    ids=lambda f: f.__name__,
)
def test_a_probability_of_zero_leaves_the_generator_where_the_step_leaves_it(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], compiled: bool
) -> None:
    step = fdp.data_parallel(function, compile=compiled, batch_argnums=(), check_replication=False)
    w, x = torch.ones(4), torch.randn(5, 4)
    for seed in range(2):
        torch.manual_seed(seed)
        found, left = step(w, x), torch.get_rng_state()
        torch.manual_seed(seed)
        torch.testing.assert_close(found, function(w, x))
        assert torch.equal(left, torch.get_rng_state())


def test_a_draw_with_probability_zero_is_a_draw() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch.bernoulli(x, 0.0)
        torch.native_dropout(x, 0.0, True)
        return w + fdp.pmean(F.dropout(x, 0.0).sum(0))

    trace = fdp.data_parallel(step).trace(torch.ones(4), torch.ones(5, 4))
    targets = [str(operation.target) for operation in trace.operations]
    # Their numbers are not used, and the draws are kept.
    assert [t for t in targets if "bernoulli" in t or "dropout" in t] == [
        "aten.bernoulli.p",
        "aten.native_dropout.default",
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_that_drops_nothing_is_no_other_name_of_its_argument(compiled: bool) -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = [torch.native_dropout(w, p, train)[0] for p, train in ((0.0, True), (0.5, False), (0.0, None))]
        w.add_(1)
        own = torch.native_dropout(x, 1.0, False)[0].mul_(2)
        return w, *kept, own * x

    step = fdp.data_parallel(function, compile=compiled, donate_argnums=0, batch_argnums=(), check_replication=False)
    for _ in range(2):
        for found, expected in zip(
            step(torch.ones(4), torch.full((4,), 3.0)), function(torch.ones(4), torch.full((4,), 3.0)), strict=True
        ):
            assert torch.equal(found, expected)


def test_the_generator_of_a_cuda_device_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor draws numbers there, to multiply them; a step that drew afterwards had other numbers."""
    states = {0: 1, 1: 1, 2: 1}
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: states.__setitem__(index, state))
    with FakeTensorMode():
        examples = [torch.empty(2, device=device) for device in ("cuda:0", "cuda:1", "cpu")]
    with inductor._cards_draw_nothing(examples):
        states.update(dict.fromkeys(states, 2))
    assert states == {0: 1, 1: 1, 2: 2}
