"""Changes through `as_strided` of a view, in compiled steps: torch takes those of the whole apart, and no others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import ALL_SAMPLES, exhaustive, some

import fdp
from fdp.emit.compiled.layouts import StrideKeeper

Change = Callable[[torch.Tensor], object]


def a_view_that_is_older(x: torch.Tensor) -> None:
    seen = x[1:].as_strided((2, 2), (1, 2))
    x.mul_(2)
    seen.mul_(3)
    seen.t().as_strided((2,), (1,)).add_(1)
    x.mul_(3)


def after_a_change_in_another_order(x: torch.Tensor) -> None:
    x.t().triu_()
    x[1:].as_strided((2, 2), (1, 2)).mul_(3)
    x.view(-1).add_(1)


CHANGES: dict[str, Change] = {
    "under another shape": lambda x: x.view(2, -1).as_strided((2, 2), (1, 2)).mul_(0.5),
    "what was changed before": lambda x: x.view(2, -1).mul_(2).as_strided((2, 2), (1, 2)).mul_(3),
    "one of several views": lambda x: x.unbind(0)[1].as_strided((2,), (1,)).mul_(3),
    "a view that was turned": lambda x: x.view(2, -1).unsqueeze_(0).as_strided((2, 2), (1, 2)).mul_(3),
    "an older view": a_view_that_is_older,
    "in another order": after_a_change_in_another_order,
}


def copied_out_of_something_larger(x: torch.Tensor) -> None:
    """The copy of a row is changed by places. Were it the row itself, the places would be those of the whole."""
    row = x[2].clone()
    x.add_(1)
    row.detach().unfold(0, 2, 2).copy_(x[2].unfold(0, 2, 2) * 3)
    x[0].copy_(row)


def added_in_another_order(x: torch.Tensor) -> None:
    """The sum with a product may be computed by rows, and is seen by columns; then windows of it are written to."""
    y = x * 0.5
    y.t().add_(x @ y)
    y.unfold(0, 2, 2).copy_(x.unfold(0, 2, 2))
    y[:2].unfold(1, 2, 2).mul_(2)
    x.copy_(y)


CHANGES["a copy of a part"] = copied_out_of_something_larger
CHANGES["a sum with a product"] = added_in_another_order
SOME = ["an older view"]
FROM_THE_BEGINNING = ["under another shape", "what was changed before", "a view that was turned"]


def of_donated_state(names: list[str], change: Callable[[Change, torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Changes are those of plain PyTorch, proved, and not compared."""

    def step(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: change(CHANGES[name], state[name]) for name in names}

    def made() -> dict[str, torch.Tensor]:
        return {name: x.clone() if x.storage_offset() == 0 else torch.cat([x[:1], x])[1:] for name in names}

    due = step(made())
    options = {"donate_argnums": 0, "check_trace": False, "check_replication": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that the graph is wrong, and the step runs operator by operator
        found = fdp.data_parallel(step, compile=True, **options)(made())  # type: ignore[arg-type]
    assert [name for name in names if not torch.equal(found[name], due[name])] == []


def itself(change: Change, x: torch.Tensor) -> torch.Tensor:
    change(x)
    return x


def a_new_value(change: Change, x: torch.Tensor) -> torch.Tensor:
    return itself(change, x * 1) + 0


def in_a_branch(change: Change, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: a_new_value(change, x), lambda x: x * 2, (x,))


@pytest.mark.parametrize("how", some([itself, a_new_value, in_a_branch], 3))
def test_what_is_changed_by_places_through_a_view(how: Callable[[Change, torch.Tensor], torch.Tensor]) -> None:
    of_donated_state(list(CHANGES) if ALL_SAMPLES else SOME, how, torch.arange(1.0, 17.0).view(4, 4))


@pytest.mark.parametrize("how", [itself, in_a_branch])
def test_the_proof_finds_a_wrong_place(
    how: Callable[[Change, torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = StrideKeeper.applied_to_base

    def one_further(changes: StrideKeeper, node: Any, args: Any, value_of: Any) -> Any:
        found = right(changes, node, args, value_of)
        return found if found is args else (*found[:3], (*found, 0)[3] + 1)

    monkeypatch.setattr(StrideKeeper, "applied_to_base", one_further)
    with pytest.warns(UserWarning, match="found to be wrong before it ran"):
        fdp.data_parallel(
            lambda x: how(CHANGES["one of several views"], x),
            compile=True, donate_argnums=0, check_trace=False, check_replication=False,
        )(torch.arange(1.0, 17.0).view(4, 4))  # fmt: skip


@exhaustive
def test_state_that_begins_in_the_middle_of_its_memory() -> None:
    of_donated_state(FROM_THE_BEGINNING, itself, torch.arange(-3.0, 17.0).view(5, 4)[1:])


@pytest.mark.parametrize("name", ["an older view", "in another order"])
def test_another_place_in_such_state_is_refused(name: str) -> None:
    with pytest.raises(fdp.CompileError, match="write through other views than as_strided"):
        of_donated_state([name], itself, torch.arange(-3.0, 17.0).view(5, 4)[1:])


def test_a_view_of_another_dtype_is_refused() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.view(torch.int32)[1:].as_strided((2, 2), (1, 2)).add_(1)
        return x

    with pytest.raises(fdp.CompileError, match="write through other views than as_strided"):
        fdp.data_parallel(step, donate_argnums=0, compile=True, check_replication=False)(torch.ones(4, 4))
