"""State that comes to differ on one rank in training: an error on all ranks that names leaf, rank and calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import ALL_SAMPLES, exhaustive, some
from torch import nn

import fdp
from fdp.distributed.checksum import _elements
from fdp.distributed.fingerprint import mixed_sum
from fdp.runtime import in_passing, order
from fdp.runtime.rounds import ROUNDS
from fdp.runtime.written_early import written_early

Tree = Any

AT = 21
"""Calls that go well before something happens."""

LINE = re.compile(
    r"^  (?P<name>.*): (?P<whose>ranks? .*); equal (when call (?P<before>\d+) began|before call 1), "
    r"not when call (?P<seen>\d+) began$"
)


faulty = False
"""Whether the processor of this rank computes one operator wrongly."""


@torch.library.custom_op("fdp_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """An operator that a processor may compute wrongly, by one bit of one element."""
    result = x * 2
    if faulty:
        result.view(torch.int32).view(-1)[1] ^= 1 << 20
    return result


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def victim() -> int:
    """The rank on which something happens: not always the last one."""
    return 1


def network(group: Any, **options: Any) -> tuple[Callable[..., Any], Tree, torch.Tensor]:
    """A step with batch normalisation and a fused optimizer, its first state, and a tensor that it closes over."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.SyncBatchNorm(40), nn.ReLU(), nn.Linear(40, 3))
    apply, params, buffers = fdp.from_module(model)
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-3, fused=True)
    shift = torch.ones(3)

    def train_step(state: Tree, batch: torch.Tensor) -> Tree:
        def loss_fn(params: Tree) -> Any:
            out, buffers = apply(params, state["buffers"], batch)
            return (out + shift).square().mean(), buffers

        (loss, buffers), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "buffers": buffers, "opt": opt}, fdp.pmean(loss)

    state = {"params": params, "buffers": buffers, "opt": optimizer.init(params)}
    return fdp.data_parallel(train_step, group=group, donate_argnums=0, **options), state, shift


def flip(tensor: torch.Tensor, bit: int = 20) -> None:
    kinds = {4: torch.int32, 8: torch.int64}
    tensor.detach().view(kinds[tensor.itemsize]).view(-1)[-1] ^= 1 << bit


def parameter(state: Tree, shift: torch.Tensor) -> str:
    flip(state["params"]["0.weight"])
    return "state['params']['0.weight']"


def optimizer_state(state: Tree, shift: torch.Tensor) -> str:
    flip(state["opt"]["state"]["3.weight"]["exp_avg_sq"], 24)
    return "state['opt']['state']['3.weight']['exp_avg_sq']"


def statistics(state: Tree, shift: torch.Tensor) -> str:
    flip(state["buffers"]["1.running_var"], 22)
    return "state['buffers']['1.running_var']"


def counter(state: Tree, shift: torch.Tensor) -> str:
    flip(state["buffers"]["1.num_batches_tracked"], 2)
    return "state['buffers']['1.num_batches_tracked']"


def closed_over(state: Tree, shift: torch.Tensor) -> str:
    flip(shift, 1)
    return "closed-over tensor shift"


def learning_rate(state: Tree, shift: torch.Tensor) -> str:
    state["opt"]["lr"] = state["opt"]["lr"] * 0.5
    return "state['opt']['lr']"


def replaced(state: Tree, shift: torch.Tensor) -> str:
    state["params"]["3.bias"] = torch.full((3,), 0.25)
    return "state['params']['3.bias']"


EVENTS: tuple[Callable[[Tree, torch.Tensor], str], ...] = (
    parameter, optimizer_state, statistics, counter, closed_over, learning_rate, replaced,
)  # fmt: skip


def refused(error: fdp.ReplicationError, name: str, call: int) -> None:
    """Check the error of a rank: which leaf, which rank, between which calls."""
    first, *lines, remedy = str(error).splitlines()
    own, size = dist.get_rank(), dist.get_world_size()
    assert f"as seen at call {call} on rank {own}." in first and remedy.startswith("Remedy: start the job again")
    found = {match["name"]: match for match in map(LINE.match, lines) if match}
    assert len(found) == len(lines) and name in found, error
    whose = "ranks 0 and 1 differ" if size == 2 else f"rank {victim()} differs from the others"
    assert {match["whose"] for match in found.values()} == {whose}, error
    for match in found.values():
        assert max(0, call - ROUNDS) <= int(match["before"] or 0) < int(match["seen"]) == call
    # Before call AT + 1 it happened: what it happened to was equal when an earlier call began.
    assert int(found[name]["before"] or 0) <= AT < call, error


def go_wrong(names: list[str], compiled: bool) -> dict[str, int]:
    """Each event on a group of its own; returns how many calls it took to see it."""
    taken = {}
    for event in EVENTS:
        if event.__name__ not in names:
            continue
        step, state, shift = network(dist.new_group(), compile=compiled)
        generator = torch.Generator().manual_seed(dist.get_rank())
        name, outcome, call = "", None, 0
        for call in range(1, AT + ROUNDS + 1):
            if call == AT + 1:
                held = {"state": state, "shift": shift} if dist.get_rank() == victim() else None
                name = event(state, shift) if held else _name_of(event, state)
            try:
                state, _ = step(state, torch.randn(5, 6, generator=generator))
            except fdp.FdpError as error:
                outcome = error
                break
        assert isinstance(outcome, fdp.ReplicationError), (event.__name__, outcome)
        refused(outcome, name, call)
        taken[event.__name__] = call - AT
        with pytest.raises(fdp.PeerError, match="desynchronised"):
            step(state, torch.ones(5, 6))
    return taken


def _name_of(event: Callable[[Tree, torch.Tensor], str], state: Tree) -> str:
    """What an event would happen to, without letting it happen."""
    return event(_copied(state), torch.ones(3))


def _copied(tree: Tree) -> Tree:
    return {key: _copied(value) for key, value in tree.items()} if isinstance(tree, dict) else tree.clone()


@pytest.mark.parametrize("world", some([2, 3]))
def test_what_comes_to_differ_is_named_on_all_ranks(world: int) -> None:
    events = EVENTS if ALL_SAMPLES else (parameter, closed_over)
    names = [event.__name__ for event in events]
    outcomes = ranks.run_fresh(world, go_wrong, names, False, deadline_s=140)
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
    assert all(outcome.value == outcomes[0].value for outcome in outcomes)
    assert set(outcomes[0].value) == set(names) and all(1 <= taken <= ROUNDS for taken in outcomes[0].value.values())


@exhaustive
def test_what_comes_to_differ_is_named_by_compiled_steps() -> None:
    names = ["parameter", "learning_rate", "closed_over"]
    for outcome in ranks.run_fresh(2, go_wrong, names, True, deadline_s=200):
        assert outcome.ok and set(outcome.value) == set(names), outcome.describe()


def compute_wrongly(compiled: bool) -> tuple[int, str]:
    """From one call on, the processor of one rank computes an operator wrongly. Both ranks go on with it."""
    global faulty

    def descend(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        grad = fdp.grad(lambda w: ((b @ w) ** 2).mean())(w)
        return w - 1e-3 * doubled(grad)

    step = fdp.data_parallel(descend, donate_argnums=0, group=dist.new_group(), compile=compiled)
    w = torch.ones(4, 50)
    for call in range(1, AT + ROUNDS + 2):
        faulty = call == AT and dist.get_rank() == victim()
        try:
            w = step(w, torch.full((3, 4), 0.1 * (1 + dist.get_rank())))
        except fdp.ReplicationError as error:
            return call, str(error)
    raise AssertionError("not noticed")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=exhaustive)])
def test_an_operator_that_one_rank_computes_wrongly_is_noticed(compiled: bool) -> None:
    for outcome in ranks.run_fresh(3, compute_wrongly, compiled, deadline_s=200):
        assert outcome.ok, outcome.describe()
        call, message = outcome.value
        # It was computed wrongly in call AT, so the inputs of call AT were equal.
        assert AT < call <= AT + ROUNDS
        (line,) = [found for text in message.splitlines() if (found := LINE.match(text))]
        assert line["name"] == "w" and line["whose"] == "rank 1 differs from the others"
        assert int(line["before"] or 0) <= AT < int(line["seen"]) == call


def half_of_the_ranks() -> str:
    """Two ranks against two: there is no majority."""
    step = fdp.data_parallel(lambda w, b: w + 0 * fdp.pmean(b), group=dist.new_group())
    w, b = torch.ones(2), torch.ones(2)
    for call in range(5):
        if call == 3 and dist.get_rank() in (1, 2):
            w = w + 1
        try:
            w = step(w, b)
        except fdp.ReplicationError as error:
            return str(error)
    raise AssertionError("not noticed")


@exhaustive
def test_without_a_majority_all_ranks_are_named() -> None:
    for outcome in ranks.run_fresh(4, half_of_the_ranks, deadline_s=60):
        assert outcome.ok and "  w: ranks 0, 1, 2 and 3 differ; equal when call 3 began, not when call 4 began" in (
            outcome.value
        ), outcome.describe()


class Arrived(order._HeaderCopy):
    """What came back on a device, and has come over when the next call begins."""

    def __init__(self, sent: Any, arrived: torch.Tensor, call: int, look: Any) -> None:
        self.call, self.look = call, look
        self._sent = None
        self._host = torch.stack((arrived, sent))

    def has_arrived(self) -> bool:
        return True


def as_on_a_device(ahead: bool) -> list[str]:
    """Numbers stay on the device, so a difference is known at the next call. The device is the CPU here."""
    group, said = dist.new_group(), []
    other = fdp.data_parallel(lambda w, b: w - fdp.pmean(b.repeat(5000)).sum(), group=group, check_replication=False)
    with (
        mock.patch.object(in_passing, "_is_contiguous", lambda shape, stride: False),
        mock.patch.object(in_passing, "checksum", lambda x, start, stop: mixed_sum(_elements(x, start, stop))),
        mock.patch.object(order, "_is_on_cpu", lambda arrived: False),
        mock.patch.object(order, "_HeaderCopy", Arrived),
    ):
        step, state, _ = network(group)
        for call in range(1, AT + ROUNDS + 3):
            if call == 3 and ahead:  # from now on calls say which they are in messages of their own
                with mock.patch.object(order, "_is_on_cpu", lambda arrived: True):
                    other(torch.ones(3), torch.ones(3))
            if call == AT + 1 and dist.get_rank() == victim():
                flip(state["params"]["0.weight"])
            try:
                state, _ = step(state, torch.randn(5, 6))
            except fdp.ReplicationError as error:
                said = str(error).splitlines()
                break
        assert said, "not noticed"
    assert call > AT + 1 and f"as seen at call {call - 1} on rank" in said[0]
    assert f"What it returned since call {call - 1} is wrong." in said[0]
    found = {match["name"]: match for match in map(LINE.match, said) if match}
    assert int(found["state['params']['0.weight']"]["before"] or 0) <= AT
    # All that differs by now is named; what was not due is seen when this call begins.
    assert {int(match["seen"]) for match in found.values()} <= {call - 1, call}
    return sorted(found)


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=exhaustive), True])
def test_numbers_that_stay_on_the_device_are_compared_a_call_later(ahead: bool) -> None:
    outcomes = ranks.run_fresh(2, as_on_a_device, ahead, deadline_s=100)
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
    assert outcomes[0].value == outcomes[1].value


def damaged() -> str:
    """A number that is damaged on its way: nothing differs."""
    step = fdp.data_parallel(lambda w, b: w + 0 * fdp.pmean(b), group=dist.new_group())
    w, b = torch.ones(2), torch.ones(2)
    w = step(w, b)
    spoil = mock.patch.object(order, "is_unanimous", lambda arrived, sent: False)
    with spoil, pytest.raises(fdp.ReplicationError) as caught:
        step(w, b)
    return str(caught.value)


def test_a_difference_that_is_not_there_any_more_is_not_made_up() -> None:
    for outcome in ranks.run_fresh(2, damaged, deadline_s=60):
        assert outcome.ok, outcome.describe()
        assert "  w: compared at this call; equal on all ranks when looked at again" in outcome.value


def half_updated() -> tuple[list[int], list[str]]:
    """Donated memory that holds each rank's own values when the first message is looked at."""

    def step(state: Tree, batch: torch.Tensor) -> Tree:
        m = state["m"].clone()
        m.add_(batch.sum())
        m.copy_(fdp.pmean(m))
        return {"m": m, "n": state["n"] + 1, "v": state["v"] - 0 * m.sum(), "w": state["w"].clone()}

    state: Tree = {"m": torch.zeros(3), "n": torch.tensor(0), "v": torch.ones(3), "w": torch.ones(3)}
    run = fdp.data_parallel(step, donate_argnums=0, group=dist.new_group())
    names: list[str] = []
    for call in range(1, 20):
        if call == 6 and dist.get_rank() == victim():
            state["v"], state["w"] = state["v"] + 1, state["w"] + 1
        try:
            state = run(state, torch.full((2,), 1.0 + dist.get_rank()))
        except fdp.ReplicationError as error:
            names = [match["name"] for match in map(LINE.match, str(error).splitlines()) if match]
            break
    (known,) = run._known.values()
    return sorted(written_early(known.emitted.plan)), names


def test_memory_that_a_call_has_begun_to_update_is_not_compared() -> None:
    for outcome in ranks.run_fresh(2, half_updated, deadline_s=60):
        assert outcome.ok, outcome.describe()
        assert outcome.value == ([0, 1], ["state['v']", "state['w']"])
