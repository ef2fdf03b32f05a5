"""What `wire_dtype` does to traces, plans, checks and messages, without other ranks."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from bits import same_bits
from fake_ranks import fake_group
from printed import table_rows
from samples import exhaustive, some

import fdp
from fdp.compare import check_emitted
from fdp.plan import Plan, Run, Start
from fdp.runtime import Emitted, in_flight
from fdp.trace import Roles, flatten_call, resolve_roles

Tree = dict[str, torch.Tensor]


def layers(p: Tree, x: torch.Tensor) -> torch.Tensor:
    for key in sorted(p):
        x = torch.tanh(x @ p[key])
    return (x**2).mean()


def sgd(p: Tree, x: torch.Tensor) -> tuple[Tree, torch.Tensor]:
    value, grads = fdp.value_and_grad(layers)(p, x)
    return {key: p[key] - 0.1 * grads[key] for key in p}, fdp.pmean(value)


def params(dtype: torch.dtype = torch.float32) -> Tree:
    g = torch.Generator().manual_seed(0)
    return {f"w{i}": torch.randn(16, 16, generator=g, dtype=dtype) / 4 for i in range(6)}


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def plan_for(size: int, cap: Any = 0.0015, step: Any = sgd, **options: Any) -> Plan:
    return fdp.data_parallel(step, group=fake_group(size), bucket_cap_mb=cap, **options).plan(params(), X)


def roles_and_flat(step: Any, *args: Any) -> tuple[Any, Roles]:
    roles = resolve_roles(step, len(args), -1, (), ())
    return flatten_call(args, roles), roles


# --- plans -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [pytest.param(1, marks=exhaustive), 2, pytest.param(16, marks=exhaustive)])
def test_plans_count_the_bytes_that_travel(size: int) -> None:
    wide, narrow = plan_for(size), plan_for(size, wire_dtype=torch.bfloat16)
    assert [r.size_bytes for r in wide.trace.gradients] == [1024] * 6
    assert [r.size_bytes for r in narrow.trace.gradients] == [512] * 6
    assert {r.dtype for r in narrow.trace.gradients} == {torch.bfloat16}
    assert len(narrow.buckets) < len(wide.buckets)  # the same caps hold more
    grads = [bucket for bucket in narrow.buckets if bucket.dtype == torch.bfloat16]
    assert sum(bucket.size_bytes for bucket in grads) == 6 * 512
    metric = next(r for r in narrow.trace.reductions if r.kind == "value")
    assert (metric.dtype, metric.accumulate_dtype, metric.size_bytes) == (torch.float32, None, 4)


@pytest.mark.parametrize("cap", some([0.0009, 0.002, 0.004], every=3))
def test_narrow_buckets_start_as_early_as_wide_ones(cap: float) -> None:
    """The rounding is no reason to wait for the end of the backward pass."""

    def no_metric(p: Tree, x: torch.Tensor) -> Tree:
        return sgd(p, x)[0]

    def before(plan: Plan) -> dict[str, set[str]]:
        """For the gradients of each bucket, what ran before it started, but for casts and reductions."""
        found, ran = {}, set[str]()
        for item in plan.schedule:
            if isinstance(item, Run):
                operations = [plan.trace.operations[index] for index in item.operations]
                ran.update(o.node for o in operations if "_to_copy" not in o.target and not o.view)
            elif isinstance(item, Start):
                names = [plan.trace.reductions[m].name for m in plan.buckets[item.bucket].members]
                found[", ".join(names)] = set(ran)
        return found

    wide, narrow = (
        before(plan_for(2, cap, no_metric)),
        before(plan_for(2, cap / 2, no_metric, wire_dtype=torch.float16)),
    )
    assert {names: len(ran) for names, ran in narrow.items()} == {names: len(ran) for names, ran in wide.items()}
    assert len({len(ran) for ran in narrow.values()}) == len(narrow)


def test_traces_name_what_makes_the_gradient() -> None:
    wide, narrow = plan_for(2).trace, plan_for(2, wire_dtype=torch.bfloat16).trace
    assert [(g.name, g.produced_by, g.source) for g in narrow.gradients] == [
        (g.name, g.produced_by, g.source) for g in wide.gradients
    ]


def test_plans_say_how_gradients_are_added_up() -> None:
    plan = plan_for(2, wire_dtype=torch.bfloat16, accumulate_dtype=torch.float32)
    dtypes = {row[1:3][1] for row in table_rows(str(plan)) if "gradient" in row[3]}
    assert dtypes == {"bfloat16, added in float32"}
    assert "torch.bfloat16 on cpu, added in float32" in plan.messages
    # Two messages a bucket: where the second ones come is part of what ranks compare.
    assert plan.messages.splitlines()[-1].startswith("order: Start(bucket=0)")
    assert "order" not in plan_for(2, wire_dtype=torch.bfloat16).messages


def test_what_is_narrow_already_travels_as_it_is() -> None:
    def dtypes(own: torch.dtype, **options: Any) -> set[Any]:
        step = fdp.data_parallel(sgd, group=fake_group(2), **options)
        trace = step.trace(params(own), X.to(own))
        return {(g.dtype, g.accumulate_dtype) for g in trace.gradients}

    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    assert dtypes(brain, wire_dtype=half) == {(brain, None)}
    assert dtypes(brain, wire_dtype=brain, accumulate_dtype=single) == {(brain, single)}
    assert dtypes(torch.float64, wire_dtype=half) == {(half, None)}
    assert dtypes(single, wire_dtype=half, accumulate_dtype=single) == {(half, single)}
    assert dtypes(single) == {(single, None)}


def test_only_gradients_are_narrow() -> None:
    """Statistics, averages made by hand, and what derivatives send back are sent as they are."""

    def maml(p: Tree, x: torch.Tensor) -> tuple[Tree, Any]:
        def outer(p: Tree) -> torch.Tensor:
            inner = fdp.grad(layers)(p, x)
            return layers({key: p[key] - 0.1 * inner[key] for key in p}, x)

        by_hand = fdp.pmean(torch.func.grad(lambda p: layers(p, x))(p))
        return fdp.grad(outer)(p), (by_hand, fdp.psum(x.sum()))

    trace = fdp.data_parallel(maml, group=fake_group(2), wire_dtype=torch.bfloat16).trace(params(), X)
    found = {(r.kind, r.dtype) for r in trace.reductions}
    expected = {("gradient", torch.bfloat16), ("transpose", torch.float32), ("value", torch.float32)}
    assert found == expected


def test_gradients_under_vmap() -> None:
    def each(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda row: fdp.grad(lambda p: ((row @ p) ** 2).sum())(p))(x)

    step = fdp.data_parallel(each, group=fake_group(2), wire_dtype=torch.bfloat16)
    emitted = Emitted(step.plan(torch.ones(16, 3), X), fake_group(2))
    found = emitted.dry_run([torch.ones(16, 3), X.clone()])
    assert torch.equal(found, each(torch.ones(16, 3), X).bfloat16().float())
    assert not torch.equal(found, each(torch.ones(16, 3), X))


# --- a world of one ----------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=exhaustive)])
@pytest.mark.parametrize("accumulate", [pytest.param(None, marks=exhaustive), torch.float32])
def test_one_rank_rounds_nothing(accumulate: Any, compile: bool) -> None:
    plain = fdp.data_parallel(sgd, compile=compile)(params(), X)
    step = fdp.data_parallel(sgd, compile=compile, wire_dtype=torch.bfloat16, accumulate_dtype=accumulate)
    found = step(params(), X)
    assert same_bits(found[0], plain[0]) and torch.equal(found[1], plain[1])


# --- the check of a new trace ------------------------------------------------------------------------


def emitted(step: Any, size: int, **options: Any) -> Emitted:
    group = fake_group(size)
    return Emitted(fdp.data_parallel(step, group=group, **options).plan(params(), X), group)


def checked(made: Emitted, other: Any) -> None:
    """Check what was made of one step against another."""
    check_emitted(made, other, *roles_and_flat(other, params(), X))


def off_by(factor: float) -> Any:
    def step(p: Tree, x: torch.Tensor) -> Any:
        value, grads = fdp.value_and_grad(lambda p, x: factor * layers(p, x))(p, x)
        return grads, fdp.pmean(value / factor)

    return step


WAYS = list(itertools.product((torch.bfloat16, torch.float16), (None, torch.float32)))


@pytest.mark.parametrize(("wire", "accumulate"), some(WAYS, every=4))
def test_another_number_is_a_difference_however_small(wire: Any, accumulate: Any) -> None:
    # It turns some of 1,536 roundings to sixteen bits, as rounding would; but the same operators make the same bits.
    made = emitted(off_by(1.0), 2, wire_dtype=wire, accumulate_dtype=accumulate)
    checked(made, off_by(1.0))
    with pytest.raises(fdp.TraceError, match="does not compute what the step computes"):
        checked(made, off_by(1 + 2**-13))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=exhaustive)])
@pytest.mark.parametrize(("wire", "accumulate"), some(WAYS, every=3))
def test_a_wrong_gradient_is_found(wire: Any, accumulate: Any, size: int) -> None:
    made = emitted(off_by(1.0), size, wire_dtype=wire, accumulate_dtype=accumulate)
    checked(made, off_by(1.0))
    for factor in (1.05, 0.9, 2.0, -1.0, 0.0):
        with pytest.raises(fdp.TraceError, match="does not compute what the step computes"):
            checked(made, off_by(factor or 1e-9))


# --- the order of messages ---------------------------------------------------------------------------


def test_second_messages_start_while_later_gradients_are_made() -> None:
    said: list[str] = []

    class Mean:
        def __init__(self, index: int) -> None:
            self.index, self.turned = index, False
            said.append(f"to {index}")

        def turn(self) -> None:
            if not self.turned:
                self.turned = True
                said.append(f"from {self.index}")

        def finish(self) -> None:
            self.turn()
            said.append(f"done {self.index}")

    class Stub:
        received = True

        def __init__(self, index: int) -> None:
            self.index = index

        def start_stages(self, group: Any, arrived: Any = None) -> Mean:
            return Mean(self.index)

    flying = in_flight.InFlight({index: Stub(index) for index in range(3)}, fake_group(2), None)  # type: ignore[misc]
    for index in range(3):
        flying.start(index)
    assert said == ["to 0", "to 1", "from 0", "to 2", "from 1"]
    said.clear()
    for index in range(3):
        flying.wait(index)
    # The last one is added up before the program waits for the one ahead of it.
    assert said == ["done 0", "from 2", "done 1", "done 2"]


# --- options -----------------------------------------------------------------------------------------


def test_options_that_have_no_meaning() -> None:
    def text(**options: Any) -> str:
        with pytest.raises(fdp.ArgumentError) as caught:
            fdp.data_parallel(sgd, **options)
        with pytest.raises(fdp.ArgumentError):
            fdp.data_parallel(**options)(sgd)
        return str(caught.value)

    assert text(wire_dtype="bfloat16") == (
        "wire_dtype='bfloat16'.\n"
        "Remedy: pass torch.bfloat16, torch.float16, or None, which sends gradients as they are."
    )
    assert "wire_dtype=torch.float64." in text(wire_dtype=torch.float64)
    assert text(wire_dtype=torch.bfloat16, accumulate_dtype=torch.float64) == (
        "accumulate_dtype=torch.float64.\n"
        "Remedy: pass torch.float32, or None, which adds gradients up in the type that they are sent in."
    )
    assert text(accumulate_dtype=torch.float32).splitlines()[-1] == (
        "Remedy: name the type that they are to be sent in as well: wire_dtype=torch.bfloat16; or leave "
        "accumulate_dtype out."
    )


def test_copies_of_a_step_keep_its_wire() -> None:
    step = fdp.data_parallel(wire_dtype=torch.bfloat16, accumulate_dtype=torch.float32, group=fake_group(2))(sgd)
    plans = [each.plan(params(), X) for each in (step, copy.copy(step))]
    assert plans[0].messages == plans[1].messages and "added in float32" in plans[1].messages
    again = pickle.loads(pickle.dumps(fdp.data_parallel(named, wire_dtype=torch.bfloat16)))
    assert {g.dtype for g in again.trace(params(), X).gradients} == {torch.bfloat16}


def named(p: Tree, x: torch.Tensor) -> Any:
    return sgd(p, x)


@pytest.mark.parametrize("size", [3, pytest.param(64, marks=exhaustive)])
@pytest.mark.parametrize(
    ("wire", "accumulate"),
    [pytest.param(*way, marks=() if way == (torch.float16, None) else exhaustive) for way in WAYS],
)
@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=exhaustive), 1e-6])
def test_tiny_and_large_gradients_pass_the_check(wire: Any, accumulate: Any, size: int, scale: float) -> None:
    """Float16 has no room for the last bits of small values, nor for all of them divided by the number of ranks."""

    def adam(p: Tree, x: torch.Tensor) -> Any:
        def loss(p: Tree) -> torch.Tensor:
            return scale * (layers({k: p[k] for k in p if k != "large"}, x) + torch.tanh(p["large"] @ x.T).sum())

        grads = fdp.grad(loss)(p)
        rule = fdp.optim.from_torch(torch.optim.Adam, lr=1e-3)
        return rule.update(grads, rule.init(p), p), grads

    group, p = fake_group(size), {**params(), "large": torch.randn(40000, 16) / 100}
    plan = fdp.data_parallel(adam, group=group, wire_dtype=wire, accumulate_dtype=accumulate).plan(p, X)
    check_emitted(Emitted(plan, group), adam, *roles_and_flat(adam, p, X))
