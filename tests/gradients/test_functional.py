"""torch.func in all its forms, with collectives inside, on two ranks: against plain autograd in one process.

Each case is a step's function and its oracle, which has the batches of all ranks. All of them run in one job, traced
and untraced, each twice with new data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import ranks
import torch
import torch.nn.functional as F
from against_oracle import DOUBLE, Tree, autograd, compare, leaves, net, task_loss
from samples import ALL_SAMPLES
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import fdp

Step = Callable[[Tree, Tree], Any]
Oracle = Callable[[Tree, list[Tree]], Any]

W = {"w": torch.tensor([0.5, -1.0, 2.0], dtype=DOUBLE), "v": torch.tensor([1.0, 0.25, -0.5], dtype=DOUBLE)}
"""Parameters, and a direction."""


def local(w: torch.Tensor, batch: Tree) -> torch.Tensor:
    """This rank's scalar loss, with a Hessian of its own."""
    return ((torch.tanh(batch["ax"] * w).sum(1) - batch["ay"]) ** 2).mean()


def mean_loss(w: torch.Tensor, shards: list[Tree]) -> torch.Tensor:
    return sum(local(w, s) for s in shards) / len(shards)


def features(w: torch.Tensor, batch: Tree) -> torch.Tensor:
    """This rank's vector [3], nonlinear in w."""
    return torch.sin(batch["ax"].mean(0) * w) * batch["bx"].mean(0) + w * w.sum()


def mean_features(w: torch.Tensor, shards: list[Tree]) -> torch.Tensor:
    return sum(features(w, s) for s in shards) / len(shards)


def jacobian(fn: Callable[[torch.Tensor], torch.Tensor], w: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.jacobian(fn, w)


def hessian_of(fn: Callable[[torch.Tensor], torch.Tensor], w: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.hessian(fn, w)


def jacobian_cases() -> dict[str, tuple[Step, Oracle]]:
    """Vectors through collectives, in both directions."""

    def averaged(p: Tree, b: Tree) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda w: fdp.pmean(features(w, b))

    def oracle_of(fn: Callable[[torch.Tensor, list[Tree]], torch.Tensor]) -> Oracle:
        return lambda p, shards: jacobian(lambda w: fn(w, shards), p["w"])

    def squares(w: torch.Tensor, shards: list[Tree]) -> torch.Tensor:
        return mean_features(w, shards) ** 2

    # The transpose of psum is psum: reverse mode sums the cotangents of all ranks. Each rank's loss is its own copy of
    # the same value, so that the derivative of the mean over ranks is what both modes agree on.
    cases: dict[str, tuple[Step, Oracle]] = {
        "jacfwd of pmean": (lambda p, b: jacfwd(averaged(p, b))(p["w"]), oracle_of(mean_features)),
        "jacrev of pmean": (lambda p, b: fdp.pmean(jacrev(averaged(p, b))(p["w"])), oracle_of(mean_features)),
        "jacfwd of pmean squared": (lambda p, b: jacfwd(lambda w: averaged(p, b)(w) ** 2)(p["w"]), oracle_of(squares)),
        "jacrev, averaged": (lambda p, b: fdp.pmean(jacrev(features)(p["w"], b)), oracle_of(mean_features)),
        "jacrev in pieces": (
            lambda p, b: fdp.pmean(jacrev(features, chunk_size=2)(p["w"], b)), oracle_of(mean_features)
        ),
        "jacfwd of psum": (
            lambda p, b: jacfwd(lambda w: fdp.psum(features(w, b)))(p["w"]),
            oracle_of(lambda w, shards: sum(features(w, s) for s in shards)),
        ),
        "jacfwd of all_gather": (
            lambda p, b: jacfwd(lambda w: fdp.all_gather(features(w, b)))(p["w"]),
            oracle_of(lambda w, shards: torch.stack([features(w, s) for s in shards])),
        ),
        "jacfwd of broadcast": (
            lambda p, b: jacfwd(lambda w: fdp.broadcast(features(w, b), root=1))(p["w"]),
            oracle_of(lambda w, shards: features(w, shards[1])),
        ),
        "jacfwd of a weighted mean": (
            lambda p, b: jacfwd(lambda w: fdp.pmean(features(w, b), weight=weight_of(w, b)))(p["w"]),
            oracle_of(weighted_features),
        ),
    }  # fmt: skip
    return cases


def weight_of(w: torch.Tensor, batch: Tree) -> torch.Tensor:
    return (batch["ay"] * w.sum()).exp().sum()


def weighted_features(w: torch.Tensor, shards: list[Tree]) -> torch.Tensor:
    weights = [weight_of(w, s) for s in shards]
    return sum(k * features(w, s) for k, s in zip(weights, shards, strict=True)) / sum(weights)


def product_cases() -> dict[str, tuple[Step, Oracle]]:
    """Products with Jacobians and Hessians."""

    def tangent(p: Tree, shards: list[Tree]) -> Any:
        value = mean_features(p["w"], shards)
        return value, jacobian(lambda w: mean_features(w, shards), p["w"]) @ p["v"]

    def cotangent(p: Tree, shards: list[Tree]) -> Any:
        return mean_features(p["w"], shards), p["v"] @ jacobian(lambda w: mean_features(w, shards), p["w"])

    def hessian_times(p: Tree, shards: list[Tree]) -> Any:
        return hessian_of(lambda w: mean_loss(w, shards), p["w"]) @ p["v"]

    def by_vjp(p: Tree, b: Tree) -> Any:
        out, pull = vjp(lambda w: features(w, b), p["w"])
        return fdp.pmean((out, pull(p["v"])[0]))

    def by_linearize(p: Tree, b: Tree) -> Any:
        out, push = linearize(lambda w: features(w, b), p["w"])
        return fdp.pmean((out, push(p["v"])))

    def reverse_twice(p: Tree, b: Tree) -> Any:
        return fdp.pmean(grad(lambda w: grad(local)(w, b) @ p["v"])(p["w"]))

    def forward_over_reverse(p: Tree, b: Tree) -> Any:
        return fdp.pmean(jvp(lambda w: grad(local)(w, b), (p["w"],), (p["v"],))[1])

    def reverse_over_forward(p: Tree, b: Tree) -> Any:
        return fdp.pmean(grad(lambda w: jvp(lambda w: local(w, b), (w,), (p["v"],))[1])(p["w"]))

    def forward_over_fdp(p: Tree, b: Tree) -> Any:
        return jvp(lambda w: fdp.grad(local)(w, b), (p["w"],), (p["v"],))[1]

    def fdp_over_forward(p: Tree, b: Tree) -> Any:
        return fdp.grad(lambda w: jvp(lambda w: local(w, b), (w,), (p["v"],))[1])(p["w"])

    def fdp_over_fdp(p: Tree, b: Tree) -> Any:
        return fdp.grad(lambda w: fdp.grad(local)(w, b) @ p["v"])(p["w"])

    def value_and_grad_forwards(p: Tree, b: Tree) -> Any:
        (loss, _), (slope, product) = jvp(lambda w: fdp.value_and_grad(local)(w, b), (p["w"],), (p["v"],))
        return fdp.pmean((loss, slope)), product

    def value_and_product(p: Tree, shards: list[Tree]) -> Any:
        (slope,) = autograd(mean_loss(w := p["w"].clone().requires_grad_(), shards), {"w": w}).values()
        return (mean_loss(p["w"], shards), slope @ p["v"]), hessian_times(p, shards)

    def whole_hessian(p: Tree, shards: list[Tree]) -> Any:
        return hessian_of(lambda w: mean_loss(w, shards), p["w"])

    return {
        "jvp": (lambda p, b: jvp(lambda w: fdp.pmean(features(w, b)), (p["w"],), (p["v"],)), tangent),
        "vjp": (by_vjp, cotangent),
        "linearize": (by_linearize, tangent),
        "hessian product, reverse twice": (reverse_twice, hessian_times),
        "hessian product, forward over reverse": (forward_over_reverse, hessian_times),
        "hessian product, reverse over forward": (reverse_over_forward, hessian_times),
        "hessian product, jvp of fdp.grad": (forward_over_fdp, hessian_times),
        "hessian product, fdp.grad of jvp": (fdp_over_forward, hessian_times),
        "hessian product, fdp.grad of fdp.grad": (fdp_over_fdp, hessian_times),
        "jvp of fdp.value_and_grad": (value_and_grad_forwards, value_and_product),
        "hessian": (lambda p, b: fdp.pmean(hessian(local)(p["w"], b)), whole_hessian),
        "jacfwd of fdp.grad": (lambda p, b: jacfwd(lambda w: fdp.grad(local)(w, b))(p["w"]), whole_hessian),
        "jacrev of fdp.grad": (
            lambda p, b: fdp.pmean(jacrev(lambda w: fdp.grad(local)(w, b))(p["w"])), whole_hessian
        ),
    }  # fmt: skip


def rows_loss(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x * w).sum() - y) ** 2


def vmap_cases() -> dict[str, tuple[Step, Oracle]]:
    """Every argument of vmap, nested data, and collectives and fdp.grad underneath."""

    def each(p: Tree, s: Tree) -> torch.Tensor:
        w = p["w"].clone().requires_grad_()
        rows = [torch.autograd.grad(rows_loss(w, x, y), w)[0] for x, y in zip(s["ax"], s["ay"], strict=True)]
        return torch.stack(rows)

    def mean_each(p: Tree, shards: list[Tree]) -> torch.Tensor:
        return sum(each(p, s) for s in shards) / len(shards)

    def nested(p: Tree, b: Tree) -> Any:
        rows = {"x": b["ax"].T, "more": [b["ay"]]}
        slopes = vmap(
            lambda w, row: {"g": grad(rows_loss)(w, row["x"], row["more"][0])},
            in_dims=(None, {"x": 1, "more": [0]}), out_dims={"g": 1}, chunk_size=3,
        )(p["w"], rows)  # fmt: skip
        return fdp.pmean(slopes["g"].T)

    def clipped(per_sample: torch.Tensor) -> torch.Tensor:
        return (per_sample * (0.5 / per_sample.norm(dim=1)).clamp(max=1)[:, None]).mean(0)

    def private(p: Tree, b: Tree) -> Any:
        """DP-SGD with noise that is the same on all ranks: drawn on one."""
        slope = fdp.pmean(clipped(vmap(grad(rows_loss), (None, 0, 0))(p["w"], b["ax"], b["ay"])))
        noise = fdp.broadcast(torch.randn_like(p["w"]))
        return slope + 0.1 * (noise - noise.detach()), slope + 0 * noise

    def dropped(p: Tree, b: Tree) -> Any:
        """Rows with masks of their own, and with the same: the masks are what is looked at."""
        ones = torch.ones(4, 64, dtype=DOUBLE)
        own = vmap(lambda x: F.dropout(x, 0.5), randomness="different")(ones)
        same = vmap(lambda x: F.dropout(x, 0.5), randomness="same")(ones)
        return fdp.pmean(((own[0] != own[1]).any().double(), (same != same[0]).any().double()))

    models, meta_copy = [models_of(k).requires_grad_(False) for k in range(3)], models_of(0).to("meta")

    def ensemble(p: Tree, b: Tree) -> Any:
        stacked, buffers = torch.func.stack_module_state(models)
        stacked = {k: v.detach() * p["w"].sum() for k, v in stacked.items()}

        def loss(own: Tree, more: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(functional_call(meta_copy, (own, more), (x,)).squeeze(-1), y)

        local = vmap(grad(loss), (0, 0, None, None))(stacked, buffers, b["ax"], b["ay"])
        return fdp.pmean(local), vmap(fdp.grad(loss), (0, 0, None, None))(stacked, buffers, b["ax"], b["ay"])

    def one_by_one(p: Tree, shards: list[Tree]) -> Any:
        found = []
        for k in range(3):
            own = leaves({n: v.detach() * p["w"].sum() for n, v in models_of(k).named_parameters()})
            losses = [F.mse_loss(functional_call(models_of(k), own, (s["ax"],)).squeeze(-1), s["ay"]) for s in shards]
            found.append(autograd(sum(losses) / len(losses), own))
        stacked = {n: torch.stack([f[n] for f in found]) for n in found[0]}
        return stacked, stacked

    return {
        "vmap of grad, nested data, in_dims, out_dims, chunk_size": (nested, mean_each),
        "vmap of fdp.grad": (lambda p, b: vmap(fdp.grad(rows_loss), (None, 0, 0))(p["w"], b["ax"], b["ay"]), mean_each),
        "vmap of fdp.grad in pieces": (
            lambda p, b: vmap(fdp.grad(rows_loss), (None, 0, 0), chunk_size=2)(p["w"], b["ax"], b["ay"]), mean_each
        ),
        "vmap of psum": (
            lambda p, b: vmap(lambda x: fdp.psum(x * p["w"]), in_dims=1, out_dims=1)(b["ax"].T),
            lambda p, shards: sum((s["ax"] * p["w"]).T for s in shards),
        ),
        "vmap of all_gather": (
            lambda p, b: vmap(lambda x: fdp.all_gather(x * p["w"]))(b["ax"]),
            lambda p, shards: torch.stack([s["ax"] * p["w"] for s in shards], 1),
        ),
        "per-sample gradients, clipped, and noise": (
            private, lambda p, shards: (clipped_mean := sum(clipped(each(p, s)) for s in shards) / 2, clipped_mean)
        ),
        "randomness": (dropped, lambda p, shards: (torch.ones((), dtype=DOUBLE), torch.zeros((), dtype=DOUBLE))),
        "ensemble": (ensemble, one_by_one),
    }  # fmt: skip


def models_of(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()


def nested_cases() -> dict[str, tuple[Step, Oracle]]:
    """Gradients of functions that contain gradients, and functions of other transforms."""

    def first_order(p: Tree, b: Tree) -> Any:
        def meta(p: Tree) -> torch.Tensor:
            inner = optree.tree_map(torch.Tensor.detach, grad(task_loss)(p, b["ax"], b["ay"]))
            return task_loss({k: p[k] - 0.1 * inner[k] for k in p}, b["bx"], b["by"])

        return fdp.grad(meta)(p)

    def first_order_by_hand(p: Tree, shards: list[Tree]) -> Any:
        p, losses = leaves(p), []
        for s in shards:
            inner = autograd(task_loss(p, s["ax"], s["ay"]), p)
            losses.append(task_loss({k: p[k] - 0.1 * inner[k] for k in p}, s["bx"], s["by"]))
        return autograd(sum(losses) / len(losses), p)

    def tasks(p: Tree, b: Tree) -> Any:
        """MAML over a batch of tasks: fdp.grad of a mean of vmap of grad."""

        def task(p: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            inner = grad(task_loss)(p, x[None], y[None])
            return task_loss({k: p[k] - 0.1 * inner[k] for k in p}, x[None] + 1, y[None])

        return fdp.grad(lambda p: vmap(task, (None, 0, 0))(p, b["ax"], b["ay"]).mean())(p)

    def tasks_by_hand(p: Tree, shards: list[Tree]) -> Any:
        p, losses = leaves(p), []
        for x, y in ((x[None], y[None]) for s in shards for x, y in zip(s["ax"], s["ay"], strict=True)):
            inner = autograd(task_loss(p, x, y), p, create_graph=True)
            losses.append(task_loss({k: p[k] - 0.1 * inner[k] for k in p}, x + 1, y))
        return autograd(sum(losses) / len(losses), p)

    def functionalized(p: Tree, b: Tree) -> Any:
        def loss(p: Tree) -> torch.Tensor:
            hidden = b["ax"] @ p["w1"]
            hidden.add_(p["b1"])
            return F.mse_loss((hidden.tanh_() @ p["w2"]).squeeze(-1), b["ay"])

        return fdp.pmean(grad(torch.func.functionalize(loss))(p))

    def plain(p: Tree, shards: list[Tree]) -> Any:
        p = leaves(p)
        return autograd(sum(task_loss(p, s["ax"], s["ay"]) for s in shards) / len(shards), p)

    def outer(p: Tree, b: Tree) -> Any:
        """torch.func.grad of a function that has fdp.value_and_grad and a collective in it."""

        def fn(p: Tree) -> torch.Tensor:
            loss, slopes = fdp.value_and_grad(task_loss)(p, b["ax"], b["ay"])
            return loss + sum((s**2).sum() for s in slopes.values())

        return fdp.pmean(grad(fn)(p))

    def outer_by_hand(p: Tree, shards: list[Tree]) -> Any:
        p = leaves(p)
        loss = sum(task_loss(p, s["ax"], s["ay"]) for s in shards) / len(shards)
        slopes = autograd(loss, p, create_graph=True)
        return autograd(loss + sum((s**2).sum() for s in slopes.values()), p)

    def penalty(p: Tree, b: Tree) -> Any:
        def loss(p: Tree) -> torch.Tensor:
            slope = vmap(grad(lambda x: net(p, x).sum()))(b["ax"])
            return ((slope.norm(dim=1) - 1) ** 2).mean()

        return fdp.grad(loss)(p)

    def penalty_by_hand(p: Tree, shards: list[Tree]) -> Any:
        p, x = leaves(p), torch.cat([s["ax"] for s in shards]).requires_grad_()
        (slope,) = torch.autograd.grad(net(p, x).sum(), x, create_graph=True)
        return autograd(((slope.norm(dim=1) - 1) ** 2).mean(), p)

    return {
        "MAML, first order": (first_order, first_order_by_hand),
        "MAML over tasks": (tasks, tasks_by_hand),
        "functionalize": (functionalized, plain),
        "torch.func.grad of fdp.value_and_grad": (outer, outer_by_hand),
        "gradient penalty by vmap": (penalty, penalty_by_hand),
    }


REPEATS = {
    "jacfwd of pmean squared", "jacrev, averaged", "jacrev in pieces", "jacfwd of psum", "jacfwd of broadcast",
    "jacfwd of all_gather", "linearize", "hessian product, reverse twice", "hessian product, reverse over forward",
    "hessian product, fdp.grad of jvp", "hessian product, jvp of fdp.grad", "hessian", "jacfwd of fdp.grad",
    "jacrev of fdp.grad", "jvp of fdp.value_and_grad", "vmap of fdp.grad in pieces",
    "vmap of all_gather", "per-sample gradients, clipped, and noise", "MAML, first order", "MAML over tasks",
    "gradient penalty by vmap",
}  # fmt: skip
"""Cases that others are much like."""
GROUPS = {"jacobians": jacobian_cases, "products": product_cases, "vmap": vmap_cases, "nested": nested_cases}


def all_of(group: str) -> dict[str, str]:
    """Every case of a group; the name of each that is wrong, with why."""
    wrong = {}
    for name, (step, oracle) in GROUPS[group]().items():
        if name in REPEATS and not ALL_SAMPLES:
            continue
        try:
            compare(step, oracle, None if group == "nested" else W)
        except Exception as error:  # the other cases are to be heard of as well
            wrong[name] = f"{type(error).__name__}: {error}"
    return wrong


@pytest.mark.parametrize("group", list(GROUPS))
def test_transforms_inside_of_a_step(group: str) -> None:
    for wrong in ranks.run(2, all_of, group):
        assert not wrong, "\n\n".join(f"{name}: {why}" for name, why in wrong.items())
