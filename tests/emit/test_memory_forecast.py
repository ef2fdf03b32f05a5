"""What a plan is predicted to hold in memory, beside what the allocator hands out while it runs."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import ranks
import torch
import torch.nn.functional as F
from samples import ALL_SAMPLES, exhaustive, some
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fdp


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).movedim(-3, 0).transpose(-2, -3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2))
        return x + self.narrow(F.gelu(self.wide(x)))


def transformer() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Embedding(512, 64), Block(64), Block(64), nn.Linear(64, 512)), torch.arange(96).view(3, 32)


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(5 if ALL_SAMPLES else 2) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(nn.Embedding(512, 256), *layers, nn.Linear(256, 512)), torch.arange(64).view(64, 1)


def handed_out_bytes(run: Any) -> int:
    """The most that the allocator has handed out at once while something runs, beyond what it had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def predicted_and_measured(make: Any, shards: str, donate: bool, limit_mb: float | None) -> tuple[int, int, int]:
    torch.manual_seed(0)
    module, ids = make()
    apply, params, buffers = fdp.from_module(module)
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-3)

    def train(state: Any, ids: torch.Tensor) -> Any:
        def loss(p: Any) -> torch.Tensor:
            return F.cross_entropy(apply(p, buffers, ids)[0].flatten(0, 1), ids.flatten())

        value, grads = fdp.value_and_grad(loss)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, fdp.pmean(value)

    if shards == "all":
        params = fdp.shard(params)
    params = {key: leaf.detach().clone() for key, leaf in params.items()}
    opt = optimizer.init(params)
    state = {"params": params, "opt": fdp.shard(opt) if shards == "opt" else opt}
    step = fdp.data_parallel(train, donate_argnums=0 if donate else (), bucket_cap_mb=0.5, memory_limit_mb=limit_mb)
    kept: list[Any] = [state]

    def call() -> None:
        kept[:] = step(kept[0], ids)

    for _ in range(2):
        call()
    plan = step.plan(kept[0], ids)
    (found,) = plan.memory().devices
    block = dict(plan.emit().memory.size_bytes)["cpu"]
    assert found.block_bytes == block
    leaves = [leaf.to_local() if hasattr(leaf, "to_local") else leaf for leaf in fdp.pytree.leaves_of(kept[0])]
    held = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    assert found.state_bytes == held and found.batch_bytes == ids.numel() * 8
    return found.peak_bytes, held + found.batch_bytes + block + handed_out_bytes(call), block


def both(make: Any, world: int, *rest: Any) -> tuple[int, int, int]:
    found: tuple[int, int, int] = ranks.run(world, predicted_and_measured, make, *rest)[0]
    return found


@exhaustive  # of one step the test below compares the same
@pytest.mark.parametrize("make", [transformer, perceptron])
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("shards", ["none", "opt", "all"])
def test_the_prediction_is_within_a_twentieth_of_what_is_handed_out(make: Any, donate: bool, shards: str) -> None:
    predicted, measured, _ = both(make, 2, shards, donate, None)
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("make", some([perceptron, transformer]))
def test_it_is_where_values_are_gathered_again(make: Any) -> None:
    once, _, block = both(make, 2, "all", True, None)
    predicted, measured, smaller = both(make, 2, "all", True, once / 2**20 - 0.01)
    assert predicted == pytest.approx(measured, rel=0.05)
    assert smaller < block and predicted < once


def gathered_into_state() -> tuple[int, int]:
    """Momentum in parts, and new parameters that arrive in the old ones."""

    def train(state: Any, x: torch.Tensor) -> Any:
        momentum = state["m"] * 0.9 + fdp.pmean(state["w"] * x.sum())
        return {"w": state["w"] - momentum, "m": momentum}

    def start() -> Any:
        return {"w": torch.ones(512, 512), "m": fdp.shard(torch.zeros(512, 512), min_size=0)}

    x, step = torch.ones(2), fdp.data_parallel(train, donate_argnums=0)
    for _ in range(2):
        step(start(), x)
    state = start()
    plan = step.plan(state, x)
    assert plan.emit().program.gathered
    (found,) = plan.memory().devices
    held = found.state_bytes + found.batch_bytes + found.block_bytes
    return found.peak_bytes, held + handed_out_bytes(lambda: step(state, x))


def test_what_arrives_in_donated_state_is_counted_once() -> None:
    for predicted, measured in ranks.run(2, gathered_into_state):
        assert predicted == pytest.approx(measured, rel=0.01)


def test_numbers_that_are_read_from_tensors_take_no_memory() -> None:
    """Muon reads its learning rate from a tensor: a number among the values of the graph."""
    optimizer = fdp.optim.from_torch(torch.optim.Muon, lr=0.1)
    params = {"w": torch.ones(16, 16)}

    def step(state: Any, x: torch.Tensor) -> Any:
        grads = fdp.grad(lambda p: (x @ p["w"]).square().mean())(state["params"])
        new, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": new, "opt": opt}

    plan = fdp.data_parallel(step).plan({"params": params, "opt": optimizer.init(params)}, torch.ones(4, 16))
    (found,) = plan.memory().devices
    assert found.state_bytes == 2 * 16 * 16 * 4 + 8
    assert "w" in str(plan.memory_plan())


def small() -> Any:
    step = fdp.data_parallel(lambda w, x: w - fdp.grad(lambda w: (x @ w).tanh().square().mean())(w), donate_argnums=0)
    return step.plan(torch.ones(256, 256), torch.ones(4, 256))


def parts_over_time(make: Any) -> list[bool]:
    """Whether what is in use at each moment comes to what the table says, and what kinds there are."""
    torch.manual_seed(0)
    module, ids = make()
    apply, params, buffers = fdp.from_module(module)
    params = fdp.shard(params)
    step = fdp.data_parallel(
        lambda p, ids: fdp.pytree.map_leaves(
            lambda p, g: p - g, p, fdp.grad(lambda p: apply(p, buffers, ids)[0].square().mean())(p)
        ),
        bucket_cap_mb=0.5,
    )
    plan = step.plan(params, ids)
    (found,), needed = plan.memory().devices, dict(plan.emit().memory.needed_bytes)["cpu"]
    moments = found.over_time
    passes = [each.backward for each in moments]
    return [
        max(each.values_bytes + each.buckets_bytes + each.gathered_bytes for each in moments) == needed,
        max(each.other_bytes for each in moments) == found.other_bytes,
        moments[0].gathered_bytes > 0 == moments[0].buckets_bytes,  # it begins with gathers
        any(each.gathered_bytes for each in moments[: passes.index(True)]),
        any(each.buckets_bytes for each in moments[passes.index(True) :]),
        not passes[-1],
    ]


def test_what_is_in_use_over_time_comes_to_what_the_table_says() -> None:
    assert ranks.run(2, parts_over_time, transformer) == [[True] * 6] * 2


def test_it_is_drawn_kind_upon_kind(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    memory = small().memory()
    (device,) = memory.devices
    (axes,) = memory.draw(tmp_path / "memory.png").axes
    tops = [max(y for path in band.get_paths() for _, y in path.vertices) for band in axes.collections]
    held = device.state_bytes + device.batch_bytes
    assert tops[:2] == [device.state_bytes, held] and tops == sorted(tops)
    in_use = [
        each.gathered_bytes + each.buckets_bytes + each.values_bytes + each.other_bytes for each in device.over_time
    ]
    assert tops[-1] == held + max(in_use) <= device.peak_bytes
    assert axes.lines[0].get_ydata()[0] == device.peak_bytes
    texts = " ".join(text.get_text() for text in axes.texts)
    assert "state: up to 256.0 KiB" in texts and "backward" in texts
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(fdp.ArgumentError, match="no kind of picture"):
        memory.draw("memory.txt")


def test_it_prints_as_a_table() -> None:
    memory = small().memory()
    assert str(memory).startswith("Memory of <lambda> on 1 rank: ")
    assert "256.0 KiB | 4.0 KiB" in str(memory) and repr(memory).startswith("<MemoryForecast of <lambda>: ")
