"""Kinds of values in a compiled step: collectives, views, odd geometry, dtypes, state that is changed in place."""

from __future__ import annotations

import itertools
from typing import Any

import models
import optree
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples import ALL_SAMPLES, exhaustive, some

import fdp

Tree = Any
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def copy_of(tree: Tree) -> Tree:
    """Copies with the same strides; of a tensor that overlaps itself, too."""

    def one(x: torch.Tensor) -> torch.Tensor:
        memory = x.untyped_storage().clone()
        return torch.empty(0, dtype=x.dtype).set_(memory, x.storage_offset(), x.shape, x.stride())

    return optree.tree_map(one, tree)


def check_alike(step: Any, state: Tree, *batches: Tree, donate: bool = False, close: Any = CLOSE) -> Any:
    """Call a step with and without the compiler, and compare; returns the compiled one."""
    donated = 0 if donate else ()
    compiled = fdp.data_parallel(step, donate_argnums=donated, compile=True)
    plain = fdp.data_parallel(step, donate_argnums=donated)
    one, two = copy_of(state), copy_of(state)
    for i, batch in enumerate(batches):
        before = models.digest((one, batch))
        found, expected = compiled(one, batch), plain(two, batch)
        torch.testing.assert_close(found, expected, msg=lambda m, i=i: f"call {i}: {m}", **close)
        torch.testing.assert_close(one, two, msg=lambda m, i=i: f"state after call {i}: {m}", **close)
        strides = [[x.stride() for x in optree.tree_leaves(tree)] for tree in (found, expected)]
        assert strides[0] == strides[1]
        assert donate or models.digest((one, batch)) == before
    return compiled


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- two ranks ---------------------------------------------------------------------------------------------

CLOSED_OVER = torch.linspace(1, 2, 3)


def talkative(state: Tree, batch: torch.Tensor) -> Any:
    """Every collective, the rank, a tensor from outside, and a result that differs from rank to rank."""
    loss, grad = fdp.value_and_grad(lambda w: ((batch * w) ** 2).mean())(state["w"])
    rows = fdp.all_gather(batch.mean(1))
    mine = batch.sum() * (1 + fdp.axis_index())
    new = {
        "w": state["w"] - 0.1 * grad + CLOSED_OVER * fdp.broadcast(batch[0], root=1),
        "top": torch.maximum(state["top"], fdp.pmax(batch.max())),
    }
    return new, {
        "rows": rows.flatten(0, 1).cumsum(0),
        "loss": fdp.pmean(loss),
        "sum": fdp.psum(mine),
        "low": fdp.pmin(batch).relu(),
        "mine": fdp.per_rank(mine),
    }


def talk() -> None:
    for donate in (True, False) if ALL_SAMPLES else (True,):
        state = {"w": torch.ones(3), "top": torch.zeros(())}
        batches = [numbers(4, 3, seed=10 * i + dist.get_rank()) for i in range(2)]
        check_alike(talkative, state, *batches, donate=donate)


def test_collectives_and_the_rank() -> None:
    ranks.run(2, talk)


# --- in one process ----------------------------------------------------------------------------------------


@exhaustive
def test_a_world_of_one() -> None:
    def step(state: Tree, batch: torch.Tensor) -> Any:
        return state + fdp.psum(batch + fdp.axis_index()), fdp.per_rank(fdp.all_gather(batch)), fdp.pmax(batch)

    check_alike(step, torch.ones(3), torch.arange(3.0), torch.ones(3))


@exhaustive
def test_a_closed_over_tensor_holds_what_it_holds_at_the_call() -> None:
    scale = torch.ones(3)

    def step(state: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return state * scale + fdp.pmean(batch)

    compiled, plain = fdp.data_parallel(step, compile=True), fdp.data_parallel(step)
    for factor in (1.0, 5.0):
        scale.fill_(factor)
        found, expected = (each(torch.ones(3), torch.zeros(3)) for each in (compiled, plain))
        assert torch.equal(found, expected) and expected[0] == factor


@pytest.mark.parametrize("compile", [False, True])
def test_a_closed_over_tensor_that_was_given_other_memory(compile: bool) -> None:
    scale, shift = torch.nn.Parameter(torch.ones(3), requires_grad=False), torch.zeros(2, 3)
    step = fdp.data_parallel(
        lambda state, batch: state * scale + shift.t()[:, 0] + fdp.pmean(batch), compile=compile, check_trace=False
    )
    assert step(torch.ones(3), torch.zeros(3)).tolist() == [1.0] * 3
    scale.data = torch.full((3,), 5.0)  # as `Module.to` and averaged weights that are swapped in do it
    assert step(torch.ones(3), torch.zeros(3)).tolist() == [5.0] * 3
    shift.set_(torch.ones(2, 3))
    assert step(torch.ones(3), torch.zeros(3)).tolist() == [6.0] * 3


@exhaustive
def test_narrow_numbers() -> None:
    def step(w: torch.Tensor, batch: torch.Tensor) -> Any:
        loss, grad = fdp.value_and_grad(lambda w: F.gelu(batch @ w).square().mean())(w)
        return w - 0.1 * grad, fdp.pmean(loss)

    # Fused loops keep what lies between in float32, where each operator would round it to eight bits.
    close = {"rtol": 2e-2, "atol": 2e-2}
    check_alike(step, numbers(4, 3).bfloat16(), numbers(8, 4).bfloat16(), numbers(8, 4).bfloat16(), close=close)


@pytest.mark.parametrize("donate", some([True, False]))
def test_odd_geometry(donate: bool) -> None:
    """Transposed, at an offset, with gaps, empty, a constant spread out; inputs that are views; an empty batch."""

    def step(state: Tree, batch: Tree) -> Any:
        loss, grads = fdp.value_and_grad(
            lambda p: ((batch["x"] @ p["transposed"]) * p["gaps"] + p["late"]).square().mean()
        )({k: state[k] for k in ("transposed", "gaps", "late")})
        new = {k: state[k] - 0.1 * g for k, g in grads.items()}
        new["empty"] = state["empty"] * 2
        new["step"] = state["step"] + 1
        return new, fdp.pmean(loss + batch["none"].sum() + batch["spread"].sum())

    state = {
        "transposed": numbers(3, 5).t(),
        "gaps": numbers(6)[::2],
        "late": numbers(8)[5:],
        "empty": torch.empty(0, 4),
        "step": torch.zeros((), dtype=torch.int64),
    }
    memory = numbers(64)
    batch = {
        "x": memory[4:44].view(8, 5),
        "none": torch.empty(0, 3),
        "spread": torch.ones(1).expand(4),
    }
    check_alike(step, state, batch, batch, donate=donate)


@exhaustive
def test_state_of_a_spread_out_constant() -> None:
    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        return fdp.pmean(batch) * state, state.sum()

    check_alike(step, torch.full((1,), 3.0).expand(2, 3), numbers(2, 3))


def bookkeeping(state: Tree, batch: torch.Tensor) -> Any:
    """No gradients; an average of parameters, a norm of old and new values, and state that is changed in place."""
    old = state["w"]
    new = old * 0.9 + fdp.pmean(batch)
    state["n"].add_(1)
    state["seen"].mul_(0.5).add_(new.abs())
    average = torch.lerp(state["average"], new, 0.1)
    return {"w": new, "average": average, "n": state["n"], "seen": state["seen"]}, {
        "update": (new - old).norm(),
        "count": state["n"] * 2,
        "old": old.sum(),
    }


@exhaustive
def test_state_that_is_changed_in_place_and_read_before_and_after() -> None:
    state = {"w": numbers(5), "average": numbers(5), "n": torch.zeros(()), "seen": torch.ones(5)}
    check_alike(bookkeeping, state, *(numbers(5, seed=i) for i in range(3)), donate=True)


@exhaustive
def test_two_signatures_of_one_step() -> None:
    def step(w: torch.Tensor, batch: torch.Tensor) -> Any:
        loss, grad = fdp.value_and_grad(lambda w: (batch @ w).sin().mean())(w)
        return w - 0.1 * grad, fdp.pmean(loss)

    compiled = check_alike(step, numbers(3, 2), *(numbers(size, 3, seed=size) for size in (4, 6, 4, 6)))
    assert compiled.traces == 2


def adversaries(optimizers: dict[str, Any]) -> Any:
    """A step of a GAN: two networks, two losses, two optimizers."""

    def generate(p: Tree, noise: torch.Tensor) -> torch.Tensor:
        return torch.tanh(noise @ p["w"])

    def judge(p: Tree, x: torch.Tensor) -> torch.Tensor:
        return (x @ p["w"]).relu().sum(1)

    def step(state: Tree, batch: Tree) -> Any:
        g, d = state["g"], state["d"]

        def loss_d(p: Tree) -> torch.Tensor:
            fake = generate(g, batch["noise"]).detach()
            return F.softplus(-judge(p, batch["x"])).mean() + F.softplus(judge(p, fake)).mean()

        found_d, grads_d = fdp.value_and_grad(loss_d)(d)
        d, opt_d = optimizers["d"].update(grads_d, state["opt_d"], d)
        found_g, grads_g = fdp.value_and_grad(lambda p: F.softplus(-judge(d, generate(p, batch["noise"]))).mean())(g)
        g, opt_g = optimizers["g"].update(grads_g, state["opt_g"], g)
        losses = fdp.pmean({"d": found_d, "g": found_g})
        return {"g": g, "d": d, "opt_g": opt_g, "opt_d": opt_d}, losses

    return step


def train_adversaries() -> None:
    g, d = {"w": numbers(3, 4, seed=1)}, {"w": numbers(4, 5, seed=2)}
    optimizers = {
        "g": fdp.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9),
        "d": fdp.optim.from_torch(torch.optim.AdamW, lr=1e-2, fused=True),
    }
    state = {"g": g, "d": d, "opt_g": optimizers["g"].init(g), "opt_d": optimizers["d"].init(d)}
    rank = dist.get_rank()
    batches = [{"x": numbers(6, 4, seed=i + 9 * rank), "noise": numbers(6, 3, seed=i + 5 + 9 * rank)} for i in range(3)]
    check_alike(adversaries(optimizers), state, *batches, donate=True)


@exhaustive
def test_two_optimizers_in_one_step() -> None:
    ranks.run(2, train_adversaries)


def test_a_factor_in_a_sum_with_a_product_is_kept() -> None:
    # torch.compile of torch 2.13 makes one addmm of the two, and forgets the factor.
    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        one = torch.add(state @ state, state, alpha=2)
        other = (state @ batch).mul_(0.5).add_(state, alpha=-3)
        return torch.add(state, state @ one, alpha=0.25), other, torch.sub(state @ one, state, alpha=2)

    state, batch = torch.randn(4, 4), torch.randn(4, 4)
    compiled = fdp.data_parallel(step, compile=True, check_trace=False, check_replication=False)
    for found, expected in zip(compiled(state, batch), step(state, batch), strict=True):
        torch.testing.assert_close(found, expected)


@exhaustive
def test_of_equal_extremes_the_first_counts() -> None:
    # torch.compile of torch 2.13 takes the one that lies first in memory.
    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        value, across = (state.t() + batch).relu(), (state + batch)[:, 1:].t()
        return (
            value.argmax(), value.argmin(), value.argmax(keepdim=True), across.argmin(), value.argmax(0),
            value.argmin(1, keepdim=True), value.max(1).indices, value.min(0).indices, state[0, 0].argmax(),
        )  # fmt: skip

    compiled = fdp.data_parallel(step, compile=True, check_trace=False, check_replication=False)
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        state, batch = (torch.randint(-1, 2, (5, 5), generator=g).float() for _ in range(2))
        for found, expected in zip(compiled(state, batch), step(state, batch), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@exhaustive
def test_a_condition_whose_branches_have_been_seen_with_other_shapes() -> None:
    """Dynamo hands them sizes then, as numbers among their operands."""

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.cond(x.sum() > 0, lambda q: -q * q.shape[0], lambda q: q.relu() + q.shape[0], (x,))
        return w + fdp.pmean(chosen.sum())

    run = fdp.data_parallel(step, compile=True)
    for rows, sign in itertools.product((4, 6, 3), (1, -1)):
        x = sign * torch.arange(2.0 * rows).view(rows, 2)
        expected = (-x * rows).sum() if sign > 0 else (x.relu() + rows).sum()
        torch.testing.assert_close(run(torch.zeros(2), x), expected.expand(2))


@exhaustive
def test_gathered_values_without_elements_have_the_shape_of_all_ranks() -> None:
    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        none = fdp.all_gather(batch[:0])
        return state + none.permute(1, 2, 0).sum((0, 2)), none

    state, batch = torch.ones(3), torch.ones(4, 3)
    found = fdp.data_parallel(step, compile=True)(state, batch)
    torch.testing.assert_close(found, (state, torch.empty(1, 0, 3)))


@exhaustive
def test_what_torch_calls_unsafe_is_a_view() -> None:
    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        value = state * 2
        parts, pieces = torch.unsafe_split(value, 2), torch.unsafe_split_with_sizes(value, [1, 3])
        value.add_(1)
        return parts[1] * batch, pieces[0] * 2, parts[0]

    state, batch = torch.arange(4.0), torch.full((2,), 3.0)
    for compile in (False, True):
        found = fdp.data_parallel(step, compile=compile, check_replication=False)(state, batch)
        torch.testing.assert_close(found, step(state, batch))


@exhaustive
@pytest.mark.parametrize("lies", [lambda x: x.repeat_interleave(2, 0)[::2], lambda x: x.t().contiguous().t()])
def test_a_loop_is_given_tensors_that_lie_as_it_was_compiled_for(lies: Any) -> None:
    """Zeros that a compiler goes on with lie row by row, whatever the tensor that they are written into lies like."""

    def step(state: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
        def loss(w: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return (w.cos() * torch.arange(16.0).view(4, 4)).sum() * rows.sum()

        w = state["w"]
        w.zero_()
        w[0].fill_(1.0)
        value, grad = fdp.accumulate(fdp.value_and_grad(loss), 2)(w, batch)
        return {"w": w}, (fdp.pmean(value), grad)

    found = []
    for compiled in (False, True):
        w = lies(torch.arange(16.0).view(4, 4))
        assert not w.is_contiguous()
        state, results = fdp.data_parallel(step, donate_argnums=0, compile=compiled)({"w": w}, torch.ones(4, 2))
        found.append([state["w"], *results])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


def sixteen_bits(state: Tree, x: torch.Tensor) -> Any:
    """What is left of error feedback, overflow and cancellation, if casts are left out, is another number."""
    feedback = state - state.bfloat16().float()
    half = (x * 3e4).half()
    return state + 0, (
        feedback,
        (half + half).float() * 0.5,
        (half * half - half * half).float(),
        (x.half() * 1000 % 0.5),
    )


def test_casts_to_sixteen_bits_round() -> None:
    x = torch.linspace(-1.9, 1.9, 32)
    step = fdp.data_parallel(sixteen_bits, compile=True, check_replication=False, check_trace=False)
    for found, due in zip(step(x * 0.37, x)[1], sixteen_bits(x * 0.37, x)[1], strict=True):
        torch.testing.assert_close(found, due, rtol=0, atol=0, equal_nan=True)
    if not ALL_SAMPLES:
        return
    left_out = fdp.data_parallel(
        sixteen_bits, compile={"emulate_precision_casts": False}, check_replication=False, check_trace=False
    )
    assert float(left_out(x * 0.37, x)[1][0].abs().max()) == 0  # inductor's own way: so the test can fail
