"""New values of state and results do not overwrite what is still needed, wherever they are to lie."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from drawn_steps import Program
from emitted_calls import executor, three_calls  # noqa: F401 (`executor` is a fixture)
from samples import ALL_SAMPLES

import fdp

TABLE = torch.arange(12.0).view(4, 3)


def cloned(x: torch.Tensor, *, by: float = 1.0) -> torch.Tensor:
    """A clone that is changed in place, as optimizers do."""
    return x.clone().add_(by)


def read_after_its_clone_changed(s: Any, x: Any) -> Any:
    new = cloned(s["a"])
    return {"a": new}, [s["a"] * 2]


def read_by_a_collective_after_its_clone_changed(s: Any, x: Any) -> Any:
    new = cloned(s["a"])
    return {"a": new}, [fdp.pmean(s["a"]), fdp.all_gather(s["a"])]


def read_through_a_view_after_its_clone_changed(s: Any, x: Any) -> Any:
    view, new = s["a"].t()[1:], cloned(s["a"])
    return {"a": new}, [view + 0, new.t()[0]]


def averaged_beside_its_update(s: Any, x: Any) -> Any:
    return {"a": s["a"] + 1, "c": s["c"] * 2}, [fdp.pmean(s["a"]), fdp.psum(s["c"])]


def two_updates_of_one_leaf(s: Any, x: Any) -> Any:
    return {"a": cloned(s["a"]), "b": cloned(s["a"], by=2.0)}, []


def one_value_for_two_leaves(s: Any, x: Any) -> Any:
    new = s["a"] + x
    return {"a": new, "b": new}, [new]


def one_clone_for_two_leaves(s: Any, x: Any) -> Any:
    new = cloned(s["a"])
    return {"a": new, "b": new}, [new[1:]]


def swapped(s: Any, x: Any) -> Any:
    return {"a": s["b"], "b": s["a"]}, []


def swapped_and_changed(s: Any, x: Any) -> Any:
    return {"a": s["b"] + x, "b": cloned(s["a"])}, [s["b"]]


def one_leaf_for_both(s: Any, x: Any) -> Any:
    return {"a": s["b"], "b": s["b"]}, [s["a"]]


def a_view_of_another_leaf(s: Any, x: Any) -> Any:
    return {"a": s["c"].view(4, 3), "c": s["c"] + 1}, [s["c"][2:]]


def its_own_transpose(s: Any, x: Any) -> Any:
    return {"s": s["s"].t()}, []


def the_clone_of_its_transpose(s: Any, x: Any) -> Any:
    return {"s": s["s"].t().clone().add_(1)}, [s["s"].t()]


def transposed_in_between(s: Any, x: Any) -> Any:
    turned = s["s"].t()
    return {"s": cloned(turned.t())}, [turned @ s["s"], turned.t() @ s["s"]]


def an_average(s: Any, x: Any) -> Any:
    return {"a": fdp.pmean(x), "b": fdp.pmean(s["b"]), "c": fdp.pmean(s["c"]) + 1}, [s["a"] * 1]


def an_average_changed_in_place(s: Any, x: Any) -> Any:
    mean = fdp.pmean(x)
    before = mean * 1
    mean.add_(1)
    return {"a": mean, "b": fdp.pmean(x)}, [before, x * 1]


def averaged_and_then_changed(s: Any, x: Any) -> Any:
    local = x * 2
    mean = fdp.pmean(local)
    local.zero_()
    return {"a": mean, "b": local}, [mean, local]


def a_constant(s: Any, x: Any) -> Any:
    return {"a": TABLE, "d": torch.tensor(3.0)}, [TABLE, TABLE[1]]


def the_batch(s: Any, x: Any) -> Any:
    return {"a": x, "b": x[:]}, [x, x[1]]


def repeated_elements(s: Any, x: Any) -> Any:
    return {"a": s["d"].expand(4, 3), "b": x[:1].expand(4, 3)}, [s["a"]]


def returned_three_times(s: Any, x: Any) -> Any:
    new = cloned(s["a"])
    return {"a": new}, [new, new.view(12), s["a"]]


def late_update(s: Any, x: Any) -> Any:
    new = s["a"].clone()
    new.sub_(fdp.pmean(x))
    return {"a": new}, [s["a"] * fdp.pmean(x.sum()), fdp.psum(new)]


def list_update(s: Any, x: Any) -> Any:
    new, mean = [s["a"].clone(), s["b"].clone(), s["d"].clone()], fdp.pmean([x, x * 2, x.sum()])
    torch._foreach_add_(new, mean)
    torch._foreach_mul_(new, 0.5)
    return {"a": new[0], "b": new[1], "d": new[2]}, [s["b"] - new[1]]


def reshaped(s: Any, x: Any) -> Any:
    new = x * 2
    return {"c": new.view(12)}, [new.sum(1), new[1:]]


def reshaped_and_read_after(s: Any, x: Any) -> Any:
    new = (x + 1).view(12)
    return {"c": new}, [s["c"] * 2, new * 3]


def reshaped_of_itself(s: Any, x: Any) -> Any:
    return {"c": (s["c"].view(4, 3) * 2).view(12)}, []


def reshaped_product_of_itself(s: Any, x: Any) -> Any:
    return {"c": (s["c"].view(4, 3) @ (x.t() @ x)).view(12)}, []


def reshaped_for_two_leaves(s: Any, x: Any) -> Any:
    new = x * 3
    return {"c": new.view(12), "a": new, "b": new}, [new.view(2, 6)]


def reshaped_and_changed(s: Any, x: Any) -> Any:
    new = x * 2
    flat = new.view(12)
    new.add_(1)
    return {"c": flat}, []


def reshaped_part(s: Any, x: Any) -> Any:
    both = torch.cat([x, x + 1]).view(24)
    return {"c": both[:12], "a": torch.cat([x, x * 3]).view(24)[12:].view(4, 3)}, []


def reshaped_and_turned(s: Any, x: Any) -> Any:
    return {"c": (x * 2).t().reshape(12), "a": (x * 2).view(3, 4).t(), "b": (x.t() * 3).t()}, []


def reshaped_average(s: Any, x: Any) -> Any:
    return {"c": fdp.pmean(x).view(12), "a": (fdp.pmean(x.view(12)) * 1).view(4, 3)}, []


def reshaped_column(s: Any, x: Any) -> Any:
    column = x.reshape(1, 12).t() * 2  # of strides that no view of rows has
    assert column.stride() == (1, 12)
    return {"c": column.view(12)}, [column, column * 3]


def reshaped_copy(s: Any, x: Any) -> Any:
    return {"c": s["a"].clone().view(12), "a": s["b"].clone(), "b": torch.zeros_like(s["b"])}, [s["a"] + s["b"]]


HAZARDS = [
    read_after_its_clone_changed, read_by_a_collective_after_its_clone_changed, averaged_beside_its_update,
    read_through_a_view_after_its_clone_changed, two_updates_of_one_leaf, one_value_for_two_leaves,
    one_clone_for_two_leaves, swapped, swapped_and_changed, one_leaf_for_both, a_view_of_another_leaf,
    its_own_transpose, the_clone_of_its_transpose, transposed_in_between, an_average, an_average_changed_in_place,
    averaged_and_then_changed, a_constant, the_batch, repeated_elements, returned_three_times, late_update, list_update,
    reshaped, reshaped_and_read_after, reshaped_of_itself, reshaped_product_of_itself, reshaped_for_two_leaves,
    reshaped_and_changed, reshaped_part, reshaped_and_turned, reshaped_average, reshaped_copy,
    reshaped_column,
]  # fmt: skip


@pytest.mark.parametrize("case", HAZARDS, ids=lambda case: case.__name__)
def test_new_values_do_not_overwrite_what_is_still_needed(case: Any) -> None:
    def step(state: Any, batch: Any) -> Any:
        changed, extras = case(state, batch["x"])
        return {**state, **changed}, extras

    ways = list(itertools.product((1, 2), (False, True), ("auto", 1e-9)))
    for world, donate, cap in ways if ALL_SAMPLES else [(1, False, "auto"), (2, True, 1e-9)]:
        three_calls(Program(case.__name__, step), world, cap, donate)
    assert torch.equal(TABLE, torch.arange(12.0).view(4, 3))


def test_a_result_keeps_the_strides_of_dimensions_of_one_element() -> None:
    def step(c: torch.Tensor, x: torch.Tensor) -> Any:
        column = fdp.pmean(x).t() * 2
        return column.view(12), column

    x = torch.ones(1, 12)
    _, column = fdp.data_parallel(step, donate_argnums=0)(torch.zeros(12), x)
    assert column.stride() == (x.t() * 2).stride() == (1, 12)


@pytest.mark.parametrize("made", [lambda x: x * 2, lambda x: x.clone(), lambda x: (x.view(4, 3) * 2).view(12)])
def test_a_new_value_on_another_device_is_not_computed_in_the_old_one(made: Any) -> None:
    def step(old: torch.Tensor, x: torch.Tensor) -> Any:
        new = made(fdp.pmean(x))
        return new, new + 1

    # "meta" stands for a card: the new value lies on the CPU, and so does what is computed from it.
    transformed = fdp.data_parallel(step, donate_argnums=0, check_trace=False, check_replication=False)
    _, after = transformed(torch.zeros(12, device="meta"), torch.ones(12))
    assert torch.equal(after, made(torch.ones(12)) + 1)
