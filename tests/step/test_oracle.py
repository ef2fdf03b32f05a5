"""N ranks equal one process: training with fdp against a ten-line loop in plain PyTorch.

The comparison runs in float64. AdamW divides a gradient by its own size, so in float32 an element whose true
gradient is of the order of the rounding error would move by a whole learning rate in either direction, and
only a tolerance that hides real faults would pass. `test_ddp_bits.py` is the float32 side.
"""

from __future__ import annotations

from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from samples import ALL_SAMPLES, exhaustive, some

STEPS = 10 if ALL_SAMPLES else 5
GLOBAL_BATCH = 16
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"lr": 1e-2, "fused": True}),
    "sgd": ("SGD", {"lr": 1e-1}),
}


def train(name: str, optimizer: str, donate: bool, dtype: torch.dtype, cap: Any = "auto") -> dict[str, Any]:
    """One rank's side: ten steps, with the replication of the whole state checked after each of them."""
    import fdp

    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    class_name, options = OPTIMIZERS[optimizer]
    apply, params, buffers = fdp.from_module(models.MODELS[name](dtype))
    rule = fdp.optim.from_torch(getattr(torch.optim, class_name), **options)
    state = fdp.replicate({"params": params, "buffers": buffers, "opt": rule.init(params)})
    step_fn = models.fdp_step(apply, rule)
    step = fdp.data_parallel(step_fn, donate_argnums=0 if donate else (), bucket_cap_mb=cap)
    losses, digests = [], []
    for i, batch in enumerate(models.batches(name, STEPS, GLOBAL_BATCH, dtype)):
        torch.manual_seed(models.noise_seed(i, rank))
        before = models.digest(state)
        new, metrics = step(state, models.shard(batch, world, rank))
        assert donate or models.digest(state) == before, f"step {i} changed a state that was not donated"
        state = new
        fdp.assert_replicated((state, metrics))
        assert world == 1 or models.same_bits_on_all_ranks((state, metrics)), f"ranks differ after step {i}"
        losses.append(metrics["loss"].item())
        digests.append(models.digest(state))
    values = {k: v.detach() for k, v in (state["params"] | state["buffers"]).items()}
    return {"values": values, "losses": losses, "digests": digests}


def oracle(name: str, optimizer: str, dtype: torch.dtype, shards: int) -> tuple[dict[str, Any], list[float]]:
    class_name, options = OPTIMIZERS[optimizer]
    model = models.MODELS[name](dtype)
    rule = getattr(torch.optim, class_name)(model.parameters(), **options)
    losses = models.trained_by_hand(model, rule, models.batches(name, STEPS, GLOBAL_BATCH, dtype), shards)
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    return {k: v.detach() for k, v in values.items()}, losses


def _double(numbers: list[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def assert_trained_alike(result: dict[str, Any], expected: tuple[dict[str, Any], list[float]]) -> None:
    values, losses = expected
    # The absolute part is for attention's key bias: its true gradient is zero, so what AdamW divides by eps
    # is noise.
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(_double(result["losses"]), _double(losses))
    assert result["values"].keys() == values.keys()
    for key, value in values.items():
        options = close if value.dtype == torch.float64 else {}
        torch.testing.assert_close(result["values"][key], value, msg=lambda m, k=key: f"{k}: {m}", **options)


# Without BatchNorm and dropout the loss of the whole batch is the mean of the shards' losses, so one process
# on the concatenated batch is the oracle. BatchNorm normalizes by its own shard and dropout draws per rank:
# there the oracle loops over the shards, each with its rank's seed, and averages gradients and statistics.
WHOLE_BATCH = ("mlp", "gpt")
BY_SHARD = ("cnn", "gpt_dropout")


DEFAULT = {(2, "mlp"), (2, "cnn")}
"""One of each kind of oracle; `test_ddp_bits.py` has a transformer."""


@pytest.mark.parametrize("optimizer", some(["adamw", "sgd"]))
@pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param(world, name, marks=() if (world, name) in DEFAULT else exhaustive)
        for world in (1, 2, 4)
        for name in (*WHOLE_BATCH, *BY_SHARD)
    ],
)
def test_ranks_equal_one_process(world: int, name: str, optimizer: str) -> None:
    donate = optimizer == "adamw"
    results = ranks.run(world, train, name, optimizer, donate, torch.float64)
    expected = oracle(name, optimizer, torch.float64, 1 if name in WHOLE_BATCH else world)
    for result in results:
        assert_trained_alike(result, expected)
        assert result["digests"] == results[0]["digests"]


def test_float32_ranks_equal_one_process() -> None:
    """SGD is linear in the gradient, so here float32 can be compared at float32's own tolerance."""
    result = ranks.run(2, train, "mlp", "sgd", True, torch.float32)[0]
    values, losses = oracle("mlp", "sgd", torch.float32, 1)
    torch.testing.assert_close(torch.tensor(result["losses"]), torch.tensor(losses))
    torch.testing.assert_close(result["values"], values)


@pytest.mark.parametrize("name", [pytest.param("mlp", marks=exhaustive), "cnn"])
def test_no_process_group_is_a_world_of_one(name: str) -> None:
    assert not dist.is_initialized()
    result = train(name, "adamw", True, torch.float64)
    assert_trained_alike(result, oracle(name, "adamw", torch.float64, 1))


@pytest.mark.parametrize("name", some(["cnn", "gpt_dropout"]))
def test_donation_changes_no_bit(name: str) -> None:
    kept = ranks.run(2, train, name, "adamw", False, torch.float32)
    donated = ranks.run(2, train, name, "adamw", True, torch.float32)
    assert kept[0]["digests"] == donated[0]["digests"]


def train_with_caps(name: str, donate: bool) -> dict[str, list[str]]:
    caps = [1e-5, [1e-4, 3e-3], 25, "auto", 2e-3] if ALL_SAMPLES else [1e-5, 25]
    return {str(cap): train(name, "adamw", donate, torch.float32, cap)["digests"] for cap in caps}


@pytest.mark.parametrize(
    ("name", "donate"),
    [
        ("cnn", True),
        pytest.param("gpt", False, marks=exhaustive),
        pytest.param("cnn", False, marks=exhaustive),
        pytest.param("gpt", True, marks=exhaustive),
    ],
)
def test_two_ranks_do_not_depend_on_the_bucket_plan(name: str, donate: bool) -> None:
    """The sum of two addends has one order only, so on two ranks the plan may not show in a single bit."""
    by_cap = ranks.run(2, train_with_caps, name, donate)[0]
    assert len({tuple(digests) for digests in by_cap.values()}) == 1, by_cap


def count_buckets(name: str, caps: list[Any]) -> list[int]:
    import fdp

    apply, params, buffers = fdp.from_module(models.MODELS[name]())
    rule = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-2, fused=True)
    state = {"params": params, "buffers": buffers, "opt": rule.init(params)}
    batch = models.batches(name, 1, 4)[0]
    step_fn = models.fdp_step(apply, rule)
    return [len(fdp.data_parallel(step_fn, bucket_cap_mb=c).plan(state, batch).buckets) for c in caps]


def test_the_caps_above_make_different_plans() -> None:
    """Otherwise the comparison of plans would compare one plan with itself."""
    for name, caps in [("cnn", [1e-5, 25]), ("gpt", [1e-5, 2e-3, 25])][: 1 + ALL_SAMPLES]:
        counts = ranks.run(2, count_buckets, name, caps)[0]
        assert sorted(set(counts), reverse=True) == counts and counts[-1] >= 1


def eager_and_traced(name: str) -> None:
    """The undecorated step is a program of its own, which talks as it goes: same bits as the emitted one."""
    import fdp

    rank = dist.get_rank()
    apply, params, buffers = fdp.from_module(models.MODELS[name]())
    rule = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-2, fused=True)
    state = {"params": params, "buffers": buffers, "opt": rule.init(params)}
    step_fn = models.fdp_step(apply, rule)
    step = fdp.data_parallel(step_fn)
    for i, batch in enumerate(models.batches(name, 3, 8)):
        piece = models.shard(batch, 2, rank)
        torch.manual_seed(models.noise_seed(i, rank))
        eager = step_fn(state, piece)
        torch.manual_seed(models.noise_seed(i, rank))
        traced = step(state, piece)
        assert models.digest(eager) == models.digest(traced), f"{name}: step {i} differs from its untraced self"
        state = traced[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=exhaustive) if name != "cnn" else name for name in ("mlp", "cnn", "gpt_dropout")]
)
def test_untraced_step_gives_the_same_bits(name: str) -> None:
    ranks.run(2, eager_and_traced, name)
