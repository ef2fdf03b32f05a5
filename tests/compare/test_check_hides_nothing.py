"""What a comparison of step and program must not hide: other ranks, inputs of first calls, lost updates, closures.

And what it must not refuse: rounding, however much a step makes of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from fake_ranks import fake_group

import fdp
from fdp.compare import check_emitted, fits_in_memory, op_by_op, recheck, side_by_side
from fdp.compare.copies import copy_of, perturb_
from fdp.compare.lockstep import in_order_of_plan
from fdp.compare.restored import closed_over_unchanged
from fdp.compare.rounding import Excuses, replay
from fdp.compare.ulps import change_last_places_
from fdp.distributed.other_ranks import OtherRanks
from fdp.plan import plan_trace
from fdp.runtime import Emitted
from fdp.step import first_call

OTHERS = OtherRanks(2, 0)


def made(step: Callable[..., Any], *args: Any, world: int = 2, **options: Any) -> tuple[Emitted, Any, Any]:
    """A program for two ranks of which one is there; the flattened arguments, and their roles."""
    transformed = fdp.data_parallel(step, group=fake_group(world), **options)
    flat, roles, (_, group, _) = transformed._resolve(args, {})
    return Emitted(plan_trace(transformed._preparation.trace(flat, roles, group)), group), flat, roles


def check(step: Callable[..., Any], *args: Any, **options: Any) -> None:
    emitted, flat, roles = made(step, *args, **options)
    check_emitted(emitted, step, flat, roles)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- other ranks hold something else -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64])
@pytest.mark.parametrize("op", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize(("size", "rank"), [(2, 1), (3, 0), (7, 4)])
def test_a_bucket_and_its_members_are_reduced_alike(dtype: torch.dtype, op: str, size: int, rank: int) -> None:
    if (op == "mean" and dtype == torch.int64) or (op in ("max", "min") and dtype.is_complex):
        return
    others = OtherRanks(size, rank)
    whole = (numbers(12) * 5).to(dtype)
    parts = [part.clone() for part in whole.split([5, 4, 3])]
    before = whole.clone()
    others.all_reduce_(whole, op)
    for part in parts:
        others.all_reduce_(part, op)
    assert torch.equal(whole, torch.cat(parts))
    if op != "max" or dtype != torch.int64:  # other ranks hold smaller integers
        assert not torch.equal(whole, before), "an identity hides mistakes"


def test_what_others_hold_stays_sane() -> None:
    others = OtherRanks(3, 1)
    gathered = torch.empty(3, 5)
    others.all_gather_(gathered, torch.tensor([0.0, 1e-30, 0.5, 60000.0, torch.inf]))
    assert (gathered[:, 0] == 0).all() and (gathered[:, 1:] > 0).all() and gathered[:, :4].isfinite().all()
    assert gathered[1].tolist() == [0.0, pytest.approx(1e-30), 0.5, 60000.0, torch.inf], "its own entry is its own"
    places_in_a_table = torch.empty(3, 4, dtype=torch.int64)
    others.all_gather_(places_in_a_table, torch.tensor([-100, 0, 1, 7]))
    assert places_in_a_table[0].tolist() == [-100, 0, 1, 6] and places_in_a_table[2].tolist() == [-100, 0, 1, 4]
    flags = torch.empty(3, 2, dtype=torch.bool)
    others.all_gather_(flags, torch.tensor([True, False]))
    assert flags.tolist() == [[False, True], [True, False], [False, True]]
    root, own = torch.ones(2), torch.ones(2)
    others.broadcast_(root, 0), others.broadcast_(own, 1)
    assert root.tolist() == [0.875, 0.875] and own.tolist() == [1.0, 1.0]


def test_the_axis_says_who_holds_what() -> None:
    for others in (OtherRanks(4, 2), OtherRanks(1, 0, "equal")):
        assert OtherRanks.of_axis(others.axis_name) == others
    assert OtherRanks.of_axis("eager") is None and OtherRanks.of_axis("traced") is None


def test_a_value_that_is_read_after_its_average_took_its_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row of the issue: a program that reads `g` where its bucket holds the average already."""

    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        g = x.T @ x
        p = g @ w
        mean = fdp.pmean(g)
        return fdp.per_rank(p * 1.0), mean

    emitted, flat, roles = made(step, numbers(4, 4), numbers(5, 4, seed=1))
    check_emitted(emitted, step, flat, roles)
    inner = emitted._function

    def late(tensors: list[torch.Tensor], start: Any, wait: Any) -> Any:
        w, (p, mean) = tensors[0].clone(), inner(tensors, start, wait)
        return [p.copy_(mean @ w), mean]

    monkeypatch.setattr(emitted, "_function", late)
    with pytest.raises(fdp.TraceError, match="what was emitted for step 'step' does not compute"):
        check_emitted(emitted, step, flat, roles)


def test_ranks_that_hold_something_else_may_be_too_much_for_a_step() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        return (fdp.pmean(x) - x.abs() + 1).sqrt() * w  # not a number, where others hold less

    def refuses(w: torch.Tensor, x: torch.Tensor) -> Any:
        if type(x) is torch.Tensor and not bool(torch.equal(fdp.psum(x) / 2, x)):
            raise ValueError("ranks have to agree")
        return w + 1

    check(step, torch.ones(1), torch.full((3,), 50.0), check_replication=False)
    check(refuses, torch.ones(1), torch.ones(3))


# --- perturbed inputs --------------------------------------------------------------------------------


def test_perturbed_copies_differ_everywhere_and_stay_what_they_are() -> None:
    zeros, ones, chance = (perturb_(x.clone(), 0.125, 3) for x in (torch.zeros(9000), torch.ones(9000), torch.ones(3)))
    assert (zeros > 0).all() and zeros.max() < 0.02 and (ones <= 1).all() and (ones > 0.87).all()
    assert len(ones[:8191].unique()) > 8000 and (chance <= 1).all()
    assert not torch.equal(perturb_(torch.ones(4), 0.125, 0), perturb_(torch.ones(4), 0.125, 1))
    for kept in (torch.arange(5), torch.tensor([True, False]), torch.tensor([3], dtype=torch.uint8)):
        assert torch.equal(perturb_(kept.clone(), 0.125, 0), kept)
    tied = torch.zeros(1).expand(4)
    assert perturb_(copy_of(tied), 0.125, 0).unique().numel() == 1
    late = torch.zeros(10)[3:8:2]
    assert (perturb_(copy_of(late), 0.125, 0) > 0).all()


def test_a_mistake_that_a_learning_rate_of_zero_hides_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[float] = []

    def step(state: Any, x: torch.Tensor) -> Any:
        grad = fdp.grad(lambda w: ((x @ w) ** 2).mean())(state["w"])
        new = state["w"] - state["lr"] * grad
        if type(x) is torch.Tensor and not lost:  # as a write behind the trace's back: only by itself
            new = new + state["lr"]
        return {"w": new, "lr": state["lr"] * 1.0}

    state = {"w": numbers(4), "lr": torch.zeros(())}
    with pytest.raises(fdp.TraceError, match=r"\['w'\]: \[4\] torch.float32 differs by"):
        check(step, state, numbers(5, 4))
    monkeypatch.setattr(side_by_side, "MOVES", ())
    check(step, state, numbers(5, 4))  # so it is the perturbed inputs that show it


def test_what_cannot_take_perturbed_inputs_is_compared_without() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        if type(x) is torch.Tensor and float(w[0]) != 1.0:
            raise ValueError("only ones")
        return w * 2 + fdp.pmean(x.sum()), (w - 1).sqrt()

    check(step, torch.ones(2), torch.ones(2))


# --- lost updates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bare", "dict", "donated"])
def test_a_lost_update_is_found_however_small_it_is(form: str) -> None:
    def step(state: Any, x: torch.Tensor) -> Any:
        w = state if form == "bare" else state["w"]
        new = w - 1e-6 * fdp.grad(lambda w: ((x @ w) ** 2).mean())(w)
        new = w * 1.0 if type(x) is torch.Tensor else new
        return new if form == "bare" else {"w": new}

    w = numbers(4) + 1
    with pytest.raises(fdp.TraceError, match="differs by"):
        check(step, w if form == "bare" else {"w": w}, numbers(5, 4), donate_argnums=0 if form == "donated" else ())


# --- rounding ----------------------------------------------------------------------------------------


def attention(p: Any, x: torch.Tensor) -> torch.Tensor:
    """The bias of the keys has a gradient of zero but for rounding."""
    q, k, v = x @ p["q"], x @ p["k"] + p["bias"], x @ p["v"]
    return ((torch.softmax(q @ k.transpose(-1, -2), -1) @ v) ** 2).mean()


def trains(p: Any, x: torch.Tensor) -> Any:
    rule = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-3)
    return rule.update(fdp.grad(attention)(p, x), rule.init(p), p)[0]


def attends() -> tuple[Any, torch.Tensor]:
    p = {key: numbers(64, 64, seed=at) / 8 for at, key in enumerate("qkv")}
    return {**p, "bias": torch.zeros(64)}, numbers(8, 32, 64, seed=9)


def with_other_softmax(emitted: Emitted, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the program, and the one that the lockstep runs, have another kernel for the softmax."""
    timed = emitted.timed

    def patched(program: Emitted) -> Emitted:
        kernels = program._function.__kwdefaults__
        (name,) = (name for name in kernels if "softmax" in name and "backward" not in name)

        def kernel(*args: Any, own: Any = kernels[name], **options: Any) -> Any:
            result = own(*args, **options)
            change(options.get("out", result))
            return result

        kernels[name] = kernel
        return program

    patched(emitted)
    monkeypatch.setattr(emitted, "timed", lambda tick, apart=False: patched(timed(tick, apart)))


def test_rounding_that_an_optimizer_amplifies_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    p, x = attends()
    emitted, flat, roles = made(trains, p, x)
    explained: list[Any] = []
    judged = op_by_op.check_graph
    monkeypatch.setattr(op_by_op, "check_graph", lambda *args: (explained.extend(args[1]), judged(*args)))
    with_other_softmax(emitted, monkeypatch, lambda x: change_last_places_(x, 1, torch.Generator().manual_seed(0)))
    check_emitted(emitted, trains, flat, roles)
    assert any("['bias']" in each.text for each in explained), "no result differed: the test shows nothing"


def test_a_wrong_operator_of_a_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    p, x = attends()
    emitted, flat, roles = made(trains, p, x)
    with_other_softmax(emitted, monkeypatch, lambda x: x.mul_(1.001))
    with pytest.raises(fdp.TraceError) as caught:
        check_emitted(emitted, trains, flat, roles)
    _, *offenders, _ = str(caught.value).splitlines()
    assert len(offenders) == 1 and "softmax" in offenders[0] and "test_check_hides_nothing.py" in offenders[0]


def test_the_order_of_a_plan_makes_the_bits_of_the_graph() -> None:
    p, x = attends()
    emitted, flat, _ = made(trains, p, x)
    one = replay(emitted, [t.clone() for t in flat.tensors], OTHERS)
    two = in_order_of_plan(emitted, [t.clone() for t in flat.tensors], OTHERS)
    assert all(torch.equal(*pair) for pair in zip(one, two, strict=True))


def test_noise_in_one_element_excuses_no_other() -> None:
    p, x = attends()
    emitted, flat, _ = made(trains, p, x)
    names = [output.name for output in emitted.plan.trace.outputs]
    bias, q = (next(at for at, name in enumerate(names) if name.endswith(f"['{key}']")) for key in ("bias", "q"))
    excuses = Excuses(emitted, lambda: [t.clone() for t in flat.tensors], OTHERS, [bias, q])
    assert excuses.excused(q, excuses.exact[q] * (1 + 1e-7)) and excuses.excused(bias, -excuses.exact[bias])
    lost = excuses.exact[q].clone()
    lost[0] = p["q"][0]  # the update of one row
    assert not excuses.excused(q, lost) and not excuses.excused(q, p["q"])
    assert not excuses.excused(bias, excuses.exact[bias] + 1)
    assert not excuses.excused(q, excuses.exact[q].double())


# --- closed-over tensors -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["numpy", "data"])
def test_closed_over_tensors_come_out_as_they_were(way: str) -> None:
    count = torch.zeros(3)
    emitted, flat, roles = made(lambda w, x: w * count.sum() + fdp.pmean(x), torch.ones(2), torch.ones(2))

    def behind(w: torch.Tensor, x: torch.Tensor) -> Any:
        if way == "numpy":
            count.numpy()[0] += 1
        else:
            count.data.view(-1).add_(1)
        return w * count.sum() + fdp.pmean(x)

    with pytest.raises(fdp.PurityError, match=r"changes tensors that it closes over(.|\n)*count"):
        check_emitted(emitted, behind, flat, roles)
    assert count.tolist() == [0, 0, 0]


def test_closed_over_tensors_are_put_back_when_the_step_raises() -> None:
    held = torch.tensor([1.0, float("nan")])
    emitted, _, _ = made(lambda w, x: w * held[0] + fdp.pmean(x), torch.ones(2), torch.ones(2))
    with pytest.raises(fdp.PurityError) as caught, closed_over_unchanged(emitted):
        held.zero_()
        raise ValueError("later")
    assert held[0] == 1 and held[1].isnan() and isinstance(caught.value.__cause__, ValueError)


# --- again, later ------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_comes_again_for_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, compared = Clock(), list[int]()
    monkeypatch.setattr(recheck, "clock", clock)
    plan = recheck.Again(first_s=5.0, owed=False)
    for call in range(2, 5000):
        clock.now += 1.0 if call != plan.at else 0.0
        if call == plan.at:

            def compare(call: int = call) -> bool:
                compared.append(call)
                clock.now += 4.0
                return True

            def run() -> None:
                clock.now += 1.0

            plan.look(compare, run)
            assert plan.spent_s <= 0.01 * call
    assert compared == [512, 1024, 2048, 4096]


def test_what_is_owed_comes_whatever_it_takes_and_until_nothing_is_refused() -> None:
    plan, compared = recheck.Again(first_s=1e9, owed=True), list[int]()

    def refuses() -> bool:
        raise fdp.TraceError("no")

    def agrees() -> bool:
        compared.append(plan.at)
        return True

    assert plan.at == 2
    for call in (3, 4):
        with pytest.raises(fdp.TraceError):
            plan.look(refuses, lambda: pytest.fail("what was refused ran"))
        assert plan.at == call  # the next call is looked at again
    assert plan.look(agrees, lambda: "ran") == "ran"
    assert len(compared) == 1
    plan.look(lambda: pytest.fail("there is no time for it"), lambda: None)


def test_what_the_first_inputs_hide_is_found_before_the_second_call() -> None:
    def step(state: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
        # A number that the trace holds fast; of a state of zeros nobody can tell.
        return {"m": state["m"] * (2.0 if tracing else 3.0) + fdp.pmean(x)}

    tracing = True
    checked = fdp.data_parallel(step, donate_argnums=0)
    original = first_call.check_emitted

    def untraced(*args: Any, **kwargs: Any) -> Any:
        nonlocal tracing
        tracing = False
        return original(*args, **kwargs)

    with mock.patch.object(first_call, "check_emitted", untraced):
        first = checked({"m": torch.zeros(3)}, torch.ones(3))
    assert torch.equal(first["m"], torch.ones(3))  # which is right
    for _ in range(2):
        with pytest.raises(fdp.TraceError, match="does not compute what the step computes"):
            checked(first, torch.ones(3))
    assert torch.equal(first["m"], torch.ones(3))


def test_a_number_that_changed_since_the_trace_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recheck, "SHARE", 1e9)
    rate = [0.1]
    step = fdp.data_parallel(lambda w, x: w - rate[0] * x.sum(), check_replication=False)
    w, x = torch.ones(2), torch.ones(2)
    for _ in range(5):  # the first look measures a call, and the one at call 4 compares
        step(w, x)
    rate[0] = 0.2
    for _ in range(2):
        step(w, x)
    with pytest.raises(fdp.TraceError, match="does not compute what the step computes"):
        step(w, x)  # call 8
    unchecked = fdp.data_parallel(lambda w, x: w - rate[0] * x.sum(), check_replication=False, check_trace=False)
    for call in range(9):
        rate[0] = float(call)
        unchecked(w, x)


# --- memory ------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_skipped_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    step = fdp.data_parallel(lambda w, x: w + fdp.pmean(x.sum()))
    monkeypatch.setattr(fits_in_memory, "available_bytes", lambda device: 3)
    with pytest.warns(UserWarning, match="comparison at the first call of step .* was skipped: it takes about"):
        step(torch.ones(8), torch.ones(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            step(torch.ones(8), torch.ones(8))


def test_memory_that_runs_out_on_the_way_is_no_mistake_of_the_step() -> None:
    emitted, _, _ = made(lambda w, x: w + fdp.pmean(x), torch.ones(2), torch.ones(2))

    def no_memory() -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    def another() -> None:
        raise RuntimeError("something else")

    with pytest.warns(UserWarning, match="memory ran out"):
        assert not fits_in_memory.if_memory_allows(emitted, "the comparison", no_memory)
    with pytest.raises(RuntimeError, match="something else"):
        fits_in_memory.if_memory_allows(emitted, "the comparison", another)
    assert fits_in_memory.needed_bytes(emitted)[torch.device("cpu")] >= 3 * 8
    assert 0 < fits_in_memory.available_bytes(torch.device("cpu")) <= 2**62
