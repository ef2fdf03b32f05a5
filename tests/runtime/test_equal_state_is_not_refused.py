"""State that is equal on all ranks is never refused, whatever it is; and it is looked at all the time."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import ALL_SAMPLES, exhaustive

import fdp
from fdp.runtime.in_passing import InPassing
from fdp.runtime.rounds import ROUNDS

Tree = Any

FP8 = torch.float8_e4m3fn


def odd_state(rank: int) -> Tree:
    """Leaves of all kinds, and of any bits."""
    base = torch.arange(24.0).view(4, 6)
    image = torch.arange(2.0 * 3 * 4 * 4).view(2, 3, 4, 4)
    return {
        "nan": torch.tensor([0x7FC00001, 0x7F800123, -1], dtype=torch.int32).view(torch.float32),
        "zeros": torch.tensor([0.0, -0.0, float("inf")]),
        "whole": torch.arange(5),
        "flags": torch.tensor([True, False, True]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "eighth": torch.ones(7).to(FP8),
        "complex": torch.tensor([1 + 2j, 3 - 4j]),
        "number": torch.tensor(0.1, dtype=torch.float64),
        "empty": torch.ones(0, 3),
        "turned": base.t(),
        "some": base[:, ::2],
        "spread": torch.ones(1, 5).expand(3, 5),
        "image": image.to(memory_format=torch.channels_last),
        "large": torch.arange(300_000.0),
        "behind": torch.arange(50_001.0)[1:],
        "strided by rank": torch.arange(60_000.0).view(200, 300) if rank else _columns(200, 300),
    }


def _columns(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(float(rows * columns)).view(rows, columns).t().contiguous().t()


class Counted:
    """Counts what is looked at: for each plan the pieces of each call."""

    def __enter__(self) -> Counted:
        self.seen: list[tuple[InPassing, int]] = []
        look = InPassing.look

        def counted(this: InPassing, tensors: Any, call: int) -> Any:
            self.seen.append((this, call))
            return look(this, tensors, call)

        self._patch = mock.patch.object(InPassing, "look", counted)
        self._patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._patch.stop()


def keep_odd_state(donate: Any, compiled: bool) -> int:
    """It is returned as it came, edited alike on all ranks between calls, and each rank has some of its own."""

    def step(state: Tree, own: Tree, batch: torch.Tensor) -> Tree:
        grad = fdp.pmean(batch.mean())
        own = {"residual": own["residual"] + batch.sum()}
        return {**state, "number": state["number"] + grad, "nan": state["nan"] * 1.0}, own

    run = fdp.data_parallel(step, donate_argnums=donate, group=dist.new_group(), compile=compiled)
    state, own = odd_state(dist.get_rank()), fdp.per_rank({"residual": torch.tensor(float(dist.get_rank()))})
    calls = 2 * ROUNDS + 5
    with Counted() as counted:
        for call in range(calls):
            if call % 7 == 3:
                state["half"].add_(1)
            if call % 11 == 5:
                state["whole"] = state["whole"] + 1
            state, own = run(state, own, torch.full((2,), 1.0 + dist.get_rank() + call))
    assert own["residual"].value.item() != float(dist.get_rank())
    looked = {this._names[piece.leaf] for this, call in counted.seen for piece in this.rounds[call % ROUNDS]}
    assert looked == {f"state[{name!r}]" for name in odd_state(0) if name != "empty"}, looked
    return len(counted.seen) - calls


@pytest.mark.parametrize(
    ("donate", "compiled"),
    [pytest.param((), False, marks=exhaustive), (0, False), pytest.param(0, True, marks=exhaustive)],
)
def test_state_of_any_kind_and_bits_is_equal(donate: Any, compiled: bool) -> None:
    for outcome in ranks.run_fresh(2, keep_odd_state, donate, compiled, deadline_s=200):
        assert outcome.ok and outcome.value == 0, outcome.describe()


def train_for_long() -> list[str]:
    """Fused optimizers, momentum, a learning rate that all ranks change, in several steps on one group."""
    group, seen = dist.new_group(), []
    optimizers = (
        (torch.optim.AdamW, {"lr": 0.5, "fused": True}),
        (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "fused": True}),
        (torch.optim.Adam, {"lr": 0.5, "amsgrad": True}),
        (torch.optim.RMSprop, {"lr": 0.5}),
    )
    for cls, options in optimizers if ALL_SAMPLES else optimizers[:1]:
        optimizer = fdp.optim.from_torch(cls, **options)
        params = {"w": torch.linspace(-1, 1, 60).view(6, 10), "v": torch.ones(10)}
        run = fdp.data_parallel(descending(optimizer), donate_argnums=0, group=group, wire_dtype=torch.bfloat16)
        state = {"params": params, "opt": optimizer.init(params)}
        generator = torch.Generator().manual_seed(dist.get_rank())
        for call in range(ROUNDS + 20):
            if call == 50:
                state["opt"]["lr"] = state["opt"]["lr"] * 0.5
            # One rank's batches are longer now and then: another signature of the same schedule.
            rows = 3 + (dist.get_rank() == 1 and call % 5 == 0)
            state, loss = run(state, torch.randn(rows, 6, generator=generator))
            if call == 30:
                run.profile(state, torch.ones(3, 6), repeats=2)
        seen.append(repr(loss.item()))
    return seen


def descending(optimizer: Any) -> Any:
    def step(state: Tree, batch: torch.Tensor) -> Tree:
        def loss_fn(params: Tree) -> torch.Tensor:
            return ((batch @ params["w"]).tanh() @ params["v"]).square().mean()

        loss, grads = fdp.value_and_grad(loss_fn)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, fdp.pmean(loss)

    return step


def test_long_runs_are_not_refused() -> None:
    outcomes = ranks.run_fresh(2, train_for_long, deadline_s=200)
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
    assert outcomes[0].value == outcomes[1].value


def switched_off() -> None:
    """Who does not compare holds what it wants; nor is anything compared if one rank does not."""
    rank = dist.get_rank()
    for checks in ((False, False), (True, False)):
        step = fdp.data_parallel(lambda w, b: w + fdp.pmean(b), group=dist.new_group(), check_replication=checks[rank])
        w = torch.ones(3)
        with Counted() as counted:
            for call in range(ROUNDS + 3):
                w = step(w + rank * (call == 5), torch.ones(3))
        assert not counted.seen
    # Nor is anything looked at where nothing is sent.
    alone = fdp.data_parallel(lambda w, b: w + 1, group=dist.new_group())
    with Counted() as counted:
        assert alone(torch.ones(3), torch.ones(3)).tolist() == [2.0] * 3
    assert not counted.seen


def test_nothing_is_compared_unless_all_ranks_do() -> None:
    for outcome in ranks.run_fresh(2, switched_off, deadline_s=60):
        assert outcome.ok, outcome.describe()


def first_messages_of_all_kinds() -> list[int]:
    """Where the first message cannot carry a number, or those of several steps are unlike, one of its own does."""
    rank, taken = dist.get_rank(), []
    kinds = [
        [lambda w, b: w + fdp.all_gather(b).sum(0)],
        [lambda w, b: w + fdp.broadcast(b, root=1)],
        [lambda w, b: w + fdp.pmean(b), lambda w, b: w - fdp.pmean(b.repeat(5000)).sum()],
        [lambda w, b: w + fdp.psum(b.to(torch.int8)).to(w.dtype)],
        [lambda w, b: w + 0 * fdp.grad(lambda w: (w * b).sum())(w)],
        [lambda w, b: w - 0 * fdp.grad(lambda w: (w * b).sum())(w)],
    ]
    wires: dict[int, Any] = {
        4: {"wire_dtype": torch.float16},
        5: {"wire_dtype": torch.bfloat16, "accumulate_dtype": torch.float32},
    }
    for at, functions in enumerate(kinds):
        group = dist.new_group()
        steps = [fdp.data_parallel(function, group=group, **wires.get(at, {})) for function in functions]
        w, call = torch.ones(3), 0
        try:
            for call in range(ROUNDS):
                for step in steps:
                    w = step(w, torch.ones(3))
                if call == 4 and rank == 1:
                    w = w.clone()
                    w.view(torch.int32)[0] ^= 1 << 22
        except fdp.ReplicationError as error:
            assert "  w: ranks 0 and 1 differ; equal when call 5 began" in str(error)
            taken.append(call)
    return taken


def test_a_message_of_its_own_says_so_too() -> None:
    for outcome in ranks.run_fresh(2, first_messages_of_all_kinds, deadline_s=60):
        assert outcome.ok and outcome.value == [5] * 6, outcome.describe()
