"""Mixed precision: a loss scale against `torch.amp.GradScaler`, autocast, and master weights, on two ranks too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import optree
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples import ALL_SAMPLES, exhaustive
from torch import Tensor
from torch.optim import lr_scheduler as lrs

import fdp
from fdp.errors import ArgumentError
from fdp.optim import (
    Optimizer,
    averaged,
    clipped,
    from_torch,
    loss_scaled,
    partition,
    schedule_from_torch,
    scheduled,
    skip_nonfinite,
)

Tree = dict[str, Any]


def same_bits(a: Any, b: Any) -> bool:
    a, b = optree.tree_leaves(a), optree.tree_leaves(b)
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


# Factors that float32 cannot hold, and a scale for which it matters where their product is rounded.
SCALING = {"init_scale": 1001.0, "growth_factor": 2.1, "backoff_factor": 0.3, "growth_interval": 3}
OVERFLOWS = (False, False, True, False, False, False, False, True, True, False, False, False, False)


def gradients(overflow: bool, k: int) -> Tree:
    grads: Tree = {
        "w": torch.randn(3, 4),
        "double": torch.randn(2, dtype=torch.float64),
        "narrow": torch.randn(()).bfloat16(),
        "empty": torch.zeros(0),
    }
    if overflow:
        bad = (math.inf, -math.inf, math.nan)[k % 3]
        grads["double" if k % 2 else "w"].view(-1)[1] = bad
    return grads


@pytest.mark.parametrize("donate", [pytest.param(False, marks=exhaustive), True])
def test_scale_and_skips_are_those_of_grad_scaler(donate: bool) -> None:
    optimizer = loss_scaled(from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, fused=False), **SCALING)
    params = {name: torch.randn_like(g) for name, g in gradients(False, 0).items()}
    hand = {name: p.clone() for name, p in params.items()}
    reference = torch.optim.SGD(list(hand.values()), lr=0.1, momentum=0.9, foreach=False)
    scaler = torch.amp.GradScaler("cpu", **SCALING)
    scaler.scale(torch.zeros(()))  # makes its state

    @fdp.data_parallel(donate_argnums=0 if donate else (), batch_argnums=1)
    def step(state: Tree, grads: Tree) -> Tree:
        new, opt = optimizer.update(fdp.pmean(grads), state["opt"], state["params"])
        return {"params": new, "opt": opt}

    state: Tree = {"params": params, "opt": optimizer.init(params)}
    skipped = grown = 0
    for k, overflow in enumerate(OVERFLOWS):
        grads = gradients(overflow, k)
        scale = scaler.get_scale()
        assert state["opt"]["scale"].item() == scale
        for name, p in hand.items():
            p.grad = grads[name].clone()
        before = optree.tree_map(torch.clone, state)
        scaler.step(reference)
        scaler.update()
        state = step(state, grads)
        assert same_bits(state["params"], hand)
        opt = state["opt"]
        assert opt["scale"].item() == scaler.get_scale()
        assert opt["growth_tracker"].item() == scaler._get_growth_tracker()
        if overflow:
            skipped += 1
            own = {"scale": None, "growth_tracker": None}
            assert same_bits({**state, "opt": {**opt, **own}}, {**before, "opt": {**before["opt"], **own}})
        grown += opt["scale"].item() > scale
    assert skipped == 3 and grown == 2


def test_a_scale_does_not_grow_beyond_what_float32_holds() -> None:
    optimizer = loss_scaled(from_torch(torch.optim.SGD), init_scale=2.0**127, growth_interval=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1)
    scaler.scale(torch.zeros(()))
    w = torch.ones(2)
    reference = torch.optim.SGD([w.clone()])
    opt_state = optimizer.init(w)
    for _ in range(2):
        reference.param_groups[0]["params"][0].grad = torch.ones(2)
        scaler.step(reference)
        scaler.update()
        w, opt_state = optimizer.update(torch.ones(2), opt_state, w)
        assert opt_state["scale"].item() == scaler.get_scale() == 2.0**127
        assert opt_state["growth_tracker"].item() == scaler._get_growth_tracker() == 0


def test_no_gradients_and_complex_ones() -> None:
    optimizer = loss_scaled(from_torch(torch.optim.SGD, lr=1.0), init_scale=2.0, growth_interval=1)
    params: Tree = {"z": torch.zeros(2, dtype=torch.complex64), "frozen": torch.ones(3), "none": None}
    grads: Tree = {"z": torch.tensor([2 + 4j, 3e38 + 3e38j]), "frozen": None, "none": None}
    new, opt_state = optimizer.update(grads, optimizer.init(params), params)
    # Finite, though its absolute value is not.
    assert new["z"].tolist() == (-grads["z"] / 2).tolist() and opt_state["scale"].item() == 4
    grads["z"] = torch.tensor([0j, complex(0, math.nan)])
    new, opt_state = optimizer.update(grads, opt_state, params)
    assert same_bits(new, params) and opt_state["scale"].item() == 2
    nothing = dict.fromkeys(params)
    new, opt_state = optimizer.update(nothing, opt_state, params)
    assert same_bits(new, params) and opt_state["scale"].item() == 4


def test_a_skipped_update_does_not_count_inside_and_does_around() -> None:
    schedule = schedule_from_torch(lambda opt: lrs.ExponentialLR(opt, 0.5), lr=1.0, steps=9)
    sgd = from_torch(torch.optim.SGD)
    inside = loss_scaled(averaged(scheduled(sgd, schedule), 0.5), init_scale=1.0)
    around = scheduled(averaged(loss_scaled(sgd, init_scale=1.0), 0.5), schedule)
    results = []
    for optimizer in (inside, around):
        w = torch.zeros(())
        opt_state = optimizer.init(w)
        for grad in (-1.0, math.inf, -1.0):
            scale = opt_state["scale"].item()
            w, opt_state = optimizer.update(torch.tensor(grad * scale), opt_state, w)
        results.append((w.item(), opt_state["average"].item(), opt_state["count"].item(), opt_state["lr"].item()))
    # By hand: 1, skip, +1/2; and 1, skip, +1/4, where the average moves to 1 once more.
    assert results == [(1.5, 1.25, 2, 0.5), (1.25, 1.125, 3, 0.25)]


def net(params: Tree, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(x, params["w1"], params["b1"])), params["w2"])


def net_params() -> Tree:
    g = torch.Generator().manual_seed(3)
    return {name: torch.randn(s, generator=g) / 2 for name, s in {"w1": (8, 4), "b1": (8,), "w2": (3, 8)}.items()}


def batch_of(rank: int, k: int) -> Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * k + rank))
    return x * 1000 if rank == 1 and k in (2, 5) else x  # too much for float16, on one rank only


def autocast_loss(params: Tree, x: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", dtype=dtype):
        return net(params, x).square().sum()


def cast_loss(params: Tree, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Master weights in float32; everything else in a narrow dtype."""
    return net({name: p.to(dtype) for name, p in params.items()}, x.to(dtype)).square().sum().float()


class Torch:
    """What a script does in each process: plain autograd on all shards, clipping, GradScaler, a scheduler."""

    def __init__(self, full: bool, loss: Any, dtype: torch.dtype) -> None:
        self.full, self.loss, self.dtype = full, loss, dtype
        self.params = {name: p.requires_grad_() for name, p in net_params().items()}
        groups = [
            {"params": [self.params["w1"], self.params["w2"]], "weight_decay": 0.5 if full else 0.01},
            {"params": [self.params["b1"]], "weight_decay": 0.01},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
        self.scheduler = lrs.ExponentialLR(self.optimizer, 0.7)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)

    def step(self, k: int, all_ranks: Sequence[int]) -> bool:
        shards = []
        for rank in all_ranks:
            loss = self.scaler.scale(self.loss(self.params, batch_of(rank, k), self.dtype))
            shards.append(torch.autograd.grad(loss, list(self.params.values())))
        for p, *gs in zip(self.params.values(), *shards, strict=True):
            p.grad = sum(gs) / len(all_ranks)
        self.scaler.unscale_(self.optimizer)
        skip = any(not p.grad.isfinite().all() for p in self.params.values())
        by_name = [self.params[name] for name in sorted(self.params)]
        if self.full:
            torch.nn.utils.clip_grad_norm_(by_name, 0.5)
        if not skip:  # not scaler.step(), whose contract with fused kernels passes on what is skipped
            self.optimizer.step()
            if self.full:
                self.scheduler.step()
        self.scaler.update()
        return skip


def train(full: bool, loss: Any, dtype: torch.dtype, donate: bool, compiled: bool = False, steps: int = 7) -> int:
    """One rank's side; returns how many updates were skipped."""
    # One process by itself gets the data that overflow.
    all_ranks, rank = (range(dist.get_world_size()), dist.get_rank()) if dist.is_initialized() else ([1], 1)
    reference = Torch(full, loss, dtype)
    inner: Optimizer = from_torch(torch.optim.AdamW, lr=0.01)
    if full:
        schedule = schedule_from_torch(lambda opt: lrs.ExponentialLR(opt, 0.7), 0.01, steps)
        decay = from_torch(torch.optim.AdamW, lr=0.01, weight_decay=0.5)
        parts = {"decay": scheduled(decay, schedule), "rest": scheduled(inner, schedule)}
        inner = clipped(partition(lambda path, leaf: "decay" if leaf.ndim == 2 else "rest", parts), 0.5)
    optimizer = loss_scaled(inner, init_scale=2.0**12, growth_interval=2)

    @fdp.data_parallel(donate_argnums=0 if donate else (), compile=compiled)
    def step(state: Tree, batch: Tensor) -> Any:
        def loss_fn(params: Tree) -> Tensor:
            return loss(params, batch, dtype) * state["opt"]["scale"]

        grads = fdp.grad(loss_fn)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}

    params = {name: p.requires_grad_() for name, p in net_params().items()}
    state = {"params": params, "opt": optimizer.init(params)}
    skipped = 0
    for k in range(steps):
        skipped += reference.step(k, all_ranks)
        state = step(state, batch_of(rank, k))
        expected = {name: p.detach() for name, p in reference.params.items()}
        if compiled:  # fused loops keep in float32 what was rounded to a narrow dtype between operators
            torch.testing.assert_close(state["params"], expected, rtol=0.1, atol=0.02)
        else:
            assert same_bits(state["params"], expected), f"step {k}"
        assert state["opt"]["scale"].item() == reference.scaler.get_scale(), f"step {k}"
    return skipped


def train_in_all_ways() -> list[int]:
    ways = [
        (True, autocast_loss, torch.float16, True),
        (False, cast_loss, torch.bfloat16, True),
        (False, cast_loss, torch.float16, False),
        (True, autocast_loss, torch.bfloat16, False),
    ]
    return [train(*way) for way in (ways if ALL_SAMPLES else ways[:2])]


def test_two_ranks_skip_alike_when_one_overflows() -> None:
    # bfloat16 has the range of float32, so nothing is skipped.
    skipped = [2, 0, 2, 0] if ALL_SAMPLES else [2, 0]
    assert ranks.run(2, train_in_all_ways) == [skipped] * 2


@exhaustive
def test_compiled() -> None:
    assert train(True, autocast_loss, torch.float16, True, compiled=True, steps=3) == 1


def test_gradients_of_master_weights_are_float32() -> None:
    params = net_params()
    x = torch.randn(6, 4)
    for loss in (autocast_loss, cast_loss):
        grads = fdp.grad(lambda p, loss=loss: loss(p, x, torch.bfloat16))(params)
        assert {g.dtype for g in grads.values()} == {torch.float32}
        assert loss(params, x, torch.bfloat16) != net(params, x).square().sum()


def test_refusals_of_loss_scaled() -> None:
    sgd = from_torch(torch.optim.SGD)
    for name, bad in (
        ("init_scale", 0.0),
        ("init_scale", math.inf),
        ("init_scale", 1e39),
        ("growth_factor", 1.0),
        ("backoff_factor", 1.0),
        ("backoff_factor", torch.tensor(0.5)),
        ("growth_interval", 0),
        ("growth_interval", 2.0),
    ):
        with pytest.raises(ArgumentError, match=f"loss_scaled takes {name} as"):
            loss_scaled(sgd, **{name: bad})
    with pytest.raises(ArgumentError, match="loss_scaled wraps an Optimizer, not the class"):
        loss_scaled(torch.optim.SGD)  # type: ignore[arg-type]
    optimizer = loss_scaled(sgd)
    half = {"a": torch.ones(2), "b": torch.ones(2).half(), "c": torch.ones(()).half()}
    with pytest.raises(ArgumentError) as caught:
        optimizer.update(half, optimizer.init(half), half)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("loss_scaled takes no gradients in float16") and lines[-1].startswith("Remedy: keep the")
    assert [line.split(" is ")[0] for line in lines[1:-1]] == ["  grads['b']", "  grads['c']"]
    w = torch.ones(2)
    with pytest.raises(ArgumentError, match=r"must have the keys \['growth_tracker', 'scale'\] beside"):
        optimizer.update(w, sgd.init(w), w)
    for bad in (65536.0, torch.ones(()).double(), torch.ones(1)):
        with pytest.raises(ArgumentError, match=r"opt_state\['scale'\] must be a 0-dim torch.float32 tensor, but"):
            optimizer.update(w, {**optimizer.init(w), "scale": bad}, w)
    assert repr(optimizer) == f"loss_scaled({sgd!r}, init_scale=65536)"


def test_what_cannot_be_skipped_is_refused() -> None:
    w = torch.ones(2)
    counts = Optimizer(lambda p: {"n": 0}, lambda g, s, p: (p, {"n": s["n"] + 1}))
    grows = Optimizer(lambda p: {"seen": []}, lambda g, s, p: (p, {"seen": [*s["seen"], g]}))
    widens = Optimizer(lambda p: {}, lambda g, s, p: ((p - g).double(), s))
    for inner, message in (
        (counts, r"changed what cannot be chosen by a tensor:\n  opt_state\['n'\] was the int 0, and is the int 1\n"),
        (grows, r"made of opt_state, PyTreeSpec(.|\n)*a tree of another structure"),
        (widens, r"params was a torch.float32 tensor of shape \(2,\) on cpu, and is a torch.float64"),
    ):
        for optimizer in (loss_scaled(inner), skip_nonfinite(inner)):
            with pytest.raises(ArgumentError, match=message):
                optimizer.update(w, optimizer.init(w), w)


@pytest.mark.parametrize("donate", [False, True])
def test_skipping_without_a_scale(donate: bool) -> None:
    inner = clipped(from_torch(torch.optim.Adam, lr=0.1), 0.5)
    optimizer = skip_nonfinite(inner)

    @fdp.data_parallel(donate_argnums=0 if donate else (), batch_argnums=1)
    def step(state: Tree, grads: Tree) -> Tree:
        new, opt = optimizer.update(fdp.pmean(grads), state["opt"], state["params"])
        return {"params": new, "opt": opt}

    params = {name: torch.randn_like(g) for name, g in gradients(False, 0).items()}
    expected = (params, inner.init(params))
    state: Tree = {"params": optree.tree_map(torch.clone, params), "opt": optimizer.init(params)}
    for k, bad in enumerate(OVERFLOWS[:6]):
        grads = gradients(bad, k)
        state = step(state, grads)
        if not bad:
            expected = inner.update(grads, expected[1], expected[0])
        assert same_bits(state["params"], expected[0])
        assert same_bits({k: v for k, v in state["opt"].items() if k != "skipped"}, expected[1])
    assert state["opt"]["skipped"].item() == 1
    with pytest.raises(ArgumentError, match="skip_nonfinite takes dense tensors of floating point numbers"):
        optimizer.update({"n": torch.tensor(1)}, optimizer.init({}), {"n": torch.tensor(1)})
    assert repr(optimizer) == f"skip_nonfinite({inner!r})"
