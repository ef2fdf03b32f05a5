"""Gradients inside gradients, several models in a step, unused and frozen parameters: against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from against_oracle import Tree, autograd, compare, data_of, leaves, net, task_loss
from samples import exhaustive, some
from torch import nn

# --- grad of grad: MAML ------------------------------------------------------------------------------


def maml_step(inner_grad: Callable[..., Any], params: Tree, batch: Tree) -> Any:
    import fdp

    def meta_loss(params: Tree) -> torch.Tensor:
        inner = inner_grad(task_loss)(params, batch["ax"], batch["ay"])
        adapted = {k: params[k] - 0.1 * inner[k] for k in params}
        return task_loss(adapted, batch["bx"], batch["by"])

    loss, grads = fdp.value_and_grad(meta_loss)(params)
    return fdp.pmean(loss), grads


def maml_oracle(shared: bool, params: Tree, shards: list[Tree]) -> Any:
    """`shared`: the inner step averages over ranks, so all of them adapt to the same parameters."""
    params = leaves(params)
    losses = []
    for own in shards:
        support = shards if shared else [own]
        inner_loss = sum(task_loss(params, s["ax"], s["ay"]) for s in support) / len(support)
        inner = autograd(inner_loss, params, create_graph=True)
        adapted = {k: params[k] - 0.1 * inner[k] for k in params}
        losses.append(task_loss(adapted, own["bx"], own["by"]))
    loss = sum(losses) / len(losses)
    return loss.detach(), autograd(loss, params)


def maml(inner: str) -> None:
    import fdp

    inner_grad = {"torch.func.grad": torch.func.grad, "fdp.grad": fdp.grad}[inner]

    def step_fn(params: Tree, batch: Tree) -> Any:
        return maml_step(inner_grad, params, batch)

    def oracle(params: Tree, shards: list[Tree]) -> Any:
        return maml_oracle(inner == "fdp.grad", params, shards)

    compare(step_fn, oracle)


@pytest.mark.parametrize("inner", [pytest.param("torch.func.grad", marks=exhaustive), "fdp.grad"])
def test_maml(inner: str) -> None:
    ranks.run(2, maml, inner)


# --- gradient penalty (WGAN-GP) ----------------------------------------------------------------------


def penalty_by_func(params: Tree, x: torch.Tensor) -> torch.Tensor:
    slope = torch.func.grad(lambda x: net(params, x).sum())(x)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def penalty_by_autograd(params: Tree, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(params, x).sum(), x, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


PENALTIES = {"torch.func.grad": penalty_by_func, "torch.autograd.grad": penalty_by_autograd}


def critic_loss(params: Tree, batch: Tree, penalty: Callable[[Tree, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    middle = 0.3 * batch["ax"] + 0.7 * batch["bx"]
    wasserstein = net(params, batch["ax"]).mean() - net(params, batch["bx"]).mean()
    return wasserstein + 10 * penalty(params, middle)


def gradient_penalty(how: str) -> None:
    import fdp

    def step_fn(params: Tree, batch: Tree) -> Any:
        loss, grads = fdp.value_and_grad(lambda p: critic_loss(p, batch, PENALTIES[how]))(params)
        return fdp.pmean(loss), grads

    def oracle(params: Tree, shards: list[Tree]) -> Any:
        params = leaves(params)
        loss = sum(critic_loss(params, s, penalty_by_autograd) for s in shards) / len(shards)
        return loss.detach(), autograd(loss, params)

    compare(step_fn, oracle)


@pytest.mark.parametrize("how", some(PENALTIES))
def test_gradient_penalty(how: str) -> None:
    ranks.run(2, gradient_penalty, how)


# --- per-sample gradients ----------------------------------------------------------------------------


def one_loss(params: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (net(params, x).squeeze(-1) - y) ** 2


def clipped_mean(per_sample: Tree) -> Tree:
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample.values()]).norm(dim=0)
    factors = (0.5 / norms).clamp(max=1)
    return {k: torch.einsum("n,n...->...", factors, g) / len(norms) for k, g in per_sample.items()}


def clipped_per_sample_gradients() -> None:
    import fdp

    def step_fn(params: Tree, batch: Tree) -> Any:
        local = torch.func.vmap(torch.func.grad(one_loss), (None, 0, 0))(params, batch["ax"], batch["ay"])
        return fdp.pmean(clipped_mean(local))

    def oracle(params: Tree, shards: list[Tree]) -> Any:
        params = leaves(params)
        rows = [(x, y) for s in shards for x, y in zip(s["ax"], s["ay"], strict=True)]
        each = [autograd(one_loss(params, x, y), params) for x, y in rows]
        return clipped_mean({k: torch.stack([g[k] for g in each]) for k in params})

    compare(step_fn, oracle)


def averaged_per_sample_gradients() -> None:
    import fdp

    def step_fn(params: Tree, batch: Tree) -> Any:
        return torch.func.vmap(fdp.grad(one_loss), (None, 0, 0))(params, batch["ax"], batch["ay"])

    def oracle(params: Tree, shards: list[Tree]) -> Any:
        params = leaves(params)
        size = len(shards[0]["ay"])
        each = [
            autograd(sum(one_loss(params, s["ax"][i], s["ay"][i]) for s in shards) / len(shards), params)
            for i in range(size)
        ]
        return {k: torch.stack([g[k] for g in each]) for k in params}

    compare(step_fn, oracle)


@pytest.mark.parametrize("job", [clipped_per_sample_gradients, averaged_per_sample_gradients])
def test_vmap_of_grad(job: Callable[[], None]) -> None:
    ranks.run(2, job)


@pytest.mark.parametrize(
    "layer", some([nn.Conv1d(2, 4, 3), nn.Conv2d(2, 4, 3, groups=2), nn.ConvTranspose2d(2, 4, 3)], 3)
)
def test_per_sample_gradients_of_convolutions(layer: nn.Module) -> None:
    """vmap hands convolution_backward unfilled memory in place of what is not asked for: harmless, not refused."""
    import fdp

    apply, params, buffers = fdp.from_module(layer.double())
    x = torch.randn(3, 2, *[6] * (layer.weight.dim() - 2), dtype=torch.float64)

    def loss(params: Any, one: torch.Tensor) -> torch.Tensor:
        return apply(params, buffers, one[None])[0].pow(3).sum()

    def step_fn(params: Any, x: torch.Tensor) -> Any:
        by_weight, by_input = torch.func.grad(loss, (0, 1)), torch.func.grad(loss, 1)
        both, alone = (torch.func.vmap(f, (None, 0))(params, x) for f in (by_weight, by_input))
        return fdp.per_rank((both, alone))

    (by_weight, by_input), alone = fdp.data_parallel(step_fn)(params, x)
    for i, one in enumerate(x):
        leaves = {k: p.detach().requires_grad_() for k, p in params.items()}
        one = one.clone().requires_grad_()
        *expected, d_one = torch.autograd.grad(loss(leaves, one), [*leaves.values(), one])
        torch.testing.assert_close({k: g[i] for k, g in by_weight.items()}, dict(zip(leaves, expected, strict=True)))
        torch.testing.assert_close(by_input[i], d_one)
        torch.testing.assert_close(alone[i], d_one)


# --- two models, two optimizers ----------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, seed: int, inputs: int, outputs: int):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(inputs, 8), nn.LeakyReLU(0.2), nn.Linear(8, outputs)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


D_OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.5, 0.9), "fused": True}
G_OPTIONS: dict[str, Any] = {"lr": 1e-1, "momentum": 0.5}


def d_loss(score: Callable[[torch.Tensor], torch.Tensor], real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    return F.softplus(-score(real)).mean() + F.softplus(score(fake)).mean()


def gan_oracle(steps: int, world: int) -> Tree:
    g, d = Pair(1, 2, 3), Pair(2, 3, 1)
    d_rule = torch.optim.AdamW(d.parameters(), **D_OPTIONS)
    g_rule = torch.optim.SGD(g.parameters(), **G_OPTIONS)
    for call in range(steps):
        shards = [data_of(r, call) for r in range(world)]
        real, noise = torch.cat([s["ax"] for s in shards]), torch.cat([s["bx"] for s in shards])[:, :2]
        d_rule.zero_grad()
        d_loss(d, real, g(noise).detach()).backward()
        d_rule.step()
        g_rule.zero_grad()
        F.softplus(-d(g(noise))).mean().backward()
        g_rule.step()
    return {f"{n}.{k}": v.detach() for n, m in (("g", g), ("d", d)) for k, v in m.named_parameters()}


def gan(donate: bool) -> None:
    import fdp

    world, rank = dist.get_world_size(), dist.get_rank()
    g_apply, g_params, _ = fdp.from_module(Pair(1, 2, 3))
    d_apply, d_params, _ = fdp.from_module(Pair(2, 3, 1))
    d_rule = fdp.optim.from_torch(torch.optim.AdamW, **D_OPTIONS)
    g_rule = fdp.optim.from_torch(torch.optim.SGD, **G_OPTIONS)

    @fdp.data_parallel(donate_argnums=0 if donate else ())
    def gan_step(state: Any, batch: Tree) -> Any:
        real, noise = batch["ax"], batch["bx"][:, :2]
        fake, _ = g_apply(state["g"], {}, noise)

        def discriminator(params: Any) -> torch.Tensor:
            return d_loss(lambda x: d_apply(params, {}, x)[0], real, fake.detach())

        d_value, d_grads = fdp.value_and_grad(discriminator)(state["d"])
        d_new, d_opt = d_rule.update(d_grads, state["d_opt"], state["d"])

        def generator(params: Any) -> torch.Tensor:
            return F.softplus(-d_apply(d_new, {}, g_apply(params, {}, noise)[0])[0]).mean()

        g_value, g_grads = fdp.value_and_grad(generator)(state["g"])
        g_new, g_opt = g_rule.update(g_grads, state["g_opt"], state["g"])
        state = {"g": g_new, "d": d_new, "g_opt": g_opt, "d_opt": d_opt}
        return state, fdp.pmean({"d": d_value, "g": g_value})

    state = {"g": g_params, "d": d_params, "g_opt": g_rule.init(g_params), "d_opt": d_rule.init(d_params)}
    for call in range(5):
        state, _ = gan_step(state, data_of(rank, call))
        fdp.assert_replicated(state)
    got = {f"{n}.{k}": v.detach() for n in ("g", "d") for k, v in state[n].items()}
    torch.testing.assert_close(got, gan_oracle(5, world), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("donate", [pytest.param(False, marks=exhaustive), True])
def test_two_models_two_optimizers(donate: bool) -> None:
    ranks.run(2, gan, donate)


# --- unused and frozen parameters --------------------------------------------------------------------


class Partly(nn.Module):
    """A used layer, a frozen one in the middle of the path, a layer that nothing calls, a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.frozen, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.unused = nn.Linear(2, 2)
        self.double()
        self.frozen.requires_grad_(False)
        self.unused.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


def unused_and_frozen() -> None:
    import fdp

    world, rank = dist.get_world_size(), dist.get_rank()
    apply, params, buffers = fdp.from_module(Partly())
    rule = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    assert sorted(buffers) == ["frozen.bias", "frozen.weight", "unused.bias"]

    @fdp.data_parallel
    def partly_step(state: Any, batch: Tree) -> Any:
        def loss_fn(params: Any) -> torch.Tensor:
            return F.mse_loss(apply(params, state["buffers"], batch["ax"])[0].squeeze(-1), batch["ay"])

        grads = fdp.grad(loss_fn)(state["params"])
        new, opt = rule.update(grads, state["opt"], state["params"])
        return {"params": new, "buffers": state["buffers"], "opt": opt}, grads

    state = {"params": params, "buffers": buffers, "opt": rule.init(params)}
    model = Partly()
    trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.1)
    for call in range(3):
        shards = [data_of(r, call) for r in range(world)]
        state, grads = partly_step(state, shards[rank])
        x, y = (torch.cat([s[k] for s in shards]) for k in ("ax", "ay"))
        loss = F.mse_loss(model(x).squeeze(-1), y)
        # Zeros, not None: an unused parameter has a gradient, and it is zero; the decay still applies.
        expected = torch.autograd.grad(loss, list(trained.values()), allow_unused=True, materialize_grads=True)
        for p, g in zip(trained.values(), expected, strict=True):
            p.grad = g
        optimizer.step()
        torch.testing.assert_close(grads, dict(zip(trained, expected, strict=True)), rtol=1e-9, atol=1e-12)
        assert not grads["unused.weight"].any()
    got = {k: v.detach() for k, v in (state["params"] | state["buffers"]).items()}
    torch.testing.assert_close(got, {k: v.detach() for k, v in model.named_parameters()}, rtol=1e-9, atol=1e-10)
    assert models.digest(state["buffers"]) == models.digest(buffers)


def test_unused_and_frozen_parameters() -> None:
    ranks.run(2, unused_and_frozen)


# --- second derivatives that are zero: torch makes them without memory ---------------------------------


def through_a_sign(p: Tree, x: torch.Tensor) -> torch.Tensor:
    return (p["a"] * x).abs().mean() + (-(p["a"] * x).abs()).mean() + (p["b"] * x).abs().sum() + p["b"].relu().sum()


SECOND: dict[str, Callable[[Any, Tree, torch.Tensor], Any]] = {
    "alone": lambda grad, p, x: sum(g.sum() for g in grad(p, x).values()),
    "with others": lambda grad, p, x: sum((g.sin() * (1 + p[k] * p[k])).sum() for k, g in grad(p, x).items()),
    "twice": lambda grad, p, x: sum((g * g.exp()).cumsum(0).sum() for g in grad(p, x).values()),
}


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        pytest.param(name, way, marks=() if way == (name == "twice") else exhaustive)
        for way in (False, True)
        for name in SECOND
    ],
)
def test_second_derivatives_that_are_zero(name: str, compiled: bool) -> None:
    import fdp

    def step(params: Tree, x: torch.Tensor) -> Any:
        def outer(p: Tree) -> torch.Tensor:
            return SECOND[name](fdp.grad(through_a_sign), p, x)

        return fdp.grad(outer)(params)

    g = torch.Generator().manual_seed(3)
    params = {k: torch.randn(4, generator=g, dtype=torch.float64) for k in "ab"}
    params["unused"] = torch.ones(2, dtype=torch.float64)
    x = torch.randn(4, generator=g, dtype=torch.float64)
    given = leaves(params)
    every = list(given.values())
    first = torch.autograd.grad(through_a_sign(given, x), every, create_graph=True, materialize_grads=True)
    value = SECOND[name](lambda p, x: dict(zip(given, first, strict=True)), given, x)
    expected = dict(zip(given, torch.autograd.grad(value, every, materialize_grads=True), strict=True))
    traced = fdp.data_parallel(step, compile=compiled)
    for _ in range(2):
        torch.testing.assert_close(traced(params, x), expected, rtol=1e-12, atol=1e-12)
