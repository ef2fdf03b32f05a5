"""What a step reads besides its arguments is part of its signature: later changes are seen, and nothing else traces."""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from bits import same_bits_or_equal
from hidden_reads import HIDDEN
from module_reads import CHANGED
from outside_cases import CASES, Case, Config, Trainer
from rare_reads import RARE
from samples import exhaustive, some
from swapped_reads import SWAPPED

import fdp

Tree = Any

W, BATCH = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -1.0])


def compare(case: Callable[[], Case], **options: Any) -> None:
    """At every call the step returns what the function does, as long as nothing changes without a new trace."""
    fn, changes = case()
    step = fdp.data_parallel(fn, check_trace=False, check_replication=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors that were assigned anew
        for change in [lambda: None, *changes]:
            change()
            for _ in range(2):
                assert same_bits_or_equal(step(W, BATCH), fn(W, BATCH))
            traced = step.traces
            assert same_bits_or_equal(step(W, BATCH), fn(W, BATCH)) and step.traces == traced
    assert step.traces <= 1 + len(changes)


@pytest.mark.parametrize("case", some([*CASES, *HIDDEN], 4))
def test_what_is_read_from_outside_is_seen_when_it_changes(case: Callable[[], Case]) -> None:
    compare(case)


@pytest.mark.parametrize("case", CHANGED)
def test_modules_and_objects_of_libraries_that_change_are_seen(case: Callable[[], Case]) -> None:
    compare(case)


@pytest.mark.parametrize("case", RARE)
def test_what_objects_of_rarer_kinds_hold_is_seen(case: Callable[[], Case]) -> None:
    compare(case)


@pytest.mark.parametrize("case", SWAPPED)
def test_changes_that_leave_sizes_as_they_are_are_seen(case: Callable[[], Case]) -> None:
    compare(case)


def test_entries_of_a_list_that_the_step_appends_to_are_seen() -> None:
    rates = [2.0]

    def fn(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        rates.append(0.0)
        return w * rates[0] + fdp.pmean(batch.sum())

    step = fdp.data_parallel(fn)
    for call in range(12):  # in some of which it is compared again
        if call == 6:
            rates[0] = 3.0
        assert same_bits_or_equal(step(W, BATCH), W * rates[0] + BATCH.sum())
    assert step.traces == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.__setitem__(1, torch.nn.ReLU()),
        lambda m: m.append(torch.nn.ReLU()),
        lambda m: m.__delitem__(1),
        lambda m: setattr(m[2], "inner", torch.nn.ReLU()),
    ],
)
def test_other_parts_of_a_module_taken_apart_are_refused_at_the_next_call(change: Callable[[Any], Any]) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Sequential(torch.nn.Tanh()))
    apply, params, buffers = fdp.from_module(module)
    step = fdp.data_parallel(lambda p, x: fdp.pmean(apply(p, buffers, x)[0].sum()))
    assert step(params, W) == step(params, W) and step.traces == 1
    change(module)
    for _ in range(2):
        with pytest.raises(fdp.ArgumentError, match="was changed after from_module took it apart"):
            step(params, W)


def test_numbers_of_python_that_a_trace_freezes_are_said() -> None:
    def fn(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w + fdp.pmean(b.sum()) if random.random() < 2 else w

    with pytest.warns(UserWarning, match="draws random numbers from Python's or NumPy's generators"):
        fdp.data_parallel(fn)(W, BATCH)


@exhaustive
@pytest.mark.parametrize("case", CASES)
def test_compiled_what_is_read_from_outside_is_seen(case: Callable[[], Case]) -> None:
    compare(case, compile=True)


class WithStep:
    def __init__(self, scale: float) -> None:
        self.scale, self.unread = scale, 0

    @functools.partial(fdp.data_parallel, static_argnums=0)
    def step(self, w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return w * self.scale + fdp.pmean(batch.sum())


def test_what_is_read_of_a_static_object_is_seen() -> None:
    """Of one that equals itself whatever it holds: two of them, and each again after it was changed."""
    one, other = WithStep(2.0), WithStep(3.0)
    for scale in (2.0, 5.0):
        one.scale = scale
        for each in (one, other, one):
            each.unread += 1
            assert same_bits_or_equal(each.step(W, BATCH), W * each.scale + BATCH.sum())
    assert WithStep.step.traces == 3


def test_equal_static_objects_are_one() -> None:
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        scale: float

    step = fdp.data_parallel(lambda c, w, b: w * c.scale + fdp.pmean(b.sum()), static_argnums=0)
    for scale in (2.0, 3.0, 2.0):
        assert same_bits_or_equal(step(Frozen(scale), W, BATCH), W * scale + BATCH.sum())
    assert step.traces == 2


def test_values_that_come_back_find_their_program() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    apply, params, buffers = fdp.from_module(module)
    step = fdp.data_parallel(lambda p, x: fdp.pmean(apply(p, buffers, x)[0].mean()))
    x = torch.randn(5, 3)
    for training in (True, False) * 4:
        module.train(training)
        assert torch.allclose(step(params, x), apply(params, buffers, x)[0].mean())
    assert step.traces == 2


def test_what_the_step_does_not_read_is_no_part_of_it() -> None:
    trainer = Trainer()
    step = fdp.data_parallel(trainer.step)
    for call in range(6):
        step(W, BATCH)
        trainer.epoch = call
        trainer.log.append(call)
        trainer.config.unread = call
        trainer.config = Config()  # equal to the last one
    assert step.traces == 1


def test_what_the_step_itself_assigns_is_no_part_of_it() -> None:
    count, seen, cache = 0, [], {}  # type: ignore[var-annotated]

    def fn(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        seen.append(w.shape)
        cache[len(seen)] = 1
        return w + fdp.pmean(batch.sum())

    step = fdp.data_parallel(fn)
    for _ in range(20):  # in some of which it is compared again
        assert same_bits_or_equal(step(W, BATCH), W + BATCH.sum())
    assert step.traces == 1 and count > 2


def test_a_view_of_a_large_dict_is_left_out_as_the_dict_is() -> None:
    """To look at it would take longer than the step, at every call."""
    rates = dict.fromkeys(range(5000), 1.0)
    values = rates.values()
    step = fdp.data_parallel(lambda w, b: w * len(values) + fdp.pmean(b.sum()))
    for key in range(3):
        rates[key] = 2.0
        step(W, BATCH)
    assert step.traces == 1


def test_what_makes_no_difference_is_given_up_with_a_warning() -> None:
    epoch = 0

    def fn(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        str(epoch)
        return w * 2 + fdp.pmean(batch.sum())

    step = fdp.data_parallel(fn)
    programs = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in range(12):
            epoch = call
            step(W, BATCH)
            programs |= {id(known.emitted) for known in step._known.values()}
    assert step.traces == 9 and len(programs) == 1
    assert sum("because of epoch, which it reads from outside, and each trace was the same" in str(c.message)
               for c in caught) == 1  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "grow"), [(list, lambda log, call: log.append(call)), (dict, lambda log, call: log.update({call: call}))]
)
def test_what_grows_at_every_call_is_given_up_as_a_whole(kind: Any, grow: Callable[[Any, int], None]) -> None:
    log = kind()
    step = fdp.data_parallel(lambda w, b: w * (1 if log is None else 2) + fdp.pmean(b.sum()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(24):
            grow(log, call)
            assert same_bits_or_equal(step(W, BATCH), W * 2 + BATCH.sum())
    assert step.traces <= 10


def test_code_that_autoreload_has_replaced_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))

    def helper(w: torch.Tensor) -> torch.Tensor:
        return w * 2

    step = fdp.data_parallel(lambda w, b: helper(w) + fdp.pmean(b.sum()))
    assert same_bits_or_equal(step(W, BATCH), W * 2 + BATCH.sum())
    helper.__code__ = (lambda w: w * 3).__code__
    assert same_bits_or_equal(step(W, BATCH), W * 3 + BATCH.sum())


def test_constants_of_another_type_or_sign_are_others() -> None:
    held = Config()
    step = fdp.data_parallel(lambda w, b: (fdp.pmean(b), held.scale), check_trace=False)
    for scale in (1, True, 1.0, 0.0, -0.0, None):
        held.scale = scale  # type: ignore[assignment]
        assert repr(step(W, BATCH)[1]) == repr(scale)


def test_what_is_read_of_bound_methods_and_tuples_that_are_static_is_seen() -> None:
    trainer = Trainer()

    def fn(loss: Any, pair: Any, w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return loss(w, batch) * pair[0].scale

    step, pair = fdp.data_parallel(fn, static_argnums=(0, 1)), (Trainer(),)
    for changed in (trainer, trainer.config, pair[0]):
        changed.scale += 1
        assert same_bits_or_equal(step(trainer.step, pair, W, BATCH), fn(trainer.step, pair, W, BATCH))


def test_it_says_which_tensor_was_assigned_anew_and_lets_go_of_the_old_one() -> None:
    held = {"w": torch.ones(3)}
    step = fdp.data_parallel(lambda w, b: w * held["w"] + fdp.pmean(b.sum()))
    step(W, BATCH)
    with pytest.warns(
        UserWarning, match=r"traced again, because of held\['w'\].*another object was assigned.*argument"
    ):
        held["w"] = torch.full((3,), 2.0)
        step(W, BATCH)
    assert len(step._known) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held["w"] = torch.full((3,), 3.0)
        assert same_bits_or_equal(step(W, BATCH), W * 3 + BATCH.sum())


def test_the_warning_about_traces_names_what_is_read_from_outside() -> None:
    scale = 0.0

    def fn(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w * scale + fdp.pmean(b.sum())

    step = fdp.data_parallel(fn)
    with pytest.warns(UserWarning, match=r"8th time.*: scale, which the step reads from outside: 6\.0 became 7\.0"):
        for call in range(8):
            scale = float(call)
            step(W, BATCH)


def alone() -> tuple[list[float], str]:
    """A value that all ranks change; one that makes no difference on one rank; and one that one rank changes alone."""
    scale, note = 2.0, "none"

    def fn(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        str(note)
        return w * scale + fdp.pmean(b.sum())

    step = fdp.data_parallel(fn)
    rank = torch.distributed.get_rank()
    found = [step(W, BATCH * (rank + 1))[0].item()]
    scale = 3.0
    found.append(step(W, BATCH * (rank + 1))[0].item())
    if rank == 0:
        note = "one"
    found.append(step(W, BATCH * (rank + 1))[0].item())
    if rank == 0:
        scale = 4.0
    try:
        step(W, BATCH)
    except fdp.FdpError as error:
        return found, f"{type(error).__name__}: {error}"
    return found, "none"


def test_ranks_trace_again_together_and_disagree_where_one_does_alone() -> None:
    for outcome in ranks.run_fresh(2, alone, deadline_s=60):
        assert outcome.ok, outcome.describe()
        found, error = outcome.value
        assert found == [1.25, 2.25, 2.25] and error.startswith("AgreementError")
        assert "traced again (scale, which the step reads from outside: 3.0 became 4.0)" in error


def test_a_module_that_is_let_go_of_is_not_kept() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)).eval()
    apply, params, _ = fdp.from_module(module)
    step = fdp.data_parallel(lambda p, x: fdp.pmean(apply(p, {}, x)[0].sum()))
    first = step(params, W)
    weight = weakref.ref(module[0].weight)
    del module
    gc.collect()
    assert weight() is None
    assert same_bits_or_equal(step(params, W), first) and step.traces == 1


def test_an_object_that_has_died_behind_its_proxy_is_no_error() -> None:
    target, held = Config(3.0), types.SimpleNamespace(scale=2.0)
    held.proxy = weakref.proxy(target)
    step = fdp.data_parallel(lambda w, b: w * held.scale + fdp.pmean(b.sum()) if hasattr(held, "proxy") else w)
    step(W, BATCH)
    del target
    held.scale = 4.0
    assert same_bits_or_equal(step(W, BATCH), W * 4 + BATCH.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.bool], ids=str)
def test_a_program_with_constants_of_its_own_serves_again_whatever_their_dtype(dtype: torch.dtype) -> None:
    beside = 1.0

    def step(w: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert beside  # read, and of no consequence
        return w + torch.tensor([1.0, 0.0]).to(dtype).to(w.dtype), torch.tensor(1.0, dtype=dtype)

    made = fdp.data_parallel(step)
    for _ in range(3):
        w, constant = made(torch.zeros(2), torch.ones(1))
        assert w.tolist() == [1.0, 0.0] and constant.dtype == dtype and constant.item() == 1.0
        beside += 1.0
    assert made.traces == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_constants_that_differ_in_one_bit_are_other_programs(dtype: torch.dtype) -> None:
    value = 0.0

    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.clone()
        batch[batch > 0] = value  # which differs from rank to rank; so nothing is known of the constant ahead
        return fdp.per_rank(torch.signbit(batch))

    made = fdp.data_parallel(step)
    batch = torch.tensor([-1.0, 1.0], dtype=dtype)
    assert made(torch.ones(2), batch).tolist() == [True, False]
    value = -0.0
    assert made(torch.ones(2), batch).tolist() == [True, True]
