"""Draws into memory of any order: a step, compiled or not, draws for each element the number that plain PyTorch draws.

Everywhere `check_trace=False` unless a test says otherwise: nothing else notices another number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from eager_draws import Draws, assert_draws_like_eager
from samples import ALL_SAMPLES, exhaustive, some

import fdp

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "rows": lambda: torch.randn(5, 6),
    "transposed": lambda: torch.randn(6, 5).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "sliced": lambda: torch.randn(5, 12)[:, ::2],
    "permuted": lambda: torch.randn(3, 4, 5).permute(1, 2, 0),
    "column": lambda: torch.randn(6, 40, 5)[:, 7].t(),
    "expanded": lambda: torch.randn(5, 1).expand(5, 6),
    "unfolded": lambda: torch.randn(10).unfold(0, 6, 1),
    "ones": lambda: torch.randn(1, 6, 1, 5).transpose(1, 3),
    "empty": lambda: torch.randn(6, 5).t()[:0],
    "one": lambda: torch.randn(()),
}


def likely(x: torch.Tensor) -> torch.Tensor:
    return x.abs().clamp(0, 1)


def into_every_third(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(*x.shape, 3)
    y[..., ::3].normal_()
    y[..., 1].uniform_()
    return y


def into_a_view(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(x.shape)
    y.permute(list(reversed(range(x.dim())))).normal_()
    return y


def a_mask_alone(x: torch.Tensor) -> torch.Tensor:
    torch.rand_like(x)
    torch.native_dropout(x, 0.0, True)
    _, mask = torch.native_dropout(x, 0.5, True)
    torch.bernoulli(x, 0.0)
    return mask


IN_PLACE: dict[str, tuple[Any, ...]] = {
    "normal_": (), "uniform_": (), "exponential_": (), "random_": (50,), "cauchy_": (), "log_normal_": (),
    "geometric_": (0.3,), "bernoulli_": (0.3,),
}  # fmt: skip

DRAWS: dict[str, Draws] = {
    # The factors of the dropouts are powers of two, so that nothing is rounded.
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.5, True) if x.dim() > 1 else x,
    "unused, and of no probability": a_mask_alone,
    "bernoulli": lambda x: torch.bernoulli(likely(x)),
    "bernoulli of doubles": lambda x: torch.bernoulli(likely(x).double()),
    "bernoulli(p)": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_ of others": lambda x: torch.empty_like(x).bernoulli_(likely(x)),
    "bernoulli_ of itself": lambda x: (lambda p: p.bernoulli_(p))(likely(x.clone())),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randn_like of doubles": lambda x: torch.randn_like(x, dtype=torch.float64),
    "rand_like in rows": lambda x: torch.rand_like(x, memory_format=torch.contiguous_format),
    "rand_like of bfloat16": lambda x: torch.rand_like(x.bfloat16()),
    "twice alike": lambda x: (torch.rand_like(x), torch.rand_like(x)),
    **{name: lambda x, n=name, a=a: getattr(torch.empty_like(x), n)(*a) for name, a in IN_PLACE.items()},
    "normal of means": lambda x: torch.normal(x, 1.0),
    "normal of deviations": lambda x: torch.normal(0.0, x.abs()),
    "normal of both": lambda x: torch.normal(x, x.abs()),
    "normal into its means": lambda x: (lambda m: torch.normal(m, 1.0, out=m))(x.clone()),
    "poisson": lambda x: torch.poisson(x.abs()),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 9.0), likely(x)),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 2) if x.dim() == 2 else x,
    "gamma": lambda x: torch._standard_gamma(x.abs() + 0.5),
    "dirichlet": lambda x: torch._sample_dirichlet(x.abs() + 0.5) if x.dim() else x,
    "rand(out=)": lambda x: torch.rand(x.shape, out=torch.empty_like(x)),
    "bernoulli(out=)": lambda x: torch.bernoulli(likely(x), out=torch.empty_like(x)),
    "normal(out=)": lambda x: torch.normal(x, 1.0, out=torch.empty_like(x)),
    "every third": into_every_third,
    "a view": into_a_view,
    "without tensors": lambda x: (torch.rand(3), torch.randn(4), torch.randperm(5), torch.normal(0.0, 1.0, (3,))),
    "of a value": lambda x: F.dropout(x * 2, 0.5),
    "of a turned value": lambda x: F.dropout((x + 1).permute(list(reversed(range(x.dim())))), 0.5),
}


def drawn(x: torch.Tensor) -> dict[str, Any]:
    """All draws, as far as PyTorch takes them for a tensor."""
    return {name: draw(x) for name, draw in DRAWS.items() if name not in refused(x)}


def refused(x: torch.Tensor) -> set[str]:
    if x.numel():
        return set()
    return {"multinomial", "dirichlet"}


WAYS = [
    *(("plain", name) for name in LAYOUTS),
    *(("compiled", name) for name in (LAYOUTS if ALL_SAMPLES else ())),
]


@pytest.mark.parametrize(("how", "layout"), some(WAYS))
def test_every_operator_draws_what_it_draws_by_itself(how: str, layout: str) -> None:
    torch.manual_seed(7)
    assert_draws_like_eager(drawn, LAYOUTS[layout](), how)


@pytest.mark.parametrize("how", some(["plain", "compiled"]))
def test_the_comparison_accepts_them(how: str) -> None:
    torch.manual_seed(7)
    assert_draws_like_eager(drawn, LAYOUTS["channels_last"](), how, check_trace=True)


@pytest.mark.parametrize("how", some(["plain", "compiled"]))
def test_generators_of_ones_own_draw_their_numbers(how: str) -> None:
    mine, other = torch.Generator(), torch.Generator()

    def draw(x: torch.Tensor) -> Any:
        first = torch.rand(3, generator=other)
        second = x.clone().normal_(generator=mine)
        return first, second, torch.bernoulli(likely(x), generator=other), torch.rand(2), F.dropout(x, 0.5)

    def run(call: Callable[[], Any]) -> list[torch.Tensor]:
        for seed, generator in enumerate((torch.default_generator, mine, other)):
            generator.manual_seed(seed)
        return [*optree.tree_leaves(call()), torch.rand(2), *(torch.rand(2, generator=g) for g in (mine, other))]

    x = torch.randn(6, 5).t()
    options = {"compile": how == "compiled", "check_replication": False}
    step = fdp.data_parallel(lambda w, x: (w, draw(x)), check_trace=False, **options)
    for _ in range(2):
        found, expected = run(lambda: step(torch.ones(2), x)[1]), run(lambda: draw(x))
        assert all(map(torch.equal, found, expected))


def chosen(x: torch.Tensor) -> Any:
    first = torch.rand_like(x)
    torch.cond(x.sum() > 0, lambda y: F.dropout(y.t(), 0.5), lambda y: torch.rand_like(y.t()), (x,))
    second = torch.rand_like(x)
    third = torch.cond(first.sum() > 0, lambda y, z: F.dropout(y, 0.5) + z, lambda y, z: y - z, (x * 2, second))
    return first, second, third, torch.rand(2)


@pytest.mark.parametrize("sign", some([1, -1]))
def test_conditions_draw_in_their_place_whether_they_are_used_or_not(sign: int) -> None:
    x = sign * torch.rand(6, 5).t()
    if ALL_SAMPLES:  # otherwise in a program with more, below
        assert_draws_like_eager(chosen, x, "compiled")
    assert_draws_like_eager(chosen, x, "plain")


def test_what_cannot_be_drawn_apart_is_refused() -> None:
    def overlapping(x: torch.Tensor) -> torch.Tensor:
        p = likely(x.clone())
        return p[1:].bernoulli_(p[:-1])

    with pytest.raises(fdp.CompileError, match="draws into memory that it reads") as caught:
        assert_draws_like_eager(overlapping, torch.rand(5, 6), "compiled")
    assert "test_draws.py" in str(caught.value) and "clone" in str(caught.value)


def test_state_is_drawn_into_as_it_lies() -> None:
    def step(state: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
        state["turned"].normal_()
        state["some"][:, ::2].uniform_()
        return state, F.dropout(batch, 0.5)

    def run(function: Callable[..., Any]) -> Any:
        state = {"turned": torch.zeros(6, 5).t(), "some": torch.zeros(4, 40).t()}
        torch.manual_seed(0)
        return [function(state, torch.ones(8, 3).t()) for _ in range(2)][-1]

    for compile in (False, True) if ALL_SAMPLES else (False,):
        options = {"compile": compile, "check_replication": False}
        found = run(fdp.data_parallel(step, donate_argnums=0, check_trace=False, **options))
        assert all(map(torch.equal, optree.tree_leaves(found), optree.tree_leaves(run(step))))


def loss_of(params: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
    hidden = F.dropout((batch @ params["w"]).transpose(1, 2), 0.5)
    kept = F.dropout2d(batch.unsqueeze(1).contiguous(memory_format=torch.channels_last), 0.5)
    return (hidden * torch.rand_like(hidden)).square().mean() + kept.mean(), hidden


def trains(how: str) -> None:
    """In a rank: the numbers of each rank are those that plain PyTorch draws there, in its own order."""

    def step(params: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
        (loss, hidden), grads = fdp.value_and_grad(loss_of, has_aux=True)(params, batch)
        return {"w": params["w"] - 0.1 * grads["w"]}, fdp.pmean(loss), fdp.per_rank(hidden)

    rank, size = dist.get_rank(), dist.get_world_size()
    params = {"w": torch.linspace(-1, 1, 20).view(4, 5)}
    expected = {"w": params["w"].clone()}
    fitted = fdp.data_parallel(step, check_trace=False, compile=how == "compiled")
    for call in range(3):
        batch = torch.arange(24.0).view(2, 3, 4) / (24 + rank + call)
        torch.manual_seed(rank + 10 * call)
        params, _, hidden = fitted(params, batch)
        torch.manual_seed(rank + 10 * call)
        w = expected["w"].requires_grad_()
        loss, own = loss_of({"w": w}, batch)
        (grad,) = torch.autograd.grad(loss, w)
        dist.all_reduce(grad)
        expected = {"w": (w - 0.1 * grad / size).detach()}
        assert torch.equal(hidden == 0, own == 0)
        torch.testing.assert_close(hidden, own.detach())
        torch.testing.assert_close(params, expected)


@pytest.mark.parametrize("how", some(["plain", "compiled"]))
def test_two_ranks_train_with_the_numbers_of_plain_pytorch(how: str) -> None:
    ranks.run(2, trains, how)


def test_draws_that_are_used_in_their_shape_alone_keep_their_place() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first = torch.bernoulli(x.abs().clamp(0, 1))
        like = torch.zeros_like(torch.rand_like(x))
        torch.native_dropout(x, 0.5, True)
        return first + like + torch.rand_like(first) + torch.bernoulli(first * 0.5)

    def halves(x: torch.Tensor) -> torch.Tensor:
        """What is read and what is drawn into are apart, and of one memory."""
        p = likely(x.clone())
        p[1::2].bernoulli_(p[:-1:2])
        return p

    def compiled_once(x: torch.Tensor) -> dict[str, Any]:
        return {"used in its shape": function(x), "drawn apart": halves(x), "conditions": chosen(x)}

    assert_draws_like_eager(compiled_once, torch.randn(6, 5).t(), "compiled")


def test_an_unused_draw_right_before_a_condition_that_draws_is_refused_where_it_is_compiled() -> None:
    def train(w: torch.Tensor, x: torch.Tensor) -> Any:
        torch.rand(3)
        return w + torch.cond(x.sum() > 0, torch.rand_like, torch.randn_like, (w,))

    options: dict[str, Any] = {"check_replication": False, "check_trace": False}
    w, x = torch.ones(3), torch.randn(4, 3)
    with pytest.raises(fdp.CompileError, match="random numbers that it does not use, right before a function"):
        fdp.data_parallel(train, compile=True, **options)(w, x)
    assert fdp.data_parallel(train, **options)(w, x).shape == (3,)


@exhaustive
def test_an_unused_draw_before_an_accumulation_keeps_its_place() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * w, 0.5).sum()

    def train(w: torch.Tensor, x: torch.Tensor) -> Any:
        torch.rand(3)
        return w - fdp.accumulate(fdp.value_and_grad(loss), 2)(w, x)[1]

    options: dict[str, Any] = {"check_replication": False, "check_trace": False}
    w, x, found = torch.ones(3), torch.randn(4, 3), []
    for compiled in (False, True):
        torch.manual_seed(0)
        found.append(fdp.data_parallel(train, compile=compiled, **options)(w, x))
    torch.testing.assert_close(*found)
