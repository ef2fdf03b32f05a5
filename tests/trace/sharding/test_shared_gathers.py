"""Small values that are gathered near each other share a message, and nothing else is another one by that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.nn.functional as F
from gather_choices import gather_again
from hypothesis import given
from hypothesis import strategies as st
from samples import examples, exhaustive
from sharded_steps import numbers

import fdp
from fdp import pytree
from fdp.plan import Start, Wait
from fdp.trace.sharding import shared_gathers

State = dict[str, Any]
Step = Callable[[State, torch.Tensor], Any]


def layers(state: State, x: torch.Tensor) -> Any:
    """Matrices and biases that are read one after the other, forwards and backwards."""

    def loss(p: State) -> torch.Tensor:
        h = x
        for at in range(3):
            h = torch.tanh(F.linear(h, p[f"w{at}"], p[f"b{at}"]))
        return h.square().mean()

    value, grads = fdp.value_and_grad(loss)(state)
    return pytree.map_leaves(lambda p, g: p - 0.1 * g, state, grads), fdp.pmean(value)


def of_layers() -> State:
    shapes = {f"w{at}": (12, 12) for at in range(3)} | {f"b{at}": (12,) for at in range(3)}
    return {name: numbers(*shape, seed=at) for at, (name, shape) in enumerate(shapes.items())}


def mixed(state: State, x: torch.Tensor) -> Any:
    """Of three dtypes, in rows and in columns, and one that is transposed before it is gathered."""
    turned = (state["rows"] * 2).t()
    seen = state["columns"] @ state["columns"].t(), state["half"].float().sort(), state["count"].cumsum(0)
    seen = *seen, turned @ turned.t(), state["half"].flip(0), state["count"].flip(0), state["rows"].cumsum(0)
    return state | {"rows": state["rows"] * 0.5}, (seen, fdp.pmean(x).sum())


def of_mixed() -> State:
    return {
        "rows": numbers(12, 6, seed=1),
        "columns": numbers(7, 12, seed=2),
        "half": numbers(6, 6, seed=3).bfloat16(),
        "count": torch.arange(12),
    }


def changed(state: State, x: torch.Tensor) -> Any:
    """Gathered, changed, and gathered again, beside values that stay."""
    w, u = state["w"] * 1, state["u"]
    first = u @ w
    w.mul_(2)
    second = u.t() @ w
    w.add_(u)
    return {"w": w, "u": u + 0.1 * fdp.pmean(x).sum(), "v": state["v"]}, (first, second, w @ state["v"], u.cumsum(0))


def of_changed() -> State:
    return {name: numbers(6, 6, seed=at) for at, name in enumerate("uvw")}


def accumulated(state: State, x: torch.Tensor) -> Any:
    """Read in a loop."""

    def loss(p: State, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ p["u"]) @ p["v"]).square().mean() + p["w"].square().mean()

    value, grads = fdp.accumulate(fdp.value_and_grad(loss), microbatches=2)(state, x)
    return pytree.map_leaves(lambda p, g: p - 0.1 * g, state, grads), fdp.pmean(value) + state["w"].trace()


STEPS: dict[str, tuple[Step, Callable[[], State], tuple[int, int]]] = {
    "layers": (layers, of_layers, (4, 12)),
    "mixed": (mixed, of_mixed, (8, 6)),
    "changed": (changed, of_changed, (6, 6)),
    "accumulated": (accumulated, of_changed, (4, 6)),
}


def messages(step: fdp.Step, state: State, x: torch.Tensor) -> list[str]:
    """In the order in which they are sent."""
    return [each.name for each in step.plan(state, x).trace.reductions if each.op == "all_gather"]


def together_and_each_alone(name: str, compile: bool, again: bool) -> tuple[int, int, bool]:
    """How many messages there are, how many each by itself, and whether all numbers are the same."""
    function, start, shape = STEPS[name]
    x, results, counts = numbers(*shape, seed=9) + fdp.axis_index(), [], []
    for share in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not share:
                patch.setattr(shared_gathers, "SMALL_BYTES", 0)
            if again:
                gather_again(patch)
            # What is gathered each by itself is what the rest is compared with.
            step = fdp.data_parallel(function, compile=compile, check_trace=share)
            state, seen = fdp.shard(fdp.replicate(start()), min_size=0), []
            counts.append(len(messages(step, state, x)))
            for _ in range(3):
                state, result = step(state, x)
                seen += [result, fdp.unshard(state)]
            results.append(seen)
    same = zip(*map(pytree.leaves_of, results), strict=True)
    return counts[0], counts[1], all(torch.equal(one, two) for one, two in same)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=exhaustive)])
@pytest.mark.parametrize(("name", "shared", "alone"), [("layers", 1, 6), ("mixed", 4, 6), ("changed", 3, 5)])
def test_fewer_messages_bring_the_same_numbers(size: int, name: str, shared: int, alone: int) -> None:
    assert ranks.run(size, together_and_each_alone, name, False, False) == [(shared, alone, True)] * size


def test_what_is_gathered_again_shares_other_messages() -> None:
    """Forwards six values, backwards two of them."""
    assert ranks.run(2, together_and_each_alone, "layers", False, True) == [(2, 8, True)] * 2


def test_what_is_read_in_a_loop_is_gathered_before_it_by_one_message() -> None:
    """The other one is part of a gradient that is added to what the loop has made."""
    assert ranks.run(2, together_and_each_alone, "accumulated", False, False) == [(2, 4, True)] * 2


@exhaustive
def test_a_compiled_step_sends_as_few() -> None:
    assert ranks.run(2, together_and_each_alone, "layers", True, False) == [(1, 6, True)] * 2


def with_limits(small: int, together: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_gathers, "SMALL_BYTES", small)
        patch.setattr(shared_gathers, "TOGETHER_BYTES", together)
        return messages(fdp.data_parallel(layers), fdp.shard(of_layers(), min_size=0), torch.ones(4, 12))


def test_a_message_has_its_limit_and_what_is_large_a_message_of_its_own() -> None:
    """A matrix has 576 bytes, a bias 48. Messages are sent in the order in which they are needed."""
    (limited, _), (biases, _) = (ranks.run(2, with_limits, *limits) for limits in ((576, 2 * 624), (100, 10_000)))
    assert limited == ["state['w0'] and 3 more", "state['w2'] and 1 more"]
    assert biases == ["state['w0']", "state['b0'] and 2 more", "state['w1']", "state['w2']"]


def gathered_ahead(limit: int) -> tuple[int, list[torch.Tensor]]:
    """The most bytes of whole values that are gathered at once beside the one that is waited for; and results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_gathers, "SMALL_BYTES", 0)
        patch.setattr(shared_gathers, "AHEAD_BYTES", limit)
        state, x = fdp.shard(of_layers(), min_size=0), numbers(4, 12, seed=9) + fdp.axis_index()
        step = fdp.data_parallel(layers, check_trace=limit == 0)
        plan, under_way, most = step.plan(state, x), list[int](), 0
        for item in plan.schedule:
            if isinstance(item, (Start, Wait)) and plan.buckets[item.bucket].op == "all_gather":
                # What was sent before something that has arrived has arrived, too.
                under_way = (
                    [*under_way, item.bucket]
                    if isinstance(item, Start)
                    else [bucket for bucket in under_way if bucket > item.bucket]
                )
                most = max(most, sum(2 * plan.buckets[b].size_bytes for b in under_way[1:]))
        state, loss = step(state, x)
        return most, [loss, *pytree.leaves_of(fdp.unshard(state))]


def ahead_of_limits() -> list[int]:
    found = [gathered_ahead(limit) for limit in (0, 600, 10_000)]
    for _, other in found:
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], other, strict=True))
    return [most for most, _ in found]


def test_no_more_is_gathered_ahead_than_the_limit_says() -> None:
    """Three matrices of 576 bytes and three biases of 48, by turns. What one operator reads is gathered at once."""
    (found, other) = ranks.run(2, ahead_of_limits)
    assert found == other == [48, 576, 3 * 576 + 3 * 48 - 576]


Program = list[tuple[str, int]]


def as_told(program: Program, state: State) -> Any:
    """Change entries element by element, and read them as a whole, in some order."""
    made, seen = {key: value.clone() for key, value in state.items()}, []
    for what, at in program:
        key, other = f"w{at}", f"w{(at + 1) % len(state)}"
        if what == "double":
            torch._foreach_mul_([made[key]], 2)  # which leaves the name to what it was
        elif what == "add":
            made[key].add_(made[other])
        elif what == "new":
            made[key] = made[key] + 1
        else:
            seen.append(made[key].cumsum(0))
    return made, seen


def is_right(program: Program) -> bool:
    start = {f"w{at}": torch.arange(30.0).reshape(5, 6) + at for at in range(3)}  # divided by columns
    found, seen = fdp.data_parallel(lambda state: as_told(program, state), batch_argnums=())(
        fdp.shard(start, min_size=0)
    )
    mine, due = (fdp.unshard(found), seen), as_told(program, start)
    return all(torch.equal(a, b) for a, b in zip(*map(pytree.leaves_of, (mine, due)), strict=True))


instructions = st.tuples(st.sampled_from(["double", "add", "new", "read", "read"]), st.integers(0, 2))


@examples(25)
@given(st.lists(instructions, min_size=3, max_size=12))
def test_programs_that_change_and_read_in_any_order_see_what_they_would(program: Program) -> None:
    assert ranks.run(2, is_right, program) == [True, True]
