"""`MemoryPlan`: all that is decided about memory, as one value that nobody can change."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from fake_ranks import fake_group
from proved_steps import STEPS
from torch import fx

import fdp
from fdp.emit.memory.decisions import plan_memory
from fdp.emit.memory.memory_plan import MemoryPlan
from fdp.emit.memory.memory_table import Row, rows_of
from fdp.emit.memory.savings import ALL, COMPILER, NONE, Savings
from fdp.plan import Plan
from fdp.timeline.style import LIGHT, MIDDLE


def train_step(state: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
    def loss_fn(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return ((batch @ params["a"]).tanh() @ params["b"]).square().mean()

    loss, grads = fdp.value_and_grad(loss_fn)({name: state[name] for name in "ab"})
    momentum = {name: 0.9 * state[f"m{name}"] + grads[name] for name in "ab"}
    new = {name: state[name] - 0.1 * momentum[name] for name in "ab"}
    return {**new, **{f"m{name}": momentum[name] for name in "ab"}}, fdp.pmean(loss)


def planned(world: int = 2, savings: Savings = ALL) -> MemoryPlan:
    state = {name: torch.eye(32) for name in ("a", "b", "ma", "mb")}
    step = fdp.data_parallel(train_step, group=fake_group(world), bucket_cap_mb=0.002, donate_argnums=0)
    return plan_memory(step.plan(state, torch.ones(16, 32)), world > 1, savings)


def with_everything(savings: Savings) -> MemoryPlan:
    step, state, options = STEPS["everything"]
    transformed = fdp.data_parallel(step, group=fake_group(2), check_replication=False, donate_argnums=0, **options)
    return plan_memory(transformed.plan(state, torch.ones(4, 4)), True, savings)


# Frozen.


VALUES = (int, float, str, type(None), torch.dtype, torch.device, torch.Tensor, fx.Node, torch._ops.OpOverload, Plan)


def changeable(value: Any, path: str) -> Iterator[str]:
    """The parts of a value that can be changed, by where they are; each is tried."""
    if isinstance(value, VALUES):
        return  # what a plan consists of: itself no part of this one
    if isinstance(value, (tuple, frozenset)):
        for at, item in enumerate(value):
            yield from changeable(item, f"{path}[{at}]")
    elif isinstance(value, Mapping):
        try:
            value["anything"] = 0  # type: ignore[index]
        except TypeError:
            pass
        else:
            yield path
        for key, item in value.items():
            yield from changeable(item, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            try:
                setattr(value, field.name, part)
            except dataclasses.FrozenInstanceError:
                pass
            else:
                yield f"{path}.{field.name}"
            yield from changeable(part, f"{path}.{field.name}")
    else:
        yield path


@pytest.mark.parametrize("savings", [ALL, COMPILER, NONE], ids=["all", "compiler", "none"])
@pytest.mark.parametrize("make", [lambda savings: planned(2, savings), with_everything], ids=["training", "everything"])
def test_no_part_of_it_can_be_changed(make: Any, savings: Savings) -> None:
    assert list(changeable(make(savings), "plan")) == []


def test_a_part_that_can_be_changed_is_found() -> None:
    memory = planned()
    for name in ("markers", "layouts"):
        assert f"plan.{name}" in list(changeable(dataclasses.replace(memory, **{name: {}}), "plan"))
    opened = dataclasses.replace(memory.placement, copies=dict(memory.placement.copies), returned=[])
    found = list(changeable(dataclasses.replace(memory, placement=opened), "plan"))
    assert found == ["plan.placement.copies", "plan.placement.returned"]


# Printed.


def rows(memory: MemoryPlan) -> dict[str, Row]:
    found = {row.name: row for row in rows_of(memory)}
    assert len(found) == len(rows_of(memory))
    return found


def meet(one: Row, two: Row) -> bool:
    """Whether two pieces of a block share bytes, perhaps at different times."""
    ends = one.offset_bytes + one.size_bytes, two.offset_bytes + two.size_bytes
    return one.offset_bytes < ends[1] and two.offset_bytes < ends[0]


def test_what_lies_in_the_block_says_why_it_lies_there() -> None:
    memory = planned()
    (layout,) = memory.layouts.values()
    block = [row for row in rows_of(memory) if row.offset_bytes >= 0]
    assert {(row.offset_bytes, row.size_bytes, row.first, row.last) for row in block} == {
        (layout.offsets[each.key], each.size_bytes, each.first, each.last) for each in layout.pieces
    }
    named, kinds = rows(memory), set()
    for row in block:
        over = [other for other in block if other.first < row.first and meet(row, other)]
        if row.why.startswith("reused: in place of its argument "):
            other = named[row.why.rpartition(" ")[2]]
            assert (other.offset_bytes, other.last) == (row.offset_bytes, row.first)
        elif row.why.startswith("reused"):
            assert over and all(other.last < row.first for other in over)
        elif row.bucket is None:
            assert row.why == "first in its place" and not over
        kinds.add(row.why.partition(" in place of")[0])
    assert {"first in its place", "reused: others there are done", "reused:"} <= kinds
    for index in memory.markers:
        assert named[f"bucket {index}"].why.startswith("bucket: ")


def test_members_of_a_bucket_are_packed_or_computed_there() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        twice = x * 2  # which is read when its mean has come back, and so lies elsewhere
        mean, other = fdp.pmean((twice, (x @ w).tanh()))
        return mean + other + fdp.psum((twice * mean).sum())

    plan = fdp.data_parallel(step, group=fake_group(2)).plan(torch.eye(32), torch.ones(32, 32))
    assert rows(plan_memory(plan, True))["bucket 0"].why == "bucket: 1 computed in it, 1 packed into it"
    assert rows(plan_memory(plan, True, COMPILER))["bucket 0"].why == "bucket: 2 packed into it"


def test_donated_inputs_are_those_that_come_back() -> None:
    def step(state: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        x = fdp.pmean(x)
        new = {"a": state["a"].tanh() @ x, "b": state["b"] + 1, "c": state["a"], "d": state["d"].clone().add_(x)}
        return new, state["b"].sum()

    state = {name: torch.eye(4) for name in "abcd"}
    transformed = fdp.data_parallel(step, donate_argnums=0)
    memory = transformed.plan(state, torch.ones(4, 4)).memory_plan()
    told = {row.name: row.why for row in rows_of(memory) if row.why.startswith("donated")}
    new, _ = transformed(state, torch.ones(4, 4))
    assert {f"state['{name}']" for name in state if new[name] is state[name]} == told.keys() >= {"state['b']"}
    assert told["state['d']"] == "donated: updated in place"


def test_new_values_of_another_shape_and_copies_are_computed_where_they_belong() -> None:
    def step(state: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        x = fdp.pmean(x)
        new = {"a": (x @ x).view(2, 8), "b": (state["b"].view(16) + 1).view(4, 4), "c": x.clone()}
        return {**new, "d": torch.zeros_like(x), "e": (state["e"].view(4, 4) @ x).view(16)}

    state = {"a": torch.eye(8)[:2].clone(), **{name: torch.eye(4) for name in "bcd"}, "e": torch.ones(16)}
    memory = fdp.data_parallel(step, donate_argnums=0).plan(state, torch.ones(4, 4)).memory_plan()
    ways = {row.name[-3]: row.why.split()[1:] for row in rows_of(memory) if row.why.startswith("donated")}
    assert all(ways[name][1:] == ["is", "computed", "in", "it"] for name in "abc")
    # A constant, and a product that reads what it would write.
    assert all(ways[name][1:] == ["is", "copied", "into", "it"] for name in "de")


def test_what_is_kept_and_what_is_new() -> None:
    held = torch.ones(4)

    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        x, positions = w + fdp.pmean(x), torch.arange(4.0)
        return torch.nn.functional.layer_norm(x, (4,)).tanh() * positions, w.t(), held.view(2, 2)

    memory = fdp.data_parallel(step).plan(torch.ones(4, 4), torch.ones(4, 4)).memory_plan()
    named = rows(memory)
    end = max(row.last for row in named.values())
    assert [(row.first, row.last) for row in named.values() if row.why.startswith("persistent")] == [(0, end)]
    assert named["native_layer_norm[0]"].why == "new at each call" and named["native_layer_norm[0]"].last < end
    returned = [row for row in named.values() if row.why == "new: returned"]
    assert [row.size_bytes for row in returned] == [64] and returned[0].last == end
    copies = [row for row in named.values() if row.why.startswith("new: a copy of")]
    assert [(row.size_bytes, row.first) for row in copies] == [(16, end)]


def test_it_prints_the_largest_and_counts_the_others() -> None:
    memory = planned()
    text = str(memory)
    assert text.startswith("Memory plan of train_step: ") and "donated: " in text and "bucket 0" in text
    assert f"{len(memory.same)} views not made" in text
    layers = [torch.eye(4) * (k + 1) for k in range(30)]
    step = fdp.data_parallel(lambda w, x: [v + 1 for v in w], donate_argnums=0)
    plan = step.plan(layers, torch.ones(4, 4))
    assert "... and 6 smaller pieces" in str(plan.memory_plan())
    assert repr(memory).startswith("<MemoryPlan of train_step: ")


def test_it_is_drawn_address_against_time(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    memory = planned()
    (axes,) = memory.draw(tmp_path / "plan.png").axes
    block = [row for row in rows_of(memory) if row.offset_bytes >= 0]
    assert len(axes.patches) == len(block)
    for row, drawn in zip(block, axes.patches, strict=True):
        assert (drawn.get_x(), drawn.get_width()) == (row.first, row.last + 1 - row.first)
        assert drawn.get_y() == row.offset_bytes
        if row.bucket is None:
            grey = tuple(int(colour[at : at + 2], 16) / 255 for colour in [_grey(row)] for at in (1, 3, 5))
            assert drawn.get_facecolor()[:3] == pytest.approx(grey)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(fdp.ArgumentError, match="no kind of picture"):
        memory.draw("plan.txt")


def _grey(row: Row) -> str:
    return LIGHT if row.why == "first in its place" else MIDDLE
