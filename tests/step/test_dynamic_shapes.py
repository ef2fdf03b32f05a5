"""Batches of several shapes: each is traced once and kept, on every rank by itself; a step that keeps tracing warns."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from against_oracle import Tree, autograd, data_of, leaves, net_params, task_loss
from samples import some

import fdp
from fdp.trace.calls import recognise


def train_step(params: Tree, batch: Tree) -> Any:
    loss, grads = fdp.value_and_grad(lambda p: task_loss(p, batch["ax"], batch["ay"]))(params)
    return {k: params[k] - 0.1 * grads[k] for k in params}, fdp.pmean(loss)


def by_hand(params: Tree, shards: list[Tree]) -> Any:
    p = leaves(params)
    loss = sum(task_loss(p, s["ax"], s["ay"]) for s in shards) / len(shards)
    grads = autograd(loss, p)
    return {k: params[k] - 0.1 * grads[k] for k in params}, loss.detach()


def epochs_with_a_shorter_last_batch(last: list[int]) -> int:
    """Three epochs of four batches; `last` is the length of the fourth, rank by rank."""
    step, rank = fdp.data_parallel(train_step, donate_argnums=0), dist.get_rank()
    state = net_params()
    expected = {k: v.clone() for k, v in state.items()}
    for epoch in range(3):
        for i in range(4):
            shards = [data_of(r, 10 * epoch + i, last[r] if i == 3 else 4) for r in range(2)]
            expected, loss = by_hand(expected, shards)
            state, got = step(state, shards[rank])
            torch.testing.assert_close((state, got), (expected, loss), rtol=1e-10, atol=1e-12)
    fdp.assert_replicated(state)
    assert repr(step) == f"<fdp.Step train_step, traced {step.traces} time{'s' if step.traces > 1 else ''}>"
    return step.traces


@pytest.mark.parametrize(
    ("last", "traces"), some([([3, 3], [2, 2]), ([3, 4], [2, 1]), ([2, 3], [2, 2]), ([4, 1], [1, 2])], 3)
)
def test_a_shorter_last_batch_is_traced_once_and_not_again(last: list[int], traces: list[int]) -> None:
    """Also where it comes on one rank only: the other one neither traces nor waits."""
    assert ranks.run(2, epochs_with_a_shorter_last_batch, last) == traces


def sequences(rank: int, length: int, call: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(3, length, 2, generator=g, dtype=torch.float64)


def sequence_step(w: torch.Tensor, batch: torch.Tensor) -> Any:
    return fdp.value_and_grad(lambda w: (torch.cumsum(batch @ w, 1).tanh() ** 2).mean())(w)


def buckets_of_sequences(order: list[list[int]]) -> list[Any]:
    """Lengths in the order in which each rank meets them; what is known of the step afterwards."""
    step, rank = fdp.data_parallel(sequence_step, check_replication=False), dist.get_rank()
    w = torch.tensor([0.5, -1.0], dtype=torch.float64)
    plans: dict[int, set[int]] = {}
    for call, length in enumerate(order[rank]):
        loss, slope = step(w, sequences(rank, length, call))
        v, slopes = w.clone().requires_grad_(), []
        for r in range(2):
            x = sequences(r, order[r][call], call)
            value = (torch.cumsum(x @ v, 1).tanh() ** 2).mean()
            slopes.append(torch.autograd.grad(value, v)[0])
            if r == rank:
                torch.testing.assert_close(loss, value.detach())
        torch.testing.assert_close(slope, sum(slopes) / 2)
        newest = max(step._known.values(), key=lambda known: known.last_call)
        plans.setdefault(length, set()).add(id(newest.emitted.plan))
    return [step.traces, {length: len(ids) for length, ids in plans.items()}]


def test_lengths_keep_one_plan_each_in_whatever_order_they_come() -> None:
    lengths = [2, 3, 5, 8]
    chance = random.Random(0)
    orders = [[*lengths, *(chance.choice(lengths) for _ in range(12))], [chance.choice(lengths) for _ in range(16)]]
    for rank, (traces, plans) in enumerate(ranks.run(2, buckets_of_sequences, orders)):
        assert traces == len(set(orders[rank])) and plans == dict.fromkeys(set(orders[rank]), 1)


# --- a step that keeps tracing warns once -----------------------------------------------------------------------------


def warnings_of(step: Any, calls: list[tuple[Any, ...]]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for args in calls:
            step(*args)
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


def shifted(state: Any, batch: torch.Tensor) -> Any:
    return fdp.pmean(batch.double().sum())


def test_few_shapes_are_not_worth_a_word_however_often_they_come() -> None:
    step = fdp.data_parallel(shifted, check_trace=False)
    w = torch.ones(2)
    assert warnings_of(step, [(w, torch.ones(1 + k % 7)) for k in range(70)]) == []
    assert step.traces == 7


X = torch.ones(4)
CHANGES: dict[str, tuple[Callable[[int], tuple[Any, ...]], str, str]] = {
    "shape": (lambda k: ({"w": X}, torch.ones(k + 1, 2)), "batch: shape [7, 2] became [8, 2].", "pad to few sizes"),
    "several": (
        lambda k: ({"a": torch.ones(k + 1), "b": torch.ones(k + 2)}, X), "['a']: shape [7] became [8] (and 1 more).",
        "pad to few sizes",
    ),
    "number": (lambda k: ({"lr": 0.5**k}, X), "state['lr']: 0.015625 became 0.0078125.", "as a tensor"),
    "number or tensor": (
        lambda k: ({"lr": 0.5**k if k % 2 else torch.ones(k + 1)}, X),
        "state['lr']: a tensor of shape [7] and torch.float32 became 0.0078125.", "as a tensor",
    ),
    "strides": (
        lambda k: (X, torch.ones(20, 20).as_strided((2, 2), (20 - k, 1))), "batch: strides [14, 1] became [13, 1].",
        ".contiguous()",
    ),
    "structure": (lambda k: ([X] * (k + 1), X), "the structure of the arguments: ", "the same keys"),
}  # fmt: skip


@pytest.mark.parametrize("what", some(CHANGES, 3))
def test_the_warning_says_what_changed_and_what_to_do(what: str) -> None:
    arguments, change, remedy = CHANGES[what]
    step = fdp.data_parallel(shifted, check_trace=False)
    (text,) = warnings_of(step, [arguments(k) for k in range(10)])
    assert f"step 'shifted' was traced for the 8th time. What changed last: {change}"[:-1] in text or change in text
    assert remedy in text.split("Each trace takes as long as several steps: ")[1]


def test_more_shapes_than_are_kept_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was called last longest ago goes; it is traced anew when it comes again, and is right."""
    monkeypatch.setattr(fdp.step.cache, "_MOST_SIGNATURES", 5)
    monkeypatch.setattr(recognise, "MOST", 1)
    step = fdp.data_parallel(shifted, check_trace=False)
    w = torch.ones(2)
    assert warnings_of(step, [(w, torch.ones(size)) for size in range(1, 8)]) == []  # nothing has come twice
    assert step.traces == 7 and len(step._known) == 5
    texts = warnings_of(step, [(w, torch.ones(size)) for size in range(1, 8)] * 2)
    assert step.traces == 21 and len(step._known) == 5
    again = [text for text in texts if "traced again" in text]
    assert len(texts) == 2 and len(again) == 1
    assert "it keeps the 5 signatures that were called last" in again[0]
    assert step(w, torch.ones(3)).item() == 3


# --- slices of data that lie in one piece of memory --------------------------------------------------


@pytest.mark.parametrize("compiled", some([False, True]), ids=["operators", "compiled"])
def test_batches_that_are_slices_are_traced_once(compiled: bool) -> None:
    data = torch.randn(21, 3)
    step = fdp.data_parallel(lambda w, x: fdp.pmean((x @ w).tanh().sum(0)), compile=compiled)
    w = torch.randn(3, 5)
    for part in (*data.split(7), data[1:8], data.flatten()[1:22].view(7, 3), data[0:7].clone()):
        torch.testing.assert_close(step(w, part), (part @ w).tanh().sum(0))
    assert step.traces == 1
    emitted = step.plan(w, data[:7]).emit()
    torch.testing.assert_close(emitted(w, data[5:12]), (data[5:12] @ w).tanh().sum(0))


def test_a_slice_whose_place_is_looked_at_is_traced_for_each() -> None:
    def first_two(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return w + fdp.pmean(torch.as_strided(x, (2,), (1,)).sum())

    data = torch.arange(8.0)
    step = fdp.data_parallel(first_two, check_trace=False)
    for begin in (0, 2, 3, 0, 3):
        assert step(torch.zeros(()), data[begin : begin + 4]).item() == 2 * begin + 1
    assert step.traces == 3
    plan = step.plan(torch.zeros(()), data[:4])
    with pytest.raises(fdp.ArgumentError, match=r"offset 0, given .* offset 4"):
        plan.emit()(torch.zeros(()), data[4:])


def test_slices_of_donated_state_and_of_what_shares_memory() -> None:
    """Whether memory is shared decides on a program; where it begins does not."""
    data = torch.arange(12.0)

    @fdp.data_parallel(donate_argnums=0)
    def step(state: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"w": state["w"] + fdp.pmean(x)}

    for begin in (0, 3, 6, 9, 3):
        state = {"w": torch.ones(5)[begin // 3 :][:1].expand(1).clone()}
        found = step(state, data[begin : begin + 1])
        assert found["w"].item() == 1 + begin and found["w"] is state["w"]
    assert step.traces == 1
    both = torch.ones(4)
    assert step({"w": both[1:2]}, both[2:3])["w"].item() == 2 and both.tolist() == [1, 1, 1, 1]
