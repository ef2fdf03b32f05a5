"""Ways to get a wrong number out of a compiled step that were found by trying; each is right now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from fake_ranks import fake_group
from samples import exhaustive, some

import fdp
from fdp.emit.backend import resolve_backend
from fdp.runtime.emitted import Emitted

# Modules of inductor use what torch has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

Tree = Any
_aten = torch.ops.aten


def update(params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """Change parameters in place by an operator that a compiler knows nothing about."""
    _aten._fused_sgd_(
        params, grads, [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=False,
    )  # fmt: skip


def compare(step: Callable[..., Any], world: int = 1, donate: Any = 0) -> None:
    """Run a step twice, compiled and operator by operator: the same results, and the same in the inputs afterwards."""
    state, batch = {"w": torch.randn(4, 4), "other": torch.randn(4, 4)}, torch.randn(4, 4)
    group = fake_group(world)
    step = fdp.data_parallel(step, group=group, donate_argnums=donate, check_replication=False)
    plan = step.plan(state, batch)
    runs = []
    for compile in (False, True):
        emitted = Emitted(plan, group, backend=resolve_backend(compile))
        given: Tree = optree.tree_map(torch.clone, (state, batch))
        results = [emitted.dry_run(optree.tree_leaves(given)) for _ in range(2)]
        runs.append((results, given))
    torch.testing.assert_close(runs[1], runs[0])


# --- a new value that is changed in place before it becomes the state ---------------------------------------


@exhaustive
def test_state_that_is_decayed_in_place_before_its_update() -> None:
    def step(state: Tree, batch: Tree) -> Tree:
        w = state["w"].clone()
        w.mul_(0.9)
        update([w], [fdp.pmean(batch)])
        return {"w": w, "other": state["other"]}

    compare(step)


# --- operators that copy and do nothing else -----------------------------------------------------------------

COPIES = {
    "copy": lambda w: torch.empty_like(w).copy_(w),
    "sum with zeros": lambda w: w + torch.zeros_like(w),
    "quotient by ones": lambda w: w / torch.ones(4, 4),
    "there and back": lambda w: w.double().float(),
    "repeat": lambda w: w.repeat(1, 1),
    "first power": lambda w: w**1,
    "padding": lambda w: _aten.constant_pad_nd(w, [0, 0]),
    "one piece": lambda w: torch.cat([w]),
    "slice": lambda w: torch.slice_scatter(torch.zeros(4, 4), w),
    "clone": torch.clone,
}


@pytest.mark.parametrize("kind", some(COPIES, 5))
def test_a_copy_is_not_its_original(kind: str) -> None:
    copy = COPIES[kind]

    def step(state: Tree, batch: Tree) -> Tree:
        old, w, other = copy(state["w"]), state["w"].clone(), copy(state["other"])
        update([w, other], [batch, batch])
        return {"w": w, "other": state["other"]}, (w - old).norm(), other

    compare(step, donate=())
    compare(step)


SAME: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "x + 0": lambda x: x + 0,
    "0.0 + x": lambda x: 0.0 + x,
    "x - 0": lambda x: x - 0,
    "x * 1": lambda x: x * 1,
    "1.0 * x": lambda x: 1.0 * x,
    "x / 1": lambda x: x / 1,
    "in place": lambda x: (x * 1.0).add_(0),
    "a view": lambda x: x.view(16) * 1,
    "a row": lambda x: x[0] * 1.0,
    "turned": lambda x: x.t() + 0,
    "alpha": lambda x: x.add(x, alpha=0),
    "twice": lambda x: (x + 0) * 1,
    "another dtype": lambda x: (x > 0) * 1,
}
"""Arithmetic that changes nothing, by which a person makes a value of its own."""


def test_a_result_that_equals_donated_state_has_memory_of_its_own() -> None:
    shared = {"check_replication": False, "donate_argnums": 0}

    def kept(state: Tree, batch: Tree) -> Tree:
        changed = {"w": state["w"] * 0.5 + batch, "other": state["other"]}
        # Of a leaf that changes here, of one that only later calls change, and of a new value.
        return changed, {name: [f(state["w"]), f(state["other"]), f(changed["w"])] for name, f in SAME.items()}

    def later(state: Tree, batch: Tree) -> Tree:
        return {name: value * 0.25 + batch for name, value in state.items()}

    runs: list[Any] = []
    for compile in (False, True):
        step, change = fdp.data_parallel(kept, compile=compile, **shared), fdp.data_parallel(later, **shared)
        torch.manual_seed(0)
        state, batch = {"w": torch.randn(4, 4), "other": torch.randn(4, 4)}, torch.randn(4, 4)
        results, copies = [], []
        for _ in range(2):
            state, result = step(state, batch)
            results.append(result)
            copies.append(optree.tree_map(torch.clone, result))
            state = change(state, batch)
        torch.testing.assert_close(results, copies, rtol=0, atol=0)
        runs.append((results, state))
    torch.testing.assert_close(runs[1], runs[0])


@exhaustive
def test_such_arithmetic_cannot_be_left_out() -> None:
    from torch._inductor import config

    with pytest.raises(fdp.ArgumentError, match="share memory") as caught:
        fdp.data_parallel(lambda state: state, compile={"joint_graph_constant_folding": True})
    assert "leave it out" in str(caught.value)
    with config.patch({"joint_graph_constant_folding": True}):
        step = fdp.data_parallel(
            lambda state: (state, state["w"] * 1), donate_argnums=0, compile=True, check_replication=False
        )
        state = {"w": torch.ones(4)}
        state, result = step(state)
    assert state["w"].untyped_storage().data_ptr() != result.untyped_storage().data_ptr()


# --- what comes back from a message, and what a message of one rank leaves as it is --------------------------


def test_the_mean_over_one_rank_of_state_that_is_updated() -> None:
    def step(state: Tree, batch: Tree) -> Tree:
        old, w = fdp.pmean(state["w"]), state["w"].clone()
        update([w], [batch])
        return {"w": w, "other": state["other"]}, (w - old).norm(), old

    compare(step)


@exhaustive
def test_a_mean_that_is_read_again_after_another_was_made_from_it() -> None:
    def step(state: Tree, batch: Tree) -> Tree:
        mean = fdp.pmean(batch)
        holes = mean.index_put((torch.tensor([0, 2]),), torch.zeros(()))
        return {"w": state["w"] + holes, "other": state["other"] + mean}, mean.sum()

    compare(step, world=2)


@exhaustive
def test_a_mean_that_is_changed_in_place() -> None:
    def step(state: Tree, batch: Tree) -> Tree:
        mean = fdp.pmean(batch)
        before = mean * 1
        mean[0] += 1
        mean[:, 1].mul_(2)
        return {"w": state["w"] + before, "other": state["other"] + mean}, fdp.pmean(mean)

    compare(step, world=2)


# --- arithmetic that a compiler puts off ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "early",
    some([lambda w: w * 2, lambda w: w.t().contiguous().t(), lambda w: torch.nn.functional.avg_pool1d(w, 1)], 3),
    ids=["product", "transposed copy", "pool"],
)
def test_what_was_made_of_old_state_and_is_read_after_its_update(early: Callable[..., Any]) -> None:
    def step(state: Tree, batch: Tree) -> Tree:
        made, w = early(state["w"]), state["w"].clone()
        update([w], [batch])
        return {"w": w, "other": state["other"]}, (made - w).norm()

    compare(step)


# --- what is no tensor among an operator's arguments, and operators that cannot be taken apart ----------------


@exhaustive
def test_a_choice_between_two_functions() -> None:
    def step(state: Tree, batch: Tree) -> Tree:
        w = torch.cond(state["w"].sum() > 0, torch.sin, torch.cos, (state["w"],))
        return {"w": w, "other": state["other"] + fdp.pmean(batch)}

    compare(step)


@exhaustive
def test_a_generator_of_the_users_is_drawn_from() -> None:
    generator = torch.Generator()
    ends = []
    for compile in (False, True):
        step = fdp.data_parallel(lambda w, b: fdp.per_rank(w + b * torch.rand(2, generator=generator)), compile=compile)
        generator.manual_seed(1)
        ends.append([step(torch.ones(2), torch.ones(2)) for _ in range(2)])
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    assert not torch.equal(ends[0][0], ends[0][1])


@torch.library.custom_op("fdp_test::grow", mutates_args=("x",))
def grow(x: torch.Tensor) -> None:
    x.add_(1)


def test_an_operator_that_changes_its_argument_is_refused_by_name() -> None:
    def step(w: Tree, batch: Tree) -> Tree:
        w = w.clone()
        grow(w)
        return w + fdp.pmean(batch)

    with pytest.raises(fdp.CompileError, match=r"(?s)fdp_test\.grow\.default.*test_compiled_attacks.py.*Remedy: "):
        fdp.data_parallel(step, compile=True)(torch.ones(2), torch.ones(2))


def test_a_write_through_windows_is_refused_with_another_way() -> None:
    def step(w: Tree, batch: Tree) -> Tree:
        w = w.clone()
        w.unfold(0, 3, 2).copy_(batch.unfold(0, 3, 2))
        return fdp.per_rank(w)

    w, batch = torch.zeros(4), torch.arange(4.0)
    assert fdp.data_parallel(step)(w, batch).tolist() == [0.0, 1.0, 2.0, 0.0]
    with pytest.raises(fdp.CompileError, match=r"(?s)internal overlap.*Remedy: write to elements by indexing"):
        fdp.data_parallel(step, compile=True)(w, batch)


@pytest.mark.parametrize("compiled", some([False, True]))
def test_state_that_requires_gradients_in_inference_mode(compiled: bool) -> None:
    step = fdp.data_parallel(lambda st, b: {"w": st["w"] * 0.5 + fdp.pmean(b)}, compile=compiled)
    state = {"w": torch.ones(4, requires_grad=True)}
    with torch.inference_mode():
        w = step(state, torch.ones(4))["w"]
    assert w.tolist() == [1.5] * 4 and not w.requires_grad and not w.is_inference()
