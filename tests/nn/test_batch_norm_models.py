"""Models that hold nn.SyncBatchNorm, or plain BatchNorm with averaged statistics, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fdp

DOUBLE = torch.float64


def network(kind: str, momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4, momentum=momentum),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
        nn.BatchNorm1d(3, affine=False),
        nn.BatchNorm1d(3, track_running_stats=False),
    ).double()
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if kind == "sync" else model


def batches(count: int, sizes: tuple[int, ...]) -> list[list[Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [[torch.randn((n, 1, 4, 4), generator=g, dtype=DOUBLE) + t for n in sizes] for t in range(count)]


def train(kind: str, steps: list[Tensor], momentum: float | None) -> Any:
    """Plain SGD of a step under fdp; on one process with all samples, plain BatchNorm is the oracle."""
    apply, params, buffers = fdp.from_module(network(kind, momentum))

    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            y, new = apply(params, state["buffers"], x)
            return fdp.pmean((y * y * x.mean((1, 2, 3)).unsqueeze(1)).mean(), weight=len(x)), new

        (loss, new), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state["params"])
        new_params = {name: p - 0.1 * grads[name] for name, p in state["params"].items()}
        return {"params": new_params, "buffers": new}, loss

    stepper = fdp.data_parallel(step) if kind == "sync" else step
    state, losses = {"params": params, "buffers": buffers}, []
    for x in steps:
        state, loss = stepper(state, x)
        losses.append(loss)
    return state, losses


def train_on_ranks(sizes: tuple[int, ...]) -> None:
    data = batches(3, sizes)
    for momentum in (0.1, None):
        found = train("sync", [shards[dist.get_rank()] for shards in data], momentum)
        with_one = run_alone([torch.cat(shards) for shards in data], momentum)
        torch.testing.assert_close(found, with_one, rtol=1e-7, atol=1e-9)
    # In eval mode ranks do not talk, and each normalises by the running statistics.
    module = network("sync").eval()
    apply, params, buffers = fdp.from_module(module)
    x = data[0][dist.get_rank()]
    if dist.get_rank() == 0:
        y, new = apply(params, buffers, x)
        torch.testing.assert_close(y, module(x))
        assert torch.equal(new["1.num_batches_tracked"], buffers["1.num_batches_tracked"])


def run_alone(data: list[Tensor], momentum: float | None) -> Any:
    """The oracle: the modules themselves, with autograd."""
    module, losses = network("plain", momentum), []
    for x in data:
        loss = (module(x).square() * x.mean((1, 2, 3)).unsqueeze(1)).mean()
        grads = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for p, g in zip(module.parameters(), grads, strict=True):
                p -= 0.1 * g
        losses.append(loss.detach())
    params = dict(module.named_parameters())
    return {"params": {k: v.detach() for k, v in params.items()}, "buffers": dict(module.named_buffers())}, losses


def test_a_converted_model_trains_like_one_process_with_all_samples() -> None:
    ranks.run(2, train_on_ranks, (3, 5))


def other_group() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    apply, params, buffers = fdp.from_module(nn.SyncBatchNorm(3, process_group=alone))
    with pytest.raises(fdp.ArgumentError, match="made for one process group, and called in a step on another"):
        apply(params, buffers, torch.ones(2, 3))

    def step(state: Any, x: Tensor) -> Any:
        return apply(params, state, x)[1]

    assert fdp.data_parallel(step, group=alone)(buffers, torch.ones(2, 3))["running_mean"].tolist() == pytest.approx(
        [0.1] * 3
    )


def test_a_module_with_a_process_group_of_its_own() -> None:
    ranks.run(2, other_group)


def averaged_statistics() -> None:
    rank, data = dist.get_rank(), batches(2, (4, 4))
    apply, params, buffers = fdp.from_module(network("plain"))

    @fdp.data_parallel
    def step(state: Any, x: Tensor) -> Any:
        _, new = apply(params, state, x)
        return {**new, **fdp.pmean({k: b for k, b in new.items() if b.is_floating_point()})}

    params = {k: p.detach() for k, p in params.items()}
    state, expected = buffers, [dict(network("plain").named_buffers())]
    for shards in data:
        state = step(state, shards[rank])
        each = []
        for x in shards:
            module = network("plain")
            module.load_state_dict({**params, **expected[-1]})
            module(x)
            each.append(dict(module.named_buffers()))
        expected.append({k: (each[0][k] + each[1][k]) / 2 if "running" in k else each[0][k] for k in each[0]})
    torch.testing.assert_close(state, expected[-1])
    fdp.assert_replicated(state)


def test_plain_batch_norm_with_averaged_statistics() -> None:
    ranks.run(2, averaged_statistics)
