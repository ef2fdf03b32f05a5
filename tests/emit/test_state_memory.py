"""State leaves that share memory, repeat it or lie in it out of order: the right result, donated or not."""

from __future__ import annotations

import itertools
from typing import Any

import models
import optree
import pytest
import ranks
import torch
import torch.distributed as dist
from samples import exhaustive, some
from steps import sgd_step

import fdp

Tree = dict[str, Any]
DOUBLE = torch.float64


def unusual(kind: str) -> Tree:
    """A state whose leaves share memory, repeat it, or lie in it out of order."""
    flat = torch.arange(12, dtype=DOUBLE) / 10
    if kind == "transposed":
        return {"a": flat.clone().view(3, 4).t(), "b": torch.ones(3, dtype=DOUBLE)}
    if kind == "strided":
        return {"a": flat.clone()[::2], "b": flat.clone().view(3, 4)[:, 1]}
    if kind == "channels last":
        return {
            "a": torch.arange(16, dtype=DOUBLE).view(1, 2, 2, 4).to(memory_format=torch.channels_last),
            "b": torch.ones(1, dtype=DOUBLE),
        }
    if kind == "expanded":
        return {"a": torch.ones(1, dtype=DOUBLE).expand(4), "b": torch.ones(2, 1, dtype=DOUBLE).expand(2, 3)}
    if kind == "same tensor twice":
        return {"a": flat, "b": flat}
    if kind == "views of one buffer":
        return {"a": flat[:5], "b": flat[5:]}
    if kind == "overlapping views":
        return {"a": flat[:8], "b": flat[4:]}
    if kind == "view and base":
        return {"a": flat, "b": flat.view(3, 4)}
    raise AssertionError(kind)


KINDS = [
    "transposed",
    "strided",
    "channels last",
    "expanded",
    "same tensor twice",
    "views of one buffer",
    "overlapping views",
    "view and base",
]


def swap_step(state: Tree, batch: Tree) -> Tree:
    """Updates, and outputs that are other leaves of the state as they were: donation must not mix them."""
    new = sgd_step({"a": state["a"], "b": state["b"]}, batch)
    return {**new, "old": state["old"] + new["a"].sum(), "saved": state["a"].clone(), "same": state["same"]}


def unusual_leaves(kind: str, donate: bool, optimizer: bool) -> None:
    rank = dist.get_rank()
    state = unusual(kind)
    reference = optree.tree_map(torch.clone, state)
    if optimizer:
        rule = fdp.optim.from_torch(torch.optim.AdamW, lr=0.1, fused=True)
        by_hand = {k: v.clone(memory_format=torch.contiguous_format) for k, v in reference.items()}
        plain = torch.optim.AdamW(by_hand.values(), lr=0.1, fused=True)

        def step_fn(state: Any, batch: Tree) -> Any:
            def loss_fn(params: Tree) -> torch.Tensor:
                return sum((p * batch["x"].sum() + 1).square().mean() for p in params.values())

            params, opt = rule.update(fdp.grad(loss_fn)(state[0]), state[1], state[0])
            return params, opt

        carried: Any = (state, rule.init(state))
    else:
        step_fn = swap_step
        carried = {
            **state,
            "old": torch.zeros((), dtype=DOUBLE),
            "saved": torch.zeros_like(state["a"]),
            "same": torch.ones(3),
        }
    step = fdp.data_parallel(step_fn, donate_argnums=0 if donate else ())
    old = torch.zeros((), dtype=DOUBLE)
    for i in range(3):
        sums = [0.2 * (i + 1), 0.4 * (i + 1)]
        previous = reference
        before = models.digest(carried)
        new = step(carried, {"x": torch.full((2,), sums[rank] / 2, dtype=DOUBLE)})
        assert donate or models.digest(carried) == before
        carried = new
        fdp.assert_replicated(carried)
        source = by_hand if optimizer else previous
        grads = {k: sum(2 * (p * s + 1) * s / p.numel() for s in sums) / 2 for k, p in source.items()}
        if optimizer:
            for k, p in by_hand.items():
                p.grad = grads[k].contiguous()
            plain.step()
            torch.testing.assert_close(carried[0], by_hand)
            continue
        reference = {k: p - 0.01 * grads[k] for k, p in previous.items()}
        torch.testing.assert_close({k: carried[k] for k in ("a", "b")}, reference)
        torch.testing.assert_close(carried["saved"], previous["a"])
        old = old + reference["a"].sum()
        torch.testing.assert_close(carried["old"], old)
        torch.testing.assert_close(carried["same"], torch.ones(3))


WAYS = list(itertools.product(KINDS, ["kept", "donated"], ["sgd", "fused"]))


@pytest.mark.parametrize(
    ("kind", "donate", "optimizer"),
    some([(kind, how == "donated", rule == "fused") for kind, how, rule in WAYS], 3),
    ids=["-".join(way) for way in WAYS],
)
def test_state_leaves_with_unusual_memory(kind: str, donate: bool, optimizer: bool) -> None:
    ranks.run(2, unusual_leaves, kind, donate, optimizer)


def donated_batch_alias() -> None:
    """A batch that is a view of the donated state is read before it is overwritten."""
    step = fdp.data_parallel(sgd_step, donate_argnums=0)
    state = {"a": torch.ones(4)}
    batch = {"x": state["a"][:2]}
    got = step(state, batch)["a"].clone()
    torch.testing.assert_close(got, torch.ones(4) - 0.01 * 2 * 3.0 * 2.0 / 4)


def test_a_batch_that_aliases_the_donated_state() -> None:
    ranks.run(2, donated_batch_alias)


def job_a_gradient_that_gets_other_memory(compiled: bool, read: bool) -> None:
    """Its bucket has room for the gradient alone, and its message may be under way."""

    @fdp.data_parallel(bucket_cap_mb=6e-5, compile=compiled, check_replication=False)
    def step(state: Tree, batch: torch.Tensor) -> Any:
        grads = fdp.grad(lambda p: (p["a"] @ batch).square().sum() + p["none"].sum())(state)
        before = (grads["b"] + 1) * 2 if read else state["b"] * 2
        torch.mm(grads["a"], state["a"], out=grads["b"])
        grads["none"].resize_(2, 2).fill_(3)
        return grads, before, grads["b"].t() @ batch

    rank = dist.get_rank()
    a, b = torch.arange(16.0, dtype=DOUBLE).view(4, 4), torch.ones(4, 1, dtype=DOUBLE)
    batch = [torch.full((4,), 1.0 + r, dtype=DOUBLE) for r in range(2)]
    mean = sum(2 * torch.outer(a @ x, x) for x in batch) / 2
    expected = {"a": mean, "b": mean @ a, "none": torch.full((2, 2), 3.0, dtype=DOUBLE)}, b * 2
    for _ in range(3):
        grads, before, product = step({"a": a, "b": b, "none": torch.ones(0, dtype=DOUBLE)}, batch[rank])
        torch.testing.assert_close((grads, before), expected)
        torch.testing.assert_close(product, (mean @ a).t() @ batch[rank])


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=exhaustive)])
@pytest.mark.parametrize("read", [False, True])
def test_a_gradient_that_gets_other_memory(compiled: bool, read: bool) -> None:
    ranks.run(2, job_a_gradient_that_gets_other_memory, compiled, read)
