"""Memory that several tensors lie in, and tensors that a step returned and gets again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest
import torch
from memory_changes import TABLE, WARNINGS, Tensor, Tree, cloned, same
from samples import exhaustive

import fdp

pytestmark = WARNINGS


def accumulates(s: Tree, b: Tensor) -> Tree:
    return {"w": s["w"] * 2 + fdp.pmean(b), "v": s["v"] + s["w"]}


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=exhaustive)], ids=["", "compiled"])
@pytest.mark.parametrize("shift", [0, 2])
def test_views_of_one_numpy_array(warm: bool, compiled: bool, shift: int) -> None:
    """Each has a storage of its own, and they share bytes; also with one array that goes on behind the other."""
    step = fdp.data_parallel(accumulates, donate_argnums=0, compile=compiled)
    if warm:
        s = {"w": torch.zeros(4), "v": torch.zeros(4)}
        for _ in range(3):
            s = step(s, torch.ones(4))
    array = np.arange(8, dtype=np.float32)
    one, two = torch.from_numpy(array[:4]), torch.from_numpy(array[shift : shift + 4])
    assert one.untyped_storage()._cdata != two.untyped_storage()._cdata
    fresh = torch.ones(4)
    for s, b in (({"w": one, "v": two}, fresh), ({"w": one, "v": fresh}, two), ({"w": two, "v": fresh}, one)):
        expected = accumulates(cloned(s), b.clone())
        same(step(s, b), expected)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_batch_in_the_middle_of_state_that_stays_where_it_is(start: int) -> None:
    """The state is recognised by its addresses; the batch lies in it at one call, and begins nowhere that it does."""
    array = np.arange(8, dtype=np.float32)
    s = {"w": torch.from_numpy(array[:4]), "v": torch.from_numpy(array[4:])}
    step = fdp.data_parallel(accumulates, donate_argnums=0)
    for _ in range(4):
        s = step(s, torch.ones(4))
    inside = torch.from_numpy(array[start : start + 4])
    expected = accumulates(cloned(s), inside.clone())
    same(step(s, inside), expected)
    assert step.traces == 2


def test_a_closed_over_tensor_is_one_memory_though_memory_is_collected_meanwhile() -> None:
    def step(w: Tensor, b: Tensor) -> Tensor:
        total = TABLE.sum()
        gc.collect()
        row = TABLE[0]
        gc.collect()
        row.add_(b)
        gc.collect()
        return w + total + TABLE.sum()

    with pytest.raises(fdp.PurityError, match=r"TABLE: aten\.add_"):
        fdp.data_parallel(step, check_replication=False)(torch.ones(3), torch.ones(3))


def test_a_closed_over_view_of_the_array_that_is_donated() -> None:
    array = np.arange(8, dtype=np.float32)
    anchor = torch.from_numpy(array[2:6])
    step = fdp.data_parallel(lambda w, b: w * 2 + anchor + fdp.pmean(b), donate_argnums=0)
    w = step(torch.zeros(4), torch.ones(4))  # right as long as it lies elsewhere
    step(w, torch.ones(4))
    with pytest.raises(fdp.PurityError, match="anchor lies in the memory of w"):
        step(torch.from_numpy(array[:4]), torch.ones(4))
    with pytest.raises(fdp.PurityError, match="anchor lies in the memory of w"):
        fdp.data_parallel(lambda w, b: w + anchor, donate_argnums=0)(torch.from_numpy(array[:4]), torch.ones(4))


def test_what_does_not_cover_its_memory_leaves_the_rest() -> None:
    """Nine elements of three windows lie on five of six places: the sixth is what it was."""

    def step(w: Tensor, b: Tensor) -> Tensor:
        v = b * 1
        v.unfold(0, 3, 2)[:2].copy_(w.expand(2, 3))
        return v

    with pytest.raises(fdp.ReplicationError):
        fdp.data_parallel(step)(torch.ones(1), torch.arange(6.0))

    def whole(w: Tensor, b: Tensor) -> Tensor:
        v = b.view(2, 3).t() * 1
        v.t().copy_(w.expand(2, 3))
        return v

    assert fdp.data_parallel(whole)(torch.ones(1), torch.arange(6.0)).tolist() == [[1.0, 1.0]] * 3


RETURNED: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda x: torch._neg_view(x),
    "imaginary part of a conjugate": lambda x: torch.complex(x, x + 1).conj().imag,
    "zeros": lambda x: torch._efficientzerotensor(x.shape) if x.sum() is None else torch._efficientzerotensor((4,)),
    "expanded": lambda x: x.sum().expand(4),
    "flipped view": lambda x: x.view(2, 2).t().reshape(4),
}


@pytest.mark.parametrize("name", list(RETURNED))
@pytest.mark.parametrize("donate", [pytest.param((), marks=exhaustive), 0], ids=["kept", "donated"])
def test_returned_state_goes_in_again(name: str, donate: Any) -> None:
    def train(s: Tree, b: Tensor) -> Tree:
        return {"x": RETURNED[name](s["x"] + fdp.pmean(b)), "y": RETURNED[name](s["x"])}

    def plain(s: Tree, b: Tensor) -> Tree:
        return {"x": RETURNED[name](s["x"] + b), "y": RETURNED[name](s["x"])}

    step = fdp.data_parallel(train, donate_argnums=donate)
    ours = {"x": torch.arange(4.0), "y": torch.zeros(4)}
    expected = cloned(ours)
    for call in range(3):
        ours, expected = step(ours, torch.full((4,), float(call))), plain(expected, torch.full((4,), float(call)))
        same(ours, expected)
        expected = optree.tree_map(lambda x: x + 0, expected)


def test_zeros_without_memory_do_not_go_in() -> None:
    step = fdp.data_parallel(lambda w, b: w + fdp.pmean(b), donate_argnums=0)
    for _ in range(2):
        step(torch.zeros(3), torch.ones(3))
    with pytest.raises(fdp.TraceError, match="w: zeros that take no memory; pass a clone"):
        step(torch._efficientzerotensor((3,)), torch.ones(3))


def test_what_a_failed_trace_runs_by_itself_leaves_no_trace() -> None:
    """Run the step itself, on copies, to see whether a failure is its own."""

    def step(w: Tensor, b: Tensor) -> Tensor:
        TABLE.add_(1)
        return w.set_(b.untyped_storage())

    before = TABLE.clone()
    with pytest.raises(fdp.TraceError):
        fdp.data_parallel(step)(torch.ones(3), torch.ones(3))
    assert torch.equal(TABLE, before)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_complex_state_that_is_conjugated(compiled: bool) -> None:
    step = fdp.data_parallel(
        lambda s, b: {"z": (s["z"] * 2).conj()}, donate_argnums=0, check_replication=False, compile=compiled
    )
    s = {"z": torch.tensor([1 + 1j, 2 - 1j])}
    for _ in range(2):
        s = step(s, torch.ones(1))
    assert s["z"].tolist() == [4 + 4j, 8 - 4j] and not s["z"].is_conj()
