"""Steps with sharded state on real ranks, beside the same steps with whole state."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from samples import ALL_SAMPLES, exhaustive
from sharded_steps import STEPS, all_differences

import fdp

REPEATS = {
    "SGD", "Adam", "AdamW, foreach", "AdamW, single", "RMSprop", "Adagrad", "averaged", "accumulated",
    "of other dtypes", "convolution", "batch norm",
}  # fmt: skip
"""Steps that others are much like."""


def no_differences(names: list[str], compile: bool) -> None:
    found = all_differences(names, compile)
    assert not found, "\n".join(found[:10])


@pytest.mark.parametrize("name", [pytest.param(name, marks=exhaustive if name in REPEATS else ()) for name in STEPS])
def test_two_ranks_compute_on_parts_what_they_compute_on_the_whole(name: str) -> None:
    ranks.run(2, no_differences, [name], False)


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=exhaustive)])
def test_more_ranks_do(size: int) -> None:
    names = ["in place", "by hand", "AdamW, single", "clipped", "views and readers", "convolution"]
    ranks.run(size, no_differences, names if ALL_SAMPLES else names[:1], False)


@exhaustive
@pytest.mark.parametrize("name", ["by hand", "views and readers", "clipped", "accumulated"])
def test_compiled_steps_do(name: str) -> None:
    ranks.run(2, no_differences, [name], True)


def update(state: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    loss, grad = fdp.value_and_grad(lambda w: (x @ w).square().mean())(state["w"])
    return {"w": state["w"] - 0.1 * (grad + state["m"]), "m": grad}, fdp.pmean(loss)


def state_of(rows: int = 8) -> Any:
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(rows, 6, generator=generator), "m": torch.zeros(rows, 6)}


def memory_of_donated_state_is_kept() -> None:
    whole_step, x = fdp.data_parallel(update), torch.ones(4, 8) + fdp.axis_index()
    for compile in (False, True):
        step, whole = fdp.data_parallel(update, donate_argnums=0, compile=compile), state_of()
        state = fdp.shard(state_of(), min_size=0)
        before = {key: leaf.to_local().data_ptr() for key, leaf in state.items()}
        for _ in range(3):
            state, _ = step(state, x)
            assert {key: leaf.to_local().data_ptr() for key, leaf in state.items()} == before
            assert all(leaf.to_local().shape == (4, 6) for leaf in state.values())
            whole, _ = whole_step(whole, x)
            torch.testing.assert_close(fdp.unshard(state), whole)


def test_donated_parts_keep_their_memory() -> None:
    ranks.run(2, memory_of_donated_state_is_kept)


def parts_go_in_as_they_came_out_alone() -> None:
    step = fdp.data_parallel(update)
    state, _ = step(fdp.shard(state_of(), min_size=0), torch.ones(4, 8))
    with pytest.raises(fdp.ReplicationError, match=r"was this rank's part of output\[0\]\['w'\]"):
        step({key: leaf.to_local() for key, leaf in state.items()}, torch.ones(4, 4))  # as if it were all


def test_a_part_is_not_taken_for_replicated_state() -> None:
    ranks.run(2, parts_go_in_as_they_came_out_alone)


def what_is_returned_elsewhere_is_whole() -> None:
    step = fdp.data_parallel(lambda state, x: {"elsewhere": state["w"] + fdp.pmean(x).sum(), "m": state["m"]})
    state = state_of()
    with pytest.warns(UserWarning, match=r"output\['elsewhere'\] whole: 192 B are gathered"):
        found = step(fdp.shard(state, min_size=0), torch.ones(4, 8))
    assert torch.equal(found["elsewhere"], state["w"] + 32) and type(found["elsewhere"]) is torch.Tensor
    assert type(found["m"]).__name__ == "DTensor"


def test_sharded_state_that_is_returned_elsewhere_is_gathered_with_a_warning() -> None:
    ranks.run(2, what_is_returned_elsewhere_is_whole)


def what_differs_stays_whole() -> None:
    step = fdp.data_parallel(lambda state, x: {"w": fdp.per_rank(state["w"] * x.sum()), "m": state["m"]})
    rank, state = int(fdp.axis_index()), state_of()
    found = step(fdp.shard(state, min_size=0), torch.full((2,), rank + 1.0))
    assert torch.equal(found["w"], state["w"] * (2 * rank + 2)) and type(found["m"]).__name__ == "DTensor"


def test_each_ranks_own_result_in_a_sharded_place_stays_whole() -> None:
    ranks.run(2, what_differs_stays_whole)


def other_shards_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    step = fdp.data_parallel(lambda state, x: state * 1)
    x = torch.ones(2)
    for leaf, why in (
        (distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)]), r"of shape \[5, 4\] that is divided by"),
        (DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()]), "divided by .*Replicate"),
        (DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]), "divided by .*Partial"),
        (DTensor.from_local(torch.ones(2, 4).t(), mesh, [Shard(0)], run_check=False), "with a part of shape|strides"),
    ):
        with pytest.raises(fdp.TraceError, match=why):
            step(leaf, x)
    whole = fdp.shard(torch.ones(4, 4), min_size=0)
    with pytest.raises(fdp.TraceError, match="in a batch argument"):
        step(torch.ones(2), whole)
    alone = fdp.data_parallel(lambda state, x: state * 1, group=torch.distributed.new_group([0, 1]))
    with pytest.raises(fdp.TraceError, match="of another mesh"):
        alone(whole, x)
    assert torch.equal(fdp.unshard(step(whole, x)), torch.ones(4, 4))


def test_other_shards_than_those_of_fdp_are_refused() -> None:
    for outcome in ranks.run_fresh(2, other_shards_are_refused):
        assert outcome.ok, outcome.describe()
