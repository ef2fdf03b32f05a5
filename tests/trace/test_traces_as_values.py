"""Traces and plans as values: equal, frozen, printed, made without memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from printed import table_rows
from traced import mlp_arguments, mlp_step, place_of, trace_of

import fdp
from fdp.plan import Start, Wait


def test_two_traces_of_one_step_are_equal() -> None:
    one, two = trace_of(mlp_step, *mlp_arguments()), trace_of(mlp_step, *mlp_arguments())
    assert one is not two and one == two and hash(one) == hash(two)
    assert one.plan() == two.plan() and hash(one.plan()) == hash(two.plan())
    assert str(one) == str(two) and str(one.plan()) == str(two.plan())
    assert one.plan() != one.plan(1e-6)
    assert len({one, two, one.plan(), two.plan()}) == 2


def test_other_arguments_make_another_trace() -> None:
    state, batch = mlp_arguments()
    trace = trace_of(mlp_step, state, batch)
    assert trace != trace_of(mlp_step, state, {"x": torch.ones(7, 3)})
    assert trace != trace_of(mlp_step, state, batch, size=4)
    assert trace != trace_of(mlp_step, state, batch, donate_argnums=0)
    assert trace != trace_of(mlp_step, {k: v.double() for k, v in state.items()}, {"x": batch["x"].double()})


def test_values_do_not_matter_to_a_trace() -> None:
    state, batch = mlp_arguments()
    assert trace_of(mlp_step, state, batch) == trace_of(mlp_step, {k: v * torch.nan for k, v in state.items()}, batch)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_tracing_takes_no_memory(name: str) -> None:
    # A state that no machine could hold: one number, seen as 2**50 of them. A kernel run on it would run out of memory.
    huge = torch.zeros(1).expand(2**50)
    optimizer = fdp.optim.from_torch(getattr(torch.optim, name), lr=0.1, fused=True)
    first = optimizer.init({"w": torch.zeros(2)})
    first["state"]["w"] = {key: huge if value.dim() else value for key, value in first["state"]["w"].items()}

    @fdp.data_parallel
    def step(state: Any, batch: torch.Tensor) -> Any:
        loss, grads = fdp.value_and_grad(lambda p: (p["w"] * batch).sum())(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, fdp.pmean(loss)

    trace = step.trace({"params": {"w": huge}, "opt": first}, torch.ones(1))
    assert [o.target for o in trace.operations if "_fused_" in o.target] == [f"aten._fused_{name.lower()}_.tensor_lr"]
    assert [r.size_bytes for r in trace.gradients] == [2**52]


def test_traces_and_plans_are_frozen() -> None:
    trace = trace_of(mlp_step, *mlp_arguments())
    plan = trace.plan()
    parts = [trace, trace.inputs[0], trace.outputs[0], trace.operations[0], trace.reductions[0]]
    for value in [*parts, plan, plan.buckets[0], *plan.schedule[:1], Start(0), Wait(0)]:
        name = dataclasses.fields(value)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)
    for sequence in (trace.inputs, trace.operations, trace.reductions, plan.buckets, plan.schedule, plan.bucket_cap_mb):
        assert isinstance(sequence, tuple)


def every_field(value: Any) -> list[str]:
    return [repr(getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr]


def test_planning_and_emitting_leave_the_trace_as_it_is() -> None:
    trace = trace_of(mlp_step, *mlp_arguments(), size=1)
    before, text = str(trace.graph.graph), every_field(trace)
    plan = trace.plan()
    plan_before = every_field(plan)
    plan.emit()(*mlp_arguments())
    assert str(trace.graph.graph) == before and every_field(trace) == text and every_field(plan) == plan_before


def test_a_trace_prints_as_tables() -> None:
    text = str(trace_of(mlp_step, *mlp_arguments()))
    head, inputs, reductions, outputs = text.split("\n\n")
    place = place_of(mlp_step, "def mlp_step")
    assert head.startswith(f"Trace of mlp_step ({place}), 2 ranks: 4 inputs, 4 outputs, ")
    assert head.endswith("3 gradients of 168 B")
    rows = table_rows(reductions)
    assert [row[1] for row in rows] == ["pmean", "params['third']", "params['second']", "params['first']"]
    third = place_of(mlp_step, "# third layer")
    assert rows[1] == ["1", "params['third']", "gradient", "mean", "[5, 2]", "float32", "40", "aten.mm.default",
                       f"{third} in loss_fn"]  # fmt: skip
    assert [row[0] for row in table_rows(inputs)] == [
        "state['first']", "state['second']", "state['third']", "batch['x']"
    ]  # fmt: skip
    assert [row[3] for row in table_rows(outputs)] == ["replicated"] * 4


def test_a_plan_prints_when_each_bucket_starts_and_is_waited_for() -> None:
    text = str(trace_of(mlp_step, *mlp_arguments()).plan([40 / 2**20, 1]))
    place = place_of(mlp_step, "def mlp_step")
    title, heading = text.splitlines()[:2]
    assert title == f"Plan of mlp_step ({place}), 2 ranks: 2 buckets, 172 B, caps 3.8147e-05, 1 MiB"
    columns = [cell.strip() for cell in heading.split("|")]
    assert columns == ["bucket", "op", "dtype", "gradients", "bytes", "starts after", "waited for before"]
    metric, gradients = table_rows(text)
    third, first = (place_of(mlp_step, f"# {name} layer") for name in ("third", "first"))
    assert metric[:5] == ["0", "mean", "float32", "1 other value: pmean", "4"]
    assert metric[5].endswith(f"mean ({third} in loss_fn)") and metric[6] == "the end"
    names = "params['third'], params['second'], params['first']"
    assert gradients[:5] == ["1", "mean", "float32", f"3 gradients: {names}", "168"]
    assert gradients[5].endswith(f"mm ({first} in loss_fn)")
    assert f" sub ({place_of(mlp_step, '- grads[k]')} in " in gradients[6]


def test_numbers_of_things_are_written_as_people_write_them() -> None:
    """One rank, one bucket, no gradients."""
    trace = trace_of(lambda state, batch: state + fdp.pmean(batch), torch.ones(2), torch.ones(2), size=1)
    assert ", 1 rank: 2 inputs, 1 output, " in str(trace) and "0 gradients of 0 B" in str(trace)
    assert ", 1 rank: 1 bucket, 8 B, " in str(trace.plan())
