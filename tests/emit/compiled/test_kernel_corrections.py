"""Scatters that read what they change, sums of bytes, and numbers read from float64 tensors, in compiled steps."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuzz.plain import numbers
from samples import ALL_SAMPLES, few
from torch._inductor import config

import fdp
from fdp.emit.compiled import inductor
from fdp.pytorch.parts import release

ROWS = torch.tensor([3, 0, 4, 1, 2])


def places(i: torch.Tensor) -> torch.Tensor:
    return i[:, None].expand(5, 3)


SCATTERS = {
    "index_copy": lambda a, i: a.index_copy_(0, i, a.clone()),
    "rows": lambda a, i: a.__setitem__(i, a.clone()),
    "index_put": lambda a, i: a.index_put_((i,), a.clone(), accumulate=True),
    "index_add": lambda a, i: a.index_add_(0, i, a.clone()),
    "index_add of a product": lambda a, i: a.index_add_(0, i, a * 2),
    "scatter": lambda a, i: a.scatter_(0, places(i), a.clone()),
    "scatter_add": lambda a, i: a.scatter_add_(0, places(i), a.clone()),
    "scatter_reduce": lambda a, i: a.scatter_reduce_(0, places(i), a.clone(), "amax"),
    "put": lambda a, i: a.put_(i, a.view(-1)[:5].clone()),
    "places of itself": lambda a, i: a.index_copy_(0, a[:, 0].argsort(), a * 1),
    "a new value of itself": lambda a, i: a.copy_(torch.index_copy(a, 0, i, a)),
    "a sum of itself": lambda a, i: (lambda t: a.copy_(t.index_put((i,), t, accumulate=True)))(a * 2),
    "other rows of itself": lambda a, i: (lambda t: a.copy_(t.index_put((i,), t[i.flip(0)])))(a * 2),
    "slice": lambda a, i: (lambda t: a.copy_(t.slice_scatter(t[:-1], 0, 1, 5)))(a * 2),
}
TAKEN = few(SCATTERS, 3)


def scattering(state: Any, i: torch.Tensor) -> Any:
    found = []
    for name, scatter in TAKEN.items():
        made = state[name] * 1
        scatter(made, i)
        scatter(state[name], i)
        found.append(made * 1)
    return state, found


def scattered() -> tuple[Any, torch.Tensor]:
    return {name: torch.arange(15.0).view(5, 3) - 6 for name in TAKEN}, ROWS


def test_a_scatter_reads_the_old_values_of_what_it_changes() -> None:
    options: Any = {"donate_argnums": 0, "check_trace": False, "check_replication": False}
    due, found = scattering(*scattered()), fdp.data_parallel(scattering, compile=True, **options)(*scattered())
    assert [name for name in TAKEN if not torch.equal(due[0][name], found[0][name])] == []
    assert [name for name, one, two in zip(TAKEN, due[1], found[1], strict=True) if not torch.equal(one, two)] == []


def move_rows(w: torch.Tensor, i: torch.Tensor) -> Any:
    moved = w * 1
    moved[i] = moved.clone()
    return w, moved * 1


def test_rows_that_change_places_at_a_later_call() -> None:
    """At the first call each row is written where it lies, and nothing shows."""

    w = torch.arange(15.0).view(5, 3)
    compiled = fdp.data_parallel(move_rows, compile=True, check_replication=False)
    for index in (torch.arange(5), ROWS):
        assert torch.equal(compiled(w, index)[1], move_rows(w, index)[1])


@pytest.mark.skipif(release(torch.__version__) >= (2, 15), reason="inductor copies the rows there")
def test_without_the_correction_rows_are_read_that_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "scatters_read_other_memory", lambda table: contextlib.nullcontext())

    with config.patch(force_disable_caches=True), pytest.raises(fdp.CompileError, match="rounding does not explain it"):
        fdp.data_parallel(move_rows, compile=True, check_replication=False)(torch.arange(15.0).view(5, 3), ROWS)


def test_sums_of_bytes() -> None:
    kinds = [(k, dtype, dims) for k in (9, 40) for dtype in (torch.int8, torch.uint8) for dims in ((), (0,), (1,))]

    def step(state: torch.Tensor, x: torch.Tensor) -> Any:
        return state, [(x * k).abs().to(dtype).sum(*dims, dtype=dtype) for k, dtype, dims in kinds]

    def alone(state: torch.Tensor, x: torch.Tensor) -> Any:
        return state, (x * 9).to(torch.int8).sum(dtype=torch.int8)

    x = numbers((4, 6), 0, False)
    for each in (step, alone):
        due = each(x, x)[1]
        torch.testing.assert_close(fdp.data_parallel(each, compile=True, check_replication=False)(x, x)[1], due)


def test_places_of_the_extremes_of_bytes() -> None:
    def step(state: torch.Tensor, x: torch.Tensor) -> Any:
        of_rows = [x.argmax(1), x.argmin(1, keepdim=True), *x.max(1), *x.min(1), *x.max(0), x.argmax()]
        return state, [*of_rows, *x.to(torch.uint8).max(1), *x.to(torch.int16).min(1)]

    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-60, 60, (5, 70), generator=generator).to(torch.int8)
    due = step(x, x)[1]
    found = fdp.data_parallel(step, compile=True, check_trace=False, check_replication=False)(x, x)[1]
    torch.testing.assert_close(found, due)


def test_targets_end_at_the_first_minus_one() -> None:
    targets = torch.tensor([[1, 0, -1, 2, 2, 0], [1, 0, 3, -1, -1, 2], [0, 1, 2, 3, 4, 5], [-1, 0, 0, 0, 0, 0]])

    reductions = ("mean", "sum", "none") if ALL_SAMPLES else ("mean",)

    def losses(x: torch.Tensor) -> list[torch.Tensor]:
        found = [F.multilabel_margin_loss(x, targets, reduction=reduction) for reduction in reductions]
        return [*found, F.multilabel_margin_loss(x[0], targets[0])]

    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        gradient = fdp.grad(lambda y: sum(loss.sum() for loss in losses(y)))(w * x)
        return w, [*losses(w * x), gradient]

    w, x = torch.ones(()), numbers((4, 6), 1, False)
    due, found = step(w, x)[1], fdp.data_parallel(step, compile=True, check_replication=False)(w, x)[1]
    torch.testing.assert_close(found, due)


def test_numbers_read_from_float64_tensors_keep_all_their_digits() -> None:
    def step(state: torch.Tensor, x: torch.Tensor) -> Any:
        rate, power = state.sum().item(), 1 - 0.9 ** state[0].item()
        return state, [x - rate, x * power, torch.where(x > rate, x, rate), x.float() * rate, (x / rate).float()]

    state, x = torch.full((3,), 0.1, dtype=torch.float64), torch.linspace(0, 1, 5, dtype=torch.float64)
    due, found = step(state, x)[1], fdp.data_parallel(step, compile=True, check_replication=False)(state, x)[1]
    for one, two in zip(found, due, strict=True):
        assert one.dtype == two.dtype
        torch.testing.assert_close(one, two, rtol=1e-15 if one.dtype == torch.float64 else 1e-6, atol=1e-16)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.RMSprop])
def test_optimizers_with_a_learning_rate_of_their_state_train_in_float64(cls: Any) -> None:
    rule = fdp.optim.from_torch(cls, lr=0.1, **({"fused": False} if cls is torch.optim.Adam else {}))
    start = numbers((4, 3), 2, False).double()

    def step(state: Any, x: torch.Tensor) -> Any:
        grads = fdp.grad(lambda w: ((x @ w) ** 2).mean())(state["w"])
        w, opt = rule.update(grads, state["opt"], state["w"])
        return {"w": w, "opt": opt}, x.sum()

    x = numbers((5, 4), 3, False).double()
    ends = []
    for compile in (False, True):
        state = {"w": start, "opt": rule.init(start)}
        made = fdp.data_parallel(step, compile=compile, check_replication=False)
        for _ in range(3):
            state, _ = made(state, x)
        ends.append(state["w"])
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-13, atol=1e-14)


LISTS = {
    "add": lambda a, c: torch._foreach_add([a, c], [c, a]),
    "addcmul": lambda a, c: torch._foreach_addcmul([a, c], [c, a], [a, c]),
    "lerp": lambda a, c: torch._foreach_lerp([a, c], [c, a], 0.25),
    "div": lambda a, c: torch._foreach_div([a, c], [c.abs() + 1, a.abs() + 1]),
    "maximum": lambda a, c: torch._foreach_maximum([a, c], [c, a]),
    "one by one": lambda a, c: [a + c.flip(0), c + a.flip(0)],
}


def exchange(state: Any, x: torch.Tensor) -> Any:
    return {name: dict(zip("ac", of(**state[name]), strict=True)) for name, of in LISTS.items()}, x.sum()


def exchange_in_place(state: Any, x: torch.Tensor) -> Any:
    for name, of in LISTS.items():
        for held, new in zip(state[name].values(), of(**state[name]), strict=True):
            held.copy_(new)
    return state, x.sum()


@pytest.mark.parametrize("step", [exchange, exchange_in_place])
def test_entries_of_lists_read_the_old_values_of_others(step: Any) -> None:
    def state() -> Any:
        return {name: {"a": numbers((5, 3), 1, False), "c": numbers((5, 3), 2, False)} for name in LISTS}

    options: Any = {"donate_argnums": 0, "check_trace": False, "check_replication": False}
    due, found = step(state(), ROWS)[0], fdp.data_parallel(step, compile=True, **options)(state(), ROWS)[0]
    torch.testing.assert_close(found, due)
