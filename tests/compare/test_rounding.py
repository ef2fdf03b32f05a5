"""What a comparison of step and program must not refuse: rounding, however much a step makes of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from compared import made, numbers

import fdp
from fdp.compare import check_emitted, op_by_op
from fdp.compare.lockstep import in_order_of_plan
from fdp.compare.rounding import Excuses, replay
from fdp.compare.ulps import change_last_places_
from fdp.distributed.other_ranks import OtherRanks
from fdp.runtime import Emitted

OTHERS = OtherRanks(2, 0)


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
        kernels = program.program.function.__kwdefaults__
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


def looks_back(p: Any, x: torch.Tensor) -> Any:
    """Attention to what came before: of minus infinity rounding makes no other number."""
    later = torch.ones(32, 32, dtype=torch.bool).triu(1)
    scores = (x @ p["q"] @ (x @ p["k"]).transpose(-1, -2)).masked_fill(later, -torch.inf)
    return fdp.pmean(torch.softmax(scores, -1) @ x)


@pytest.mark.parametrize("step", [trains, looks_back])
def test_a_wrong_operator_of_a_program_is_named(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p, x = attends()
    emitted, flat, roles = made(step, p, x)
    with_other_softmax(emitted, monkeypatch, lambda x: x.mul_(1.001))
    with pytest.raises(fdp.TraceError) as caught:
        check_emitted(emitted, step, flat, roles)
    _, *offenders, _ = str(caught.value).splitlines()
    assert len(offenders) == 1 and "softmax" in offenders[0] and "test_rounding.py" in offenders[0]


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


def distances(p: Any, x: torch.Tensor) -> Any:
    """A maximum, and who holds it: the gradient is an average over those that equal it."""
    return fdp.grad(lambda p: (x @ p["w"]).amax(1).sum())(p)


def filtered(p: Any, x: torch.Tensor) -> Any:
    """What is not below the third largest."""
    scores = torch.tanh(x @ p["w"])
    least = scores.topk(3).values[:, -1:]
    return fdp.pmean({"w": torch.where(scores < least, 0.0, scores) @ p["w"]})


def sorted_by(p: Any, x: torch.Tensor) -> Any:
    """Where each number stands in a row of the same numbers in order."""
    scores = torch.sigmoid(x @ p["w"])
    places = torch.searchsorted(scores.flatten().sort().values, scores.flatten())
    return fdp.pmean({"w": p["w"] * places.view_as(scores)})


def without_a_number(p: Any, x: torch.Tensor) -> Any:
    """Of a difference that rounding makes negative there is no root."""
    y = torch.tanh(x @ p["w"])
    return fdp.pmean({"w": p["w"] + torch.sqrt(y.exp() - y.exp()).sum()})


def masked(p: Any, x: torch.Tensor) -> Any:
    """Attention to what came before: minus infinity is no rounded number."""
    q = x @ p["w"]
    later = torch.ones(8, 8, dtype=torch.bool).triu(1)
    scores = q @ x.t() + torch.zeros(8, 8).masked_fill(later, -torch.inf)
    return fdp.pmean({"w": torch.softmax(scores, -1) @ q})


def masked_by_the_least_number(p: Any, x: torch.Tensor) -> Any:
    """As libraries do it: what is added is lost, and nothing gets less."""
    q = x @ p["w"]
    mask = torch.full((8, 8), torch.finfo(q.dtype).min).triu(1)
    return fdp.pmean({"w": torch.softmax((q @ x.t() + mask) + mask, -1) @ q})


STEPS = [distances, filtered, sorted_by, without_a_number, masked, masked_by_the_least_number]


@pytest.mark.parametrize("step", STEPS)
def test_no_rounding_is_taken_for_more_than_it_does(step: Any) -> None:
    """Numbers that are chosen from others are among them; and where there is no number, any other one is wrong."""
    p, x = {"w": numbers(8, 8)}, numbers(8, 8, seed=1)
    emitted, flat, _ = made(step, p, x)
    excuses = Excuses(emitted, lambda: [t.clone() for t in flat.tensors], OTHERS, [0])
    exact = excuses.exact[0]
    assert excuses.excused(0, exact * (1 + 1e-7))
    assert not excuses.excused(0, exact * 1.01)
    assert not excuses.excused(0, torch.zeros(8, 8))
    assert excuses.excused(0, torch.full((8, 8), torch.nan)) == (step is without_a_number)


def test_one_large_noisy_element_excuses_no_other() -> None:
    def step(p: Any, x: torch.Tensor) -> Any:
        close = torch.tanh(p["w"]) - torch.tanh(p["w"] * (1 + 1e-6))
        return fdp.pmean({"w": p["w"].clone().index_put((torch.tensor(0),), 1 / close[0])})

    p, x = {"w": numbers(64)}, numbers(8)
    emitted, flat, _ = made(step, p, x)
    excuses = Excuses(emitted, lambda: [t.clone() for t in flat.tensors], OTHERS, [0])
    exact = excuses.exact[0]
    assert exact[0].abs() > 1e5 and excuses.excused(0, exact * torch.tensor([1.01] + [1.0] * 63))
    assert not excuses.excused(0, exact * torch.tensor([1.0, 1.01] + [1.0] * 62))


@pytest.mark.parametrize(
    "averaged",
    [
        lambda x: torch.var_mean(x)[1],
        lambda x: torch.std_mean(x, 0)[1][0],
        lambda x: torch.nn.functional.layer_norm(x, (4,))[0, 3],
        lambda x: torch.nn.functional.group_norm(x[..., None], 1)[0, 3, 0],
        lambda x: torch.nn.functional.batch_norm(x.t(), None, None, training=True)[3, 0],
    ],
    ids=["var_mean", "std_mean", "layer_norm", "group_norm", "batch_norm"],
)
def test_a_mean_of_whole_numbers_that_is_zero_may_be_rounded(averaged: Any) -> None:
    x = torch.tensor([[-7.0, 3.0, 4.0, 0.0], [7.0, -3.0, -4.0, 0.0]])
    emitted, flat, _ = made(lambda p, x: fdp.pmean({"w": averaged(p["w"])}), {"w": x}, x)
    excuses = Excuses(emitted, lambda: [t.clone() for t in flat.tensors], OTHERS, [0])
    assert excuses.exact[0].abs() < 1e-6
    assert excuses.excused(0, excuses.exact[0] + 1e-8)
    assert not excuses.excused(0, excuses.exact[0] + 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_last_places_change_and_nothing_gets_infinite_or_lost(dtype: torch.dtype) -> None:
    finfo = torch.finfo(dtype)
    special = torch.tensor([0.0, 1.0, -3.0, torch.inf, -torch.inf, torch.nan, finfo.max, finfo.min], dtype=dtype)
    usual = torch.rand(200, dtype=dtype) + 0.1
    found = change_last_places_(torch.cat([special, usual]), 8, torch.Generator().manual_seed(0))
    assert torch.equal(found[:5], special[:5]) and found[5].isnan()
    assert found[6:].isfinite().all()
    away = (found[8:] / usual - 1).abs()
    assert 0 < float(away.max()) <= 10 * finfo.eps and (away > 0).double().mean() > 0.5


def zero_but_for_rounding(p: torch.Tensor, x: torch.Tensor, more: float = 0.0, times: float = 1.0) -> torch.Tensor:
    """A library takes another way to a sum where a compiler is at work; its rounding decides on a whole step."""
    compiled = torch.compiler.is_compiling()
    total = x.sum(0) + more if compiled else x.flip(0).sum(0)
    away = total - x.double().sum(0).float()
    return fdp.per_rank(p - (times if compiled else 1.0) * 1e-3 * away / (away.abs() + 1e-12))


def test_another_way_where_a_compiler_is_at_work_may_round_otherwise() -> None:
    p, x = numbers(64), numbers(999, 64, seed=1)
    emitted, flat, roles = made(zero_but_for_rounding, p, x, world=1)
    made_by_it, by_itself = emitted(p, x), zero_but_for_rounding(p, x).value
    assert (made_by_it - by_itself).abs().max() > 1e-3, "nothing differed: the test shows nothing"
    check_emitted(emitted, zero_but_for_rounding, flat, roles)


def grows(ws: list[torch.Tensor], x: torch.Tensor, times: float = 1.1) -> list[torch.Tensor]:
    """A training step with gradients that are a tenth too large where a compiler is at work: within their rounding."""

    def loss(ws: list[torch.Tensor]) -> torch.Tensor:
        h = x
        with torch.autocast("cpu", torch.bfloat16):
            for w in ws:
                h = h + torch.tanh(h @ w)
        return (h.float() ** 2).mean()

    g = fdp.pmean(fdp.grad(loss)(ws))
    return [w - 0.1 * (times if torch.compiler.is_compiling() else 1.0) * each for w, each in zip(ws, g, strict=True)]


def one_element_more(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One element differs, which is zero: too little to be seen of all elements together."""
    compiled = torch.compiler.is_compiling()
    total = p + (x.sum(0) if compiled else x.flip(0).sum(0))
    return fdp.per_rank(total + 0.01 * (torch.arange(64) == 0) if compiled else total)


class TakesTurns:
    """A step that turns every other element in its first run, its sixth, and so on: no more than rounding may do."""

    __name__ = "takes_turns"

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        away = x.sum(0) - x.double().sum(0).float()
        turned = 1 - 2 * (torch.arange(64) % 2) * (self.runs % 5 == 1)
        return fdp.per_rank(p + 1e-3 * turned * away / (away.abs() + 1e-12))


WS = [numbers(64, 64, seed=at) / 8 for at in range(12)]
BUT_ONE = torch.arange(64) > 0
LEADS_ELSEWHERE = {
    "more": (functools.partial(zero_but_for_rounding, more=0.1), numbers(64), numbers(999, 64, seed=1)),
    "ten times as far": (functools.partial(zero_but_for_rounding, times=10.0), numbers(64), numbers(999, 64, seed=1)),
    "a tenth more": (grows, WS, numbers(128, 64, seed=99)),
    "three hundredths more": (functools.partial(grows, times=1.03), WS, numbers(128, 64, seed=99)),
    "one element more": (one_element_more, numbers(64) * BUT_ONE, numbers(999, 64) * BUT_ONE),
    "every fifth run": (TakesTurns(), numbers(64), numbers(999, 64, seed=1)),
}


@pytest.mark.parametrize("name", LEADS_ELSEWHERE)
def test_another_way_that_leads_elsewhere_is_refused(name: str) -> None:
    step, *args = LEADS_ELSEWHERE[name]
    emitted, flat, roles = made(step, *args, world=1)
    with pytest.raises(fdp.TraceError, match="does not compute what the step computes"):
        check_emitted(emitted, step, flat, roles, on="call")
