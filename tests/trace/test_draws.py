"""Draws into memory of any order: a step, compiled or not, draws for each element the number that plain PyTorch draws.

Everywhere `check_trace=False` unless a test says otherwise: nothing else notices another number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples import ALL_SAMPLES, exhaustive
from torch._subclasses.fake_tensor import FakeTensorMode

import fdp
from fdp.emit.compiled.public import VARIABLE
from fdp.emit.memory.elements import laid_out
from fdp.trace import kernel_strides
from fdp.trace.fake_rules import teach
from fdp.trace.uncertain_strides import AS_GIVEN

Draws = Callable[[torch.Tensor], Any]

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


@contextmanager
def entry(how: str) -> Iterator[dict[str, Any]]:
    """Options of `data_parallel` for a way to run a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(int(how == "public")))
        yield {"compile": how != "plain", "check_replication": False}


def same(found: Any, expected: Any) -> list[str]:
    """The names of results that are not the same bits."""
    return [
        name
        for name in expected
        if not all(
            (one.shape, one.dtype) == (two.shape, two.dtype) and torch.equal(one.nan_to_num(), two.nan_to_num())
            for one, two in zip(optree.tree_leaves(found[name]), optree.tree_leaves(expected[name]), strict=True)
        )
    ]


def assert_draws_like_eager(function: Draws, x: torch.Tensor, how: str, check_trace: bool = False) -> None:
    w = torch.ones(3)
    with entry(how) as options:
        step = fdp.data_parallel(lambda w, x: (w, {"": function(x)}), check_trace=check_trace, **options)
        for seed in range(2):
            torch.manual_seed(seed)
            found, after = step(w, x)[1][""], torch.rand(2)
            torch.manual_seed(seed)
            expected = function(x)
            if not isinstance(expected, dict):
                found, expected = {"": found}, {"": expected}
            assert not same(found, expected)
            assert torch.equal(after, torch.rand(2))


WAYS = [
    *(("plain", name) for name in LAYOUTS),
    *(("compiled", name) for name in (LAYOUTS if ALL_SAMPLES else ("transposed",))),
    *(("public", name) for name in (LAYOUTS if ALL_SAMPLES else ("sliced",))),
]


@pytest.mark.parametrize(("how", "layout"), WAYS)
def test_every_operator_draws_what_it_draws_by_itself(how: str, layout: str) -> None:
    torch.manual_seed(7)
    assert_draws_like_eager(drawn, LAYOUTS[layout](), how)


@pytest.mark.parametrize("how", ["plain", "compiled", pytest.param("public", marks=exhaustive)])
def test_the_comparison_accepts_them(how: str) -> None:
    torch.manual_seed(7)
    assert_draws_like_eager(drawn, LAYOUTS["channels_last"](), how, check_trace=True)


@pytest.mark.parametrize("how", ["plain", "compiled", "public"])
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
    with entry(how) as options:
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


@pytest.mark.parametrize("sign", [1, -1])
def test_conditions_draw_in_their_place_whether_they_are_used_or_not(sign: int) -> None:
    x = sign * torch.rand(6, 5).t()
    assert_draws_like_eager(chosen, x, "compiled")
    assert_draws_like_eager(chosen, x, "plain")


def test_the_public_entry_refuses_conditions_that_draw() -> None:
    with pytest.raises(fdp.CompileError, match="does not take cond around what draws random numbers"):
        assert_draws_like_eager(chosen, torch.rand(5, 6), "public")


def test_what_cannot_be_drawn_apart_is_refused() -> None:
    def overlapping(x: torch.Tensor) -> torch.Tensor:
        p = likely(x.clone())
        return p[1:].bernoulli_(p[:-1])

    with pytest.raises(fdp.CompileError, match="draws into memory that it reads") as caught:
        assert_draws_like_eager(overlapping, torch.rand(5, 6), "compiled")
    assert "test_draws.py" in str(caught.value) and "clone" in str(caught.value)

    def halves(x: torch.Tensor) -> torch.Tensor:
        p = likely(x.clone())
        p[1::2].bernoulli_(p[:-1:2])
        return p

    assert_draws_like_eager(halves, torch.rand(6, 6), "compiled")


def test_state_is_drawn_into_as_it_lies() -> None:
    def step(state: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
        state["turned"].normal_()
        state["some"][:, ::2].uniform_()
        return state, F.dropout(batch, 0.5)

    def run(function: Callable[..., Any]) -> Any:
        state = {"turned": torch.zeros(6, 5).t(), "some": torch.zeros(4, 40).t()}
        torch.manual_seed(0)
        return [function(state, torch.ones(8, 3).t()) for _ in range(2)][-1]

    for how in ("plain", "compiled", "public"):
        with entry(how) as options:
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
    with entry(how) as options:
        fitted = fdp.data_parallel(step, check_trace=False, compile=options["compile"])
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


@pytest.mark.parametrize("how", ["plain", "compiled", "public"])
def test_two_ranks_train_with_the_numbers_of_plain_pytorch(how: str) -> None:
    ranks.run(2, trains, how)


@pytest.mark.parametrize("size", [(), (4,), (3, 4), (1, 5), (2, 3, 4), (0, 3)])
def test_tensors_are_laid_out(size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    value = torch.randn(size)
    for stride in itertools.product([0, 1, 2, 3, 5, 12], repeat=len(size)):
        # Elements that are to lie in one place have to be equal.
        reach = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if value.numel() else 0
        given = torch.randn(reach).as_strided(size, stride).clone()
        found = laid_out(given, stride)
        assert torch.equal(found, given)
        assert all(n == 1 or s == t for n, s, t in zip(size, stride, found.stride(), strict=True))
        anew = laid_out(given, stride, anew=True)
        assert torch.equal(anew, given) and (anew.data_ptr() != given.data_ptr() or not given.numel())


# --- where rules for fake tensors and kernels differ -------------------------------------------------


OTHERWISE: dict[str, Draws] = {
    "copysign": lambda x: F.dropout(torch.copysign(torch.ones(x.shape), x), 0.5),
    "logsigmoid": lambda x: F.dropout(F.logsigmoid(x), 0.5),
    "2 ** x": lambda x: torch.rand_like(2.0**x),
    "poisson": lambda x: F.dropout(torch.poisson(x.abs()) + 1, 0.5),
    "in a condition": lambda x: torch.cond(
        x.sum() > 9**9, lambda y: y * 1, lambda y: torch.rand_like(y), (F.logsigmoid(x),)
    ),
}


@pytest.fixture
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is asked how it lays its results out, as if all values were too large for it."""
    monkeypatch.setattr(kernel_strides, "_MOST_ELEMENTS", -1)


@pytest.mark.parametrize("how", ["plain", "compiled"])
@pytest.mark.parametrize("name", [name for name in OTHERWISE if name != "poisson"])
def test_kernels_are_asked_how_they_lay_results_out(name: str, how: str) -> None:
    assert_draws_like_eager(OTHERWISE[name], torch.randn(6, 5).t(), how)


@pytest.mark.usefixtures("nothing_asked")
@pytest.mark.parametrize("how", ["plain", "compiled"])
@pytest.mark.parametrize("name", OTHERWISE)
def test_values_that_lie_otherwise_than_torch_says_are_refused(name: str, how: str) -> None:
    x = torch.randn(6, 5).t()
    with pytest.raises(fdp.TraceError, match="lie in memory in another order than torch says") as caught:
        assert_draws_like_eager(OTHERWISE[name], x, how)
    assert "strides" in str(caught.value) and "test_draws.py" in str(caught.value)
    assert ".contiguous()" in str(caught.value)
    assert_draws_like_eager(lambda x: OTHERWISE[name](x.contiguous()), x, how)


@pytest.mark.usefixtures("nothing_asked")
def test_the_refusal_leaves_random_numbers_and_arguments_alone() -> None:
    x = torch.randn(6, 5).t()
    step = fdp.data_parallel(
        lambda w, x: (w.normal_(), OTHERWISE["logsigmoid"](x)), donate_argnums=0, check_trace=False,
        check_replication=False,
    )  # fmt: skip
    w, before = torch.ones(2), torch.random.get_rng_state()
    with pytest.raises(fdp.TraceError, match=r"aten\.log_sigmoid_forward"):
        step(w, x)
    assert torch.equal(before, torch.random.get_rng_state()) and torch.equal(w, torch.ones(2))


@pytest.mark.usefixtures("nothing_asked")
@pytest.mark.parametrize("how", ["plain", "compiled"])
def test_the_comparison_says_so_as_well(how: str) -> None:
    with pytest.raises(fdp.TraceError, match="lie in memory in another order than torch says"):
        assert_draws_like_eager(OTHERWISE["logsigmoid"], torch.randn(6, 5).t(), how, check_trace=True)


@pytest.mark.usefixtures("nothing_asked")
def test_microbatches_are_looked_at() -> None:
    def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.logsigmoid((batch @ params["w"]).t()), 0.5).square().mean()

    def step(params: Any, batch: torch.Tensor) -> Any:
        loss, grads = fdp.accumulate(fdp.value_and_grad(loss_fn), microbatches=2)(params, batch)
        return {"w": params["w"] - grads["w"]}, fdp.pmean(loss)

    fitted = fdp.data_parallel(step, check_trace=False)
    with pytest.raises(fdp.TraceError, match="lie in memory in another order than torch says"):
        fitted({"w": torch.randn(4, 5)}, torch.randn(6, 4))


def test_ordinary_models_need_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    from fdp.compare import strides

    monkeypatch.setattr(strides, "Replay", None)
    attention = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
    apply, params, _ = fdp.from_module(attention)

    def step(params: Any, batch: torch.Tensor) -> Any:
        loss, grads = fdp.value_and_grad(lambda p: apply(p, {}, batch)[0].square().mean())(params)
        return optree.tree_map(lambda p, g: p - g, params, grads), fdp.pmean(loss)

    fdp.data_parallel(step, check_trace=False)(params, torch.randn(3, 5, 16))


def some(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(size) * 0.8 + 0.1).to(dtype)


def lying(size: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    count = len(size)
    yield some(2, 3, 4, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)
    for order in itertools.permutations(range(count)):
        back = sorted(range(count), key=order.__getitem__)
        yield some(*(size[at] for at in order), dtype=dtype).permute(back)
    yield some(*size[:-1], 2 * size[-1], dtype=dtype)[..., ::2]
    yield some(*size[:-1], 1, dtype=dtype).expand(size)
    yield some(1, *size[1:], dtype=dtype).expand(size)


GIVEN: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    "full_like": lambda x: (x, 2.0), "native_dropout": lambda x: (x, 0.5, True), "clamp": lambda x: (x, 0.0, 1.0),
    "where": lambda x: (x > 0.5, x, x), "bernoulli.p": lambda x: (x, 0.5), "pow": lambda x: (x, 2.0),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", sorted(AS_GIVEN, key=str), ids=str)
def test_operators_that_are_trusted_lie_as_their_rules_say(operator: Any, dtype: torch.dtype) -> None:
    name = str(operator).removeprefix("aten.").removesuffix(".default")
    binary = name in ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor")
    scalar = name in ("add.Scalar", "mul.Scalar", "div.Scalar")
    for size in ((3, 4), (2, 3, 4)):
        for x in lying(size, dtype):
            given = GIVEN.get(name, GIVEN.get(name.split(".")[0], lambda x: (x,)))(x)
            calls = [(x, x), (x, 2.0), (x, torch.tensor(2.0))] if binary else [(x, 2.0)] if scalar else [given]
            for call in calls:
                mode = FakeTensorMode()
                teach(mode)
                fakes = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in call]
                with mode:
                    said = operator(*fakes)
                for one, two in zip(optree.tree_leaves(operator(*call)), optree.tree_leaves(said), strict=True):
                    assert one.stride() == two.stride(), (call[0].stride(), one.stride(), two.stride())


def test_draws_that_are_used_in_their_shape_alone_keep_their_place() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first = torch.bernoulli(x.abs().clamp(0, 1))
        like = torch.zeros_like(torch.rand_like(x))
        torch.native_dropout(x, 0.5, True)
        return first + like + torch.rand_like(first) + torch.bernoulli(first * 0.5)

    for how in ("compiled", "public"):
        assert_draws_like_eager(function, torch.randn(6, 5).t(), how)


def test_an_unused_draw_right_before_a_condition_that_draws_is_refused_where_it_is_compiled() -> None:
    def train(w: torch.Tensor, x: torch.Tensor) -> Any:
        torch.rand(3)
        return w + torch.cond(x.sum() > 0, torch.rand_like, torch.randn_like, (w,))

    options: dict[str, Any] = {"check_replication": False, "check_trace": False}
    w, x = torch.ones(3), torch.randn(4, 3)
    with pytest.raises(fdp.CompileError, match="random numbers that it does not use, right before a function"):
        fdp.data_parallel(train, compile=True, **options)(w, x)
    assert fdp.data_parallel(train, **options)(w, x).shape == (3,)


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
