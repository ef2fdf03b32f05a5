"""Every way in which Python changes a tensor out of the dispatcher's sight, or under another name: right, or refused.

What is right is compared with the step itself, as plain torch runs it, over several calls, operator by operator and
compiled: results, what donated arguments hold afterwards, and that no tensor of the caller changes its strides. What is
refused names its line, and leaves what the step closes over as it was (test_memory_changes_refused.py).
docs/reference/memory-changes.md has the same table.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

import numpy as np
import optree
import pytest
import torch
from memory_changes import (
    DONATED,
    RIGHT,
    SCALE,
    SCALES,
    TABLE,
    WARNINGS,
    Tensor,
    Tree,
    batch,
    cloned,
    geometry,
    reads_numbers_of_what_it_closes_over,
    same,
    state,
)
from refused_memory_changes import REFUSED
from samples import exhaustive, some
from torch import nn

import fdp

pytestmark = WARNINGS


@pytest.mark.parametrize("compiled", some([False, True]))
def test_numbers_of_closed_over_tensors_are_read_anew(compiled: bool) -> None:
    step = fdp.data_parallel(reads_numbers_of_what_it_closes_over, check_replication=False, compile=compiled)
    try:
        for call in range(3):
            SCALE.fill_(2.0 + call)
            SCALES.fill_(3.0 - call)
            same(step(state(), batch(call)), reads_numbers_of_what_it_closes_over(state(), batch(call)))
    finally:
        SCALE.fill_(2.0)
        SCALES.copy_(torch.tensor([2.0, 3.0]))
    assert step.traces == 1


@pytest.mark.parametrize("name", list(RIGHT))
def test_values_of_the_step(name: str) -> None:
    given, table = state(), TABLE.clone()
    before = cloned(given)
    step = fdp.data_parallel(RIGHT[name], check_replication=False)
    for call in range(3):
        found = step(given, batch(call))
        same(found, RIGHT[name](cloned(given), batch(call)))
        for leaf in optree.tree_leaves(found):
            leaf.fill_(77)  # what a call returned is the caller's: no later call looks at it
    same(given, before)
    assert geometry(given) == geometry(before) and torch.equal(TABLE, table) and step.traces == 1


def all_at_once(s: Tree, b: Tensor) -> Tree:
    return {name: case(s, b) for name, case in RIGHT.items()}


@exhaustive
def test_values_of_a_compiled_step() -> None:
    given, table = state(), TABLE.clone()
    before = cloned(given)
    step = fdp.data_parallel(all_at_once, check_replication=False, compile=True)
    for call in range(3):
        found = step(given, batch(call))
        same(found, all_at_once(cloned(given), batch(call)))
        for leaf in optree.tree_leaves(found):
            leaf.fill_(77)
    same(given, before)
    assert geometry(given) == geometry(before) and torch.equal(TABLE, table)


@pytest.mark.parametrize("name", list(DONATED))
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=exhaustive)], ids=["", "compiled"])
def test_donated_arguments(name: str, compiled: bool) -> None:
    """The arguments hold afterwards what plain torch leaves in them, wherever the step says something of them."""
    case = DONATED[name]
    step = fdp.data_parallel(case, donate_argnums=0, check_replication=False, compile=compiled)
    ours, plain = state(), state()
    for call in range(4):
        passed, strides = dict(ours), geometry(ours)
        found, expected = step(ours, batch(call)), case(plain, batch(call))
        same(found, expected)
        assert geometry(passed) == strides
        if "not_returned" in name:
            same(passed["k"], plain["k"])
            ours, plain = {**found[0], "k": passed["k"]}, {**expected[0], "k": plain["k"]}
        else:
            ours, plain = found, cloned(expected)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("rows", "after"), [(2**8, 0.0), (2**8 + 1, 1.0)], ids=["kept", "too large to be kept"])
def test_writes_to_an_array_that_a_tensor_looks_at(rows: int, after: float, check: bool) -> None:
    array = np.zeros((rows, 2**8), dtype=np.float32)
    table = torch.from_numpy(array)

    def step(b: Tensor) -> Tensor:
        array[-1, -1] += 1
        return fdp.pmean(b.sum()) + table.sum()

    with pytest.raises(fdp.PurityError, match="table: its values changed") as caught:
        fdp.data_parallel(step, check_trace=check)(torch.ones(3))
    assert ("stays as it is now" in str(caught.value)) == bool(after)
    assert array[-1, -1] == after
    array[-1, -1] = 0
    steady = fdp.data_parallel(lambda b: fdp.pmean(b.sum()) + table.sum(), check_trace=check)
    assert steady(torch.ones(3)) == 3 and not array.any()


def all_arguments_of_a_module(s: Tree, b: Tensor) -> Tree:
    """A module that changes its own parameters by `.data` while it runs, as a momentum encoder does."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            self.k.data = self.k.data * 0.9 + self.q.data * 0.1
            return (x @ self.k).sum()

    out = torch.func.functional_call(Encoder(), {"q": s["w"], "k": s["k"]}, (b,))
    return {"w": s["w"] + 1, "k": s["k"], "lr": s["lr"] + out}


def test_parameters_that_a_module_changes_while_it_runs() -> None:
    step = fdp.data_parallel(all_arguments_of_a_module, donate_argnums=0, check_replication=False)
    ours, plain = state(), state()
    for call in range(3):
        ours, plain = step(ours, batch(call)), all_arguments_of_a_module(plain, batch(call))
        same(ours, plain)
    with pytest.raises(
        fdp.PurityError, match=r"s\['k'\]: s\['k'\].data = ... at test_memory_changes.py:\d+ in forward"
    ):
        fdp.data_parallel(all_arguments_of_a_module, check_replication=False)(state(), batch(0))


def test_the_table_in_the_documents_names_each_test() -> None:
    page = (pathlib.Path(__file__).parents[3] / "docs" / "reference" / "memory-changes.md").read_text()
    rows = [line.rsplit("|", 2)[1] for line in page.splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    known = {*RIGHT, *DONATED, *REFUSED}
    assert named == known, (named - known, known - named)


def test_arrays_that_are_copied_are_constants() -> None:
    array = np.arange(3, dtype=np.float32)
    step = fdp.data_parallel(lambda w, b: w + torch.tensor(array) + torch.as_tensor(array).mul(2))
    for _ in range(2):
        assert step(torch.ones(3), torch.ones(3)).tolist() == [1.0, 4.0, 7.0]


def test_views_of_a_closed_over_tensor_that_come_as_a_list() -> None:
    table = torch.randn(4, 4)

    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        return state + batch.sum() * table.chunk(2)[1].sum(), table.split(2)[0] * 2

    x = torch.randn(3)
    found = fdp.data_parallel(step, batch_argnums=())(torch.ones(2), x)
    torch.testing.assert_close(found, step(torch.ones(2), x))
