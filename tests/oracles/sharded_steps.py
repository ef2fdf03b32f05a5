"""Training steps of many kinds, whose state is sharded in several ways, beside the same steps on whole state.

What a step computes does not depend on where its state lies. On two ranks a sum of two numbers has one result, so that
sharded and whole state are the same to the bit, but for what reductions over parts round, and for kernels that round
the last elements of a row (those beyond a whole vector) in another way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from samples import ALL_SAMPLES
from torch import Tensor

import fdp
from fdp import optim, pytree

State = dict[str, Any]
Made = tuple[Callable[[State, Tensor], tuple[State, Any]], State]


_DEVICE = "cpu"
"""Where state and batches are; `all_differences` sets it."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 2).to(_DEVICE)


def params() -> dict[str, Tensor]:
    return {"first": numbers(8, 48, seed=1), "bias": numbers(48, seed=2), "second": numbers(48, 24, seed=3)}


def forward(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["first"] + p["bias"]) @ p["second"]


def loss(p: Any, x: Tensor) -> Tensor:
    return (forward(p, x) ** 2).mean() + 0.01 * (p["second"] ** 2).mean()


def with_optimizer(optimizer: optim.Optimizer) -> Made:
    def step(state: State, x: Tensor) -> tuple[State, Any]:
        value, grads = fdp.value_and_grad(loss)(state["params"], x)
        new, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": new, "opt": opt}, fdp.pmean(value)

    start = params()
    return step, {"params": start, "opt": optimizer.init(start)}


def of_matrices() -> Made:
    """Muon needs whole matrices: of three alike, two ranks compute one each, and both the third."""
    optimizer = optim.from_torch(torch.optim.Muon, lr=1e-2)

    def step(state: State, x: Tensor) -> tuple[State, Any]:
        def value_of(p: Any) -> Tensor:
            h = x
            for w in p.values():
                h = torch.tanh(h @ w)
            return h.square().mean()

        value, grads = fdp.value_and_grad(value_of)(state["params"])
        new, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": new, "opt": opt}, fdp.pmean(value)

    shapes = {"in": (8, 24), "one": (24, 24), "two": (24, 24), "three": (24, 24)}
    start = {name: numbers(*shape, seed=20 + at) for at, (name, shape) in enumerate(shapes.items())}
    return step, {"params": start, "opt": optimizer.init(start)}


def by_hand() -> Made:
    def step(state: State, x: Tensor) -> tuple[State, Any]:
        grads = fdp.grad(loss)(state["params"], x)
        moved = pytree.map_leaves(lambda m, g: 0.9 * m + g, state["m"], grads)
        new = pytree.map_leaves(lambda p, m: p - 0.1 * m - 0.001 * p.sign(), state["params"], moved)
        ema = pytree.map_leaves(lambda e, p: torch.lerp(e, p, 0.1), state["ema"], new)
        norm = sum((g**2).sum() for g in pytree.leaves_of(grads)) ** 0.5
        return {"params": new, "m": moved, "ema": ema}, {"norm": norm, "largest": new["first"].amax()}

    start = params()
    return step, {"params": start, "m": pytree.map_leaves(torch.zeros_like, start), "ema": start}


def in_place() -> Made:
    def step(state: State, x: Tensor) -> tuple[State, Any]:
        grads = fdp.grad(loss)({key: value.detach() for key, value in state["params"].items()}, x)
        for key, value in state["params"].items():
            state["m"][key].mul_(0.9).add_(grads[key])
            value.sub_(0.1 * state["m"][key])
        return state, state["params"]["first"].mean()

    start = params()
    return step, {"params": start, "m": pytree.map_leaves(torch.zeros_like, start)}


def accumulated() -> Made:
    optimizer = optim.from_torch(torch.optim.AdamW, lr=1e-2)

    def step(state: State, x: Tensor) -> tuple[State, Any]:
        value, grads = fdp.accumulate(fdp.value_and_grad(loss), microbatches=2)(state["params"], x)
        new, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": new, "opt": opt}, fdp.pmean(value)

    start = params()
    return step, {"params": start, "opt": optimizer.init(start)}


def checkpointed() -> Made:
    def recomputed(p: Any, x: Tensor) -> Tensor:
        y = torch.utils.checkpoint.checkpoint(lambda a, w: torch.tanh(a @ w), x, p["first"], use_reentrant=False)
        return ((y + p["bias"]) @ p["second"]).square().mean()

    def step(state: State, x: Tensor) -> tuple[State, Any]:
        value, grads = fdp.value_and_grad(recomputed)(state["params"], x)
        return {"params": pytree.map_leaves(lambda p, g: p - 0.1 * g, state["params"], grads)}, fdp.pmean(value)

    return step, {"params": params()}


def views_and_readers() -> Made:
    """State that is read through views, stacked, taken apart, put together, and written through a view."""

    def step(state: State, x: Tensor) -> tuple[State, Any]:
        w, v, table = state["w"], state["v"], state["table"].clone()
        rows = w[2:6].t() @ w[2:6]
        both = torch.stack([w, v]).sum(0)
        table[0:2].add_(w[0:2])
        flat = torch.cat([w.reshape(-1), v.flatten()])
        new = w + 0.1 * torch.where(w > 0, both, v.t().t())
        seen = {"rows": rows, "flat": flat.cumsum(0)[-1], "any": (w > 1).any(), "all": (new < 99).all(), "max": w.max()}
        return {"w": new, "v": v * 0.5 + w.mean(), "table": table}, {**seen, "x": fdp.pmean(x.mean())}

    return step, {"w": numbers(12, 24, seed=4), "v": numbers(12, 24, seed=5), "table": numbers(24, 24, seed=6)}


def along_dimensions() -> Made:
    """Reductions along some dimensions of what lies in parts: along the divided one, and along others."""

    def step(state: State, x: Tensor) -> tuple[State, Any]:
        w, box, count = state["w"], state["box"] * 2, state["count"]
        rows, columns = w.square().mean(1, keepdim=True), w.square().mean(0)
        rows.add_(1.0)
        scale = torch.mm(rows, columns.view(1, -1)).rsqrt_()
        seen = {
            "sum": box.square().sum((0, 2)), "mean": box.abs().mean([-2]), "norm": box.norm(dim=(0, 1)),
            "largest": box.amax(0), "least": box.amin((1, 2), keepdim=True), "inf": box.norm(torch.inf, dim=-1),
            "one": box.norm(1, dim=0), "three": box.norm(3, dim=(0, 2)), "any": (count > 3).any(0),
            "half": w.bfloat16().sum(0), "all": (count < 3).all(1), "count": count.sum(0),
            "counted": count.sum(1, dtype=torch.int32), "max": box.max(0)[0], "x": fdp.pmean(x.mean()),
        }  # fmt: skip
        return {"w": w - 0.1 * w * scale, "box": (box - box.mean(0)) / 2, "count": count + 1}, seen

    counts = torch.arange(12 * 24, device=_DEVICE).view(12, 24) % 7
    return step, {"w": numbers(12, 24, seed=11), "box": numbers(12, 24, 6, seed=12), "count": counts}


def of_other_dtypes() -> Made:
    """Copies in sixteen bits, integers and flags beside parameters."""

    def step(state: State, x: Tensor) -> tuple[State, Any]:
        half = pytree.map_leaves(lambda p: p.bfloat16(), state["params"])
        grads = fdp.grad(lambda p: loss(p, x.bfloat16()).float())(half)
        new = pytree.map_leaves(lambda p, g: p - 0.1 * g.float(), state["params"], grads)
        count = state["count"] + state["flags"].to(torch.int64) + 1
        return {"params": new, "count": count, "flags": state["flags"] ^ (count > 2)}, count.sum()

    start = params()
    zeros = torch.zeros(8, 48, dtype=torch.int64, device=_DEVICE)
    return step, {"params": start, "count": zeros, "flags": zeros.bool()}


def convolution() -> Made:
    def step(state: State, x: Tensor) -> tuple[State, Any]:
        image = x.reshape(-1, 2, 2, 2).repeat(1, 6, 4, 4)

        def value_of(p: Any) -> Tensor:
            y = torch.nn.functional.conv2d(image, p["kernel"], padding=1)
            y = torch.nn.functional.batch_norm(y, None, None, p["scale"], p["shift"], training=True)
            return (torch.relu(y).mean((2, 3)) ** 2).mean()

        value, grads = fdp.value_and_grad(value_of)(state)
        return pytree.map_leaves(lambda p, g: p - 0.1 * g, state, grads), fdp.pmean(value)

    scale, shift = torch.ones(24, device=_DEVICE), torch.zeros(24, device=_DEVICE)
    return step, {"kernel": numbers(24, 12, 3, 3, seed=7), "scale": scale, "shift": shift}


def frozen_and_tied() -> Made:
    def step(state: State, x: Tensor) -> tuple[State, Any]:
        def value_of(trained: Tensor) -> Tensor:
            return (torch.tanh(x @ trained) @ trained.t() + x @ state["frozen"]).square().mean()

        value, grad = fdp.value_and_grad(value_of)(state["tied"])
        return {"tied": state["tied"] - 0.1 * grad, "frozen": state["frozen"]}, fdp.pmean(value)

    return step, {"tied": numbers(8, 24, seed=8), "frozen": numbers(8, 8, seed=9)}


def batch_norm() -> Made:
    torch.manual_seed(0)
    # A bias before the normalisation would have a gradient of rounding alone, of which AdamW makes whole steps.
    first = torch.nn.Linear(8, 24, bias=False)
    module = torch.nn.Sequential(first, torch.nn.BatchNorm1d(24), torch.nn.Linear(24, 12))
    apply, start, buffers = fdp.from_module(module.to(_DEVICE))
    optimizer = optim.from_torch(torch.optim.AdamW, lr=1e-2)

    def step(state: State, x: Tensor) -> tuple[State, Any]:
        def value_of(p: Any) -> Any:
            out, new = apply(p, state["buffers"], x)
            return out.square().mean(), new

        (value, new), grads = fdp.value_and_grad(value_of, has_aux=True)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        averaged = {key: fdp.pmean(x) if x.is_floating_point() else x for key, x in new.items()}
        return {"params": params, "opt": opt, "buffers": averaged}, fdp.pmean(value)

    return step, {"params": start, "opt": optimizer.init(start), "buffers": buffers}


def drawn_by_keys() -> Made:
    def step(state: State, x: Tensor) -> tuple[State, Any]:
        now, later = fdp.random.split(state["key"])
        kept = fdp.random.uniform(now, (8, 24)) < 0.5
        grad = fdp.grad(lambda w: (x @ (w * kept)).square().mean())(state["w"])
        return {"w": state["w"] - 0.1 * grad, "key": later}, kept.sum()

    return step, {"w": numbers(8, 24, seed=10), "key": fdp.random.key(3).to(_DEVICE)}


def of_torch(cls: type[torch.optim.Optimizer], **options: Any) -> Callable[[], Made]:
    return lambda: with_optimizer(optim.from_torch(cls, lr=1e-2, **options))


def around_adamw(wrap: Callable[..., optim.Optimizer], *options: Any) -> Callable[[], Made]:
    return lambda: with_optimizer(wrap(optim.from_torch(torch.optim.AdamW, lr=1e-2), *options))


STEPS: dict[str, Callable[[], Made]] = {
    "SGD": of_torch(torch.optim.SGD, momentum=0.9),
    "Adam": of_torch(torch.optim.Adam),
    "AdamW, foreach": of_torch(torch.optim.AdamW, foreach=True, capturable=True),
    "AdamW, single": of_torch(torch.optim.AdamW, fused=False),
    "RMSprop": of_torch(torch.optim.RMSprop),
    "Adagrad": of_torch(torch.optim.Adagrad),
    "Adafactor": of_torch(torch.optim.Adafactor),
    "Muon": of_matrices,
    "clipped": around_adamw(optim.clipped, 0.05),
    "averaged": around_adamw(optim.averaged, 0.9),
    "by hand": by_hand,
    "in place": in_place,
    "accumulated": accumulated,
    "checkpointed": checkpointed,
    "views and readers": views_and_readers,
    "along dimensions": along_dimensions,
    "of other dtypes": of_other_dtypes,
    "convolution": convolution,
    "frozen and tied": frozen_and_tied,
    "batch norm": batch_norm,
    "drawn by keys": drawn_by_keys,
}
ALIKE = {"SGD", "Adam", "AdamW, foreach", "AdamW, single", "Muon", "accumulated", "frozen and tied"}
"""No numbers are made of parts, and no products are added in place: on two ranks the same bits as with whole state."""


def ways_to_shard(start: State, mesh: Any = None) -> Iterator[tuple[str, State]]:
    """Names of ways, and a state of its own in each."""
    yield "all", fdp.shard(fdp.replicate(start), min_size=2, group=mesh)
    first = next(iter(start))
    kept = {key for key in start if key in ("params", "w", "tied", "kernel")}
    for way, chosen in (("all but parameters", set(start) - kept), ("one entry", {first})):
        state = fdp.replicate(start)
        yield (
            way,
            {key: fdp.shard(value, min_size=2, group=mesh) if key in chosen else value for key, value in state.items()},
        )


def differences(
    name: str, compile: bool = False, donate: bool = True, calls: int = 4, mesh: Any = None, **options: Any
) -> list[str]:
    """What is different with sharded state on a real rank; nothing if all is well.

    With a mesh, sharded state is on it, and whole state is not.
    """
    rank, size, found = int(fdp.axis_index()), fdp.axis_size(), []
    step, start = STEPS[name]()
    batches = [numbers(4, 8, seed=100 * call + rank) for call in range(calls)]
    donated = 0 if donate or name == "in place" else ()
    whole_step = fdp.data_parallel(step, donate_argnums=donated, compile=compile, **options)
    whole, results = fdp.replicate(start), []
    for batch in batches:
        whole, result = whole_step(whole, batch)
        results.append(pytree.map_leaves(torch.clone, (whole, result)))
    # Each way to shard is a program of its own, which takes longest: by default one kind of step tries them all.
    all_ways = ALL_SAMPLES or (name == "by hand" and not compile and mesh is None)
    for way, state in itertools.islice(ways_to_shard(start, mesh), None if all_ways else 1):
        sharded_step = fdp.data_parallel(step, donate_argnums=donated, compile=compile, group=mesh, **options)
        structure, kinds = pytree.structure_of(state), list(map(type, pytree.leaves_of(state)))
        for call, batch in enumerate(batches):
            state, result = sharded_step(state, batch)
            if pytree.structure_of(state) != structure or list(map(type, pytree.leaves_of(state))) != kinds:
                found.append(f"{name}, {way}, call {call}: another structure, {state}")
            mine = (fdp.unshard(state), result)
            leaves = zip(pytree.leaf_names(mine, ""), *map(pytree.leaves_of, (mine, results[call])), strict=True)
            exact = size == 2 and not compile and name in ALIKE
            for path, one, two in leaves:
                if not _close(one, two, exact, name):
                    largest = float((one.double() - two.double()).abs().max())
                    found.append(f"{name}, {way}, call {call}: {path} differs by {largest:.3g}")
        if sharded_step.traces != 1:
            found.append(f"{name}, {way}: {sharded_step.traces} traces")
    return found


def _close(one: Tensor, two: Tensor, exact: bool, name: str) -> bool:
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    if exact or not one.is_floating_point():
        return torch.equal(one, two)
    slack = 2e-3 if name == "of other dtypes" else 1e-6  # gradients of eight bits
    if one.dtype == torch.bfloat16:
        return bool(torch.allclose(one, two, 2e-2, 2e-2))
    return bool(torch.allclose(one, two, rtol=1e-5, atol=slack))


def all_differences(names: list[str], compile: bool = False, device: str = "cpu") -> list[str]:
    """Of several steps, whose state is on a device."""
    global _DEVICE
    _DEVICE = device
    try:
        return [line for name in names for line in differences(name, compile)]
    finally:
        _DEVICE = "cpu"
