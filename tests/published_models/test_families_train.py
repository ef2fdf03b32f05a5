"""Every family under every optimizer that `from_torch` takes: no comparison refuses rounding for a mistake.

An optimizer divides by the size of a gradient, so that rounding of one which is zero in exact arithmetic (of a key's
bias, say) moves a parameter as far as any other. Each model trains for `CALLS` calls on two ranks, and is compared at
calls 1, 2, 4, 8, ... whatever that takes. By default one family and one optimizer, for a few calls; FDP_ALL_SAMPLES=1
takes all of both.
"""

from __future__ import annotations

import time
import traceback
import warnings
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from families import FAMILIES, MORE
from family_forms import (
    INSTALLED,
    RELEASE,
    RIGHT,
    TABLE_IS_OF,
    batch_of,
    forms_of,
    in_chunks,
    model_loss,
    own_loss,
)
from optimizer_classes import CLASSES
from samples import ALL_SAMPLES

import fdp
from fdp.compare import recheck

pytestmark = pytest.mark.skipif(not INSTALLED, reason="no transformers: pip install fdp[huggingface]")

CALLS = 32 if ALL_SAMPLES else 8
COMPARED = 5 if ALL_SAMPLES else 3
OPTIMIZERS: dict[str, Any] = {
    "AdamW": {"lr": 1e-3}, "Adam": {"lr": 1e-3}, "SGD": {"lr": 1e-2, "momentum": 0.9}, "NAdam": {"lr": 1e-3},
    "RAdam": {"lr": 1e-3}, "Adamax": {"lr": 1e-3}, "Adagrad": {"lr": 1e-2}, "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 1e-3}, "Rprop": {"lr": 1e-3}, "ASGD": {"lr": 1e-3}, "Adafactor": {"lr": 1e-3},
    "Muon": {"lr": 1e-3},
}  # fmt: skip
Case = tuple[str, str]


def optimizer_of(name: str) -> fdp.optim.Optimizer:
    optimizer = fdp.optim.from_torch(getattr(torch.optim, name), **OPTIMIZERS[name])
    if name != "Muon":
        return optimizer
    rest = fdp.optim.from_torch(torch.optim.AdamW, **OPTIMIZERS["AdamW"])
    return fdp.optim.partition(
        lambda path, leaf: "matrices" if leaf.dim() == 2 else "rest", {"matrices": optimizer, "rest": rest}
    )


def train(name: str, optimizer_name: str) -> int:
    """Train a family; how often the step was compared."""
    family = {**FAMILIES, **MORE}[name]
    labelled = forms_of(name)[0]
    loss_of = model_loss if labelled else own_loss
    apply, params, buffers = fdp.from_module(family.build())
    optimizer, rank = optimizer_of(optimizer_name), dist.get_rank()

    @fdp.data_parallel(donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            output, new = apply(params, state["buffers"], **batch, **family.keywords)
            return loss_of(output), new

        (loss, new), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt, "buffers": models.mean_statistics(new)}, fdp.pmean(loss)

    state = fdp.replicate({"params": params, "opt": optimizer.init(params), "buffers": buffers})
    compared, look = 0, recheck.Again.look

    def counted(plan: Any, compare: Any, run: Any) -> Any:
        def one() -> bool:
            nonlocal compared
            compared += 1
            answer: bool = compare()
            return answer

        return look(plan, one, run)

    recheck.Again.look = counted  # type: ignore[method-assign]
    try:
        for call in range(CALLS):
            torch.manual_seed(10 * call + rank)
            state, _ = step(state, batch_of(family, 100 * call + rank, labelled))
    finally:
        recheck.Again.look = look  # type: ignore[method-assign]
    assert step.traces == 1
    fdp.assert_replicated(state)
    return compared


def train_all(cases: list[Case]) -> dict[Case, tuple[str, str]]:
    """One rank's verdict on each case: (right, ""), or (the kind of error, its message)."""
    verdicts, share = {}, recheck.SHARE
    recheck.SHARE = 1e9
    try:
        for case in cases:
            begun = time.perf_counter()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of the models' own
                    compared = train(*case)
                verdicts[case] = (RIGHT, "") if compared == COMPARED else ("wrong", f"compared {compared} times")
            except fdp.FdpError as error:
                verdicts[case] = (type(error).__name__, str(error))
            except Exception:
                verdicts[case] = ("wrong", traceback.format_exc())
            # Into the rank's log: where it was, should it not come back.
            print(*case, verdicts[case][0], f"{time.perf_counter() - begun:.1f} s", flush=True)
    finally:
        recheck.SHARE = share
    return verdicts


def chosen() -> list[Case]:
    names, optimizers = list(FAMILIES), list(OPTIMIZERS)
    if ALL_SAMPLES:
        return [(name, optimizer) for name in (*FAMILIES, *MORE) for optimizer in optimizers]
    return [(names[index % len(names)], optimizer) for index, optimizer in enumerate(optimizers)][::13]


@pytest.mark.parametrize(
    "cases",
    in_chunks(chosen(), 13),
    ids=lambda cases: f"{cases[0][0]} and {len(cases) - 1} more",
)
def test_no_comparison_refuses_rounding(cases: list[Case]) -> None:
    allowed = {RIGHT} if RELEASE >= TABLE_IS_OF else {RIGHT, "TraceError"}
    wrong = [
        f"{case}: {kind}: {message}"
        for verdicts in ranks.run(2, train_all, cases, deadline_s=900)
        for case, (kind, message) in verdicts.items()
        if kind not in allowed
    ]
    assert not wrong, "\n\n".join(wrong)


def test_every_optimizer_is_in_the_table() -> None:
    assert set(OPTIMIZERS) == {cls.__name__ for cls in CLASSES}
