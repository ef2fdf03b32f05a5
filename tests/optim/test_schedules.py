"""Schedules as functions of a count against the classes of `torch.optim.lr_scheduler`, stepped as in any script."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

import fdp
from fdp.errors import ArgumentError
from fdp.optim import Optimizer, from_torch, partition, schedule_from_torch, scheduled

Make = Callable[[Any], Any]
STEPS = 17


def class_by_hand(make: Make, lr: float, steps: int) -> list[float]:
    """The learning rate of each update of a script that steps the scheduler after the optimizer."""
    optimizer = torch.optim.AdamW([torch.zeros(2)], lr=lr)
    scheduler = make(optimizer)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR's own use of a deprecated argument
        for _ in range(steps):
            seen.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            scheduler.step()
    return seen


def chained(opt: Any) -> Any:
    return lrs.ChainedScheduler([lrs.ConstantLR(opt, 0.1, 3), lrs.ExponentialLR(opt, 0.9)])


def sequential(opt: Any) -> Any:
    warm_up, rest = lrs.LinearLR(opt, 0.1, total_iters=4), lrs.CosineAnnealingLR(opt, T_max=9)
    return lrs.SequentialLR(opt, [warm_up, rest], milestones=[5])


MAKES: dict[str, Make] = {
    "LambdaLR": lambda opt: lrs.LambdaLR(opt, lambda k: 1 / (1 + k**0.5)),
    "MultiplicativeLR": lambda opt: lrs.MultiplicativeLR(opt, lambda k: 0.95),
    "StepLR": lambda opt: lrs.StepLR(opt, 3, 0.3),
    "MultiStepLR": lambda opt: lrs.MultiStepLR(opt, [2, 7], 0.3),
    "ConstantLR": lambda opt: lrs.ConstantLR(opt, 0.3, 4),
    "LinearLR": lambda opt: lrs.LinearLR(opt, 0.3, total_iters=7),
    "ExponentialLR": lambda opt: lrs.ExponentialLR(opt, 0.9),
    "SequentialLR": sequential,
    "PolynomialLR": lambda opt: lrs.PolynomialLR(opt, 9, 1.7),
    "CosineAnnealingLR": lambda opt: lrs.CosineAnnealingLR(opt, 6, 1e-4),
    "ChainedScheduler": chained,
    "CyclicLR": lambda opt: lrs.CyclicLR(opt, 0.01, 0.1, 4, mode="exp_range", gamma=0.99, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda opt: lrs.CosineAnnealingWarmRestarts(opt, 3, 2),
    "OneCycleLR": lambda opt: lrs.OneCycleLR(opt, 0.2, total_steps=STEPS + 1, cycle_momentum=False),
    "SWALR": lambda opt: SWALR(opt, swa_lr=0.01, anneal_epochs=6),
}


@pytest.mark.parametrize("name", MAKES)
def test_every_class_has_its_own_learning_rates(name: str) -> None:
    expected = class_by_hand(MAKES[name], 0.037, STEPS)
    assert len(set(expected)) > 1
    schedule = schedule_from_torch(MAKES[name], lr=0.037, steps=STEPS)
    assert schedule(torch.arange(STEPS)).tolist() == expected
    assert [schedule(torch.tensor(k)).item() for k in range(STEPS)] == expected
    # The last value holds; there is no value before the first.
    assert schedule(torch.tensor([-1, STEPS, 10**9])).tolist() == [expected[0], expected[-1], expected[-1]]


def test_every_class_that_torch_has_is_either_exact_or_refused() -> None:
    shipped = {c.__name__ for c in vars(lrs).values() if isinstance(c, type) and issubclass(c, lrs.LRScheduler)}
    assert shipped - {"LRScheduler", "_LRScheduler"} == set(MAKES) - {"SWALR"} | {"ReduceLROnPlateau"}


class NeedsTheLoss(lrs.ExponentialLR):
    def step(self, *loss: float) -> None:
        if not loss and self._step_count:  # the constructor takes a first step
            raise TypeError("step() missing 1 required argument: 'loss'")
        super().step()


REFUSALS: list[tuple[Any, dict[str, Any], str, str]] = [
    (lrs.ReduceLROnPlateau, {}, "ReduceLROnPlateau follows the loss", "step the class in Python"),
    (lambda opt: lrs.CyclicLR(opt, 0.01, 0.1, 4), {}, "CyclicLR changes momentum", "cycle_momentum=False"),
    (lambda opt: lrs.OneCycleLR(opt, 0.2, 9), {}, "OneCycleLR changes momentum", "cycle_momentum=False"),
    (lambda opt: NeedsTheLoss(opt, 0.9), {}, "NeedsTheLoss takes more than the step count", "step count"),
    (lambda opt: None, {}, "make returned the NoneType None, not a scheduler", "return the scheduler"),
    (lambda opt: chained(torch.optim.SGD([torch.zeros(1)])), {}, "ChainedScheduler for another", "make one for"),
    (3, {}, "takes a function of an optimizer, not the int 3", "lambda optimizer:"),
    (chained, {"steps": 0}, "takes steps as a positive int, not the int 0", "steps=1000"),
    (chained, {"steps": 2.0}, "takes steps as a positive int, not the float 2.0", "steps=1000"),
    (chained, {"lr": -1.0}, "takes lr as a number, not the float -1.0", "lr=0.1"),
    (chained, {"lr": "big"}, "takes lr as a number, not the str 'big'", "lr=0.1"),
]


@pytest.mark.parametrize(("make", "given", "what", "remedy"), REFUSALS, ids=[what[:40] for _, _, what, _ in REFUSALS])
def test_refusals_of_schedules(make: Any, given: dict[str, Any], what: str, remedy: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        schedule_from_torch(make, **{"lr": 0.1, "steps": 5, **given})
    first, last = str(caught.value).split("\nRemedy: ")
    assert what in first and remedy in last


def test_a_schedule_takes_counts_that_are_tensors() -> None:
    schedule = schedule_from_torch(chained, lr=0.1, steps=5)
    assert repr(schedule) == "ChainedScheduler(5 steps from 0.01 to 0.06561)"
    assert schedule(torch.zeros((2, 3), dtype=torch.int32)).shape == (2, 3)
    for count in (3, torch.tensor(3.0), torch.tensor(True), torch.zeros((), dtype=torch.int64, device="meta")):
        with pytest.raises(ArgumentError, match=r"takes a count as an integer tensor on the CPU, not (.|\n)*add 1 a"):
            schedule(count)  # type: ignore[arg-type]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) and a.dtype == b.dtype


@pytest.mark.parametrize("donate", [False, True])
def test_a_step_follows_a_schedule_without_a_retrace(donate: bool) -> None:
    optimizer = scheduled(from_torch(torch.optim.AdamW), schedule_from_torch(MAKES["CosineAnnealingLR"], 0.037, 4))
    runs_in_python = []

    @fdp.data_parallel(donate_argnums=0 if donate else ())
    def step(state: Any, batch: Tensor) -> Any:
        runs_in_python.append(1)
        grads = fdp.grad(lambda w: (w * batch).sum())(state["w"])
        w, opt = optimizer.update(grads, state["opt"], state["w"])
        return {"w": w, "opt": opt}

    start = torch.randn(3, 4)
    by_hand = start.clone()
    reference = torch.optim.AdamW([by_hand], lr=0.037, fused=True)
    scheduler = MAKES["CosineAnnealingLR"](reference)
    state, first_calls = {"w": start.clone(), "opt": optimizer.init(start)}, 0
    assert state["opt"]["lr"].item() == 0.037
    for k in range(6):
        batch = torch.randn(3, 4)
        by_hand.grad = batch.clone()
        used = reference.param_groups[0]["lr"]
        reference.step()
        if k < 3:  # the last value of the table holds
            scheduler.step()
        state = step(state, batch)
        assert same(state["w"], by_hand) and state["opt"]["lr"].item() == used
        assert state["opt"]["count"].item() == k + 1
        first_calls = len(runs_in_python) if k <= 1 else first_calls  # traced and compared; compared
    assert len(runs_in_python) == first_calls


def test_schedules_of_torch_operations_and_of_other_hyperparameters() -> None:
    inner = from_torch(torch.optim.SGD, momentum=torch.tensor(0.5), nesterov=True)
    rates = {"lr": lambda k: 0.1 * 0.9 ** k.double(), "momentum": lambda k: 1 - 1 / (2 + k.double())}
    optimizer = scheduled(inner, rates)
    params = torch.randn(3)
    by_hand = params.clone()
    reference = torch.optim.SGD([by_hand], momentum=0.5, nesterov=True, foreach=False)
    opt_state = optimizer.init(params)
    assert sorted(opt_state) == ["count", "lr", "momentum", "state"]
    for k in range(4):
        grad = torch.randn(3)
        by_hand.grad = grad.clone()
        count = torch.tensor(k)
        reference.param_groups[0].update({name: rate(count).item() for name, rate in rates.items()})
        reference.step()
        params, opt_state = optimizer.update(grad, opt_state, params)
        assert same(params, by_hand)


def test_refusals_of_scheduled() -> None:
    sgd, constant = from_torch(torch.optim.SGD), schedule_from_torch(chained, 0.1, 3)
    with pytest.raises(ArgumentError, match="scheduled takes a function of the step count for 'lr', not"):
        scheduled(sgd, 0.1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="scheduled wraps an Optimizer, not the class"):
        scheduled(torch.optim.SGD, constant)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"has no tensor 'momentum'(.|\n)*as a tensor"):
        scheduled(sgd, {"momentum": constant}).init(torch.ones(2))
    parts = partition(lambda path, leaf: "all", {"all": sgd})
    with pytest.raises(ArgumentError, match=r"has no tensor 'lr'(.|\n)*Remedy: schedule each part"):
        scheduled(parts, constant).init(torch.ones(2))
    for bad in (lambda k: 0.1, lambda k: k, lambda k: k.double().reshape(1)):
        with pytest.raises(ArgumentError, match=r"the schedule of 'lr' returned .* not a 0-dim floating point tensor"):
            scheduled(sgd, bad).init(torch.ones(2))
    with pytest.raises(ArgumentError, match=r"scheduled keeps \['count'\] in the state, but an optimizer inside"):
        scheduled(scheduled(sgd, constant), constant).init(torch.ones(2))
    with pytest.raises(
        ArgumentError, match=r"which is the Tensor|which is a torch.float32(.|\n)*let init return a dict"
    ):
        scheduled(Optimizer(lambda p: p, lambda g, s, p: (p, s)), constant).init(torch.ones(2))
    optimizer = scheduled(sgd, constant)
    with pytest.raises(ArgumentError, match=r"must have the keys \['count'\] beside(.|\n)*make opt_state with init"):
        optimizer.update(torch.ones(2), sgd.init(torch.ones(2)), torch.ones(2))
    assert repr(optimizer) == f"scheduled({sgd!r}, {constant!r})"
