"""A compiled program keeps the plan: its starts and waits stand between the same operations.

What is read is the generated program, not the graph that was given to the compiler: whatever the compiler moves shows.
Operations that it writes as calls (products, convolutions, attention, fused updates) are the marks; what it fuses into
loops of its own has no place to compare.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import models
import pytest
import torch
from fake_ranks import fake_group
from samples import exhaustive, some

import fdp
from fdp.emit.compiled import inductor
from fdp.plan import Plan, Run, Start

# One bucket a parameter, nearly; two or three for all; and small ones with a large one last.
CAPS: dict[str, Any] = {"mlp": 1e-5, "cnn": 1e-3, "gpt": [0.001, 0.002]}

MARKS = {
    "product": ("aten.mm.", "aten.addmm.", "aten.bmm."),
    "convolution": ("aten.convolution.",),
    "convolution backward": ("aten.convolution_backward.",),
    "attention": ("aten._scaled_dot_product_flash_attention_for_cpu.",),
    "attention backward": ("aten._scaled_dot_product_flash_attention_for_cpu_backward.",),
    "update": ("aten._fused_adamw_.",),
}
CALLS = {
    "product": r"extern_kernels\.(?:mm|addmm|bmm)\(|fdp_compiled\.multiply_into\.",
    "convolution": r"extern_kernels\.convolution\(|aten\.convolution\.",
    "convolution backward": r"aten\.convolution_backward\.",
    "attention": r"aten\._scaled_dot_product_flash_attention_for_cpu\.",
    "attention backward": r"aten\._scaled_dot_product_flash_attention_for_cpu_backward\.",
    "update": r"fdp_compiled\.fused_adamw_",
}


@pytest.fixture
def text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate programs without the C++ compiler, which takes most of the time and has no say in the order."""
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *args, **kwargs: None)


def plan_of(name: str, donate: bool) -> Plan:
    apply, params, buffers = fdp.from_module(models.MODELS[name]())
    rule = fdp.optim.from_torch(torch.optim.AdamW, lr=1e-2, fused=True)
    state = {"params": params, "buffers": buffers, "opt": rule.init(params)}
    step = fdp.data_parallel(
        models.fdp_step(apply, rule), donate_argnums=0 if donate else (), bucket_cap_mb=CAPS[name], group=fake_group(2)
    )
    return step.plan(state, models.batches(name, 1, 8)[0])


def generated(plan: Plan) -> str:
    # Nothing may come from the cache, nor go there: the settings that a test changes are not part of its keys.
    return plan.emit(fake_group(2), compile={"fx_graph_cache": False}).source


def planned_order(plan: Plan) -> list[str]:
    """Starts and waits, and between them what is computed there, sorted: no message tells in which order."""
    found = []
    for item in plan.schedule:
        if isinstance(item, Run):
            target = plan.trace.operations[item.operations[0]].target
            found += [mark for mark, stems in MARKS.items() if target.startswith(stems)]
        else:
            found.append(f"{'start' if isinstance(item, Start) else 'wait'} {item.bucket}")
    return sorted_between_messages(found)


def generated_order(source: str) -> list[str]:
    found = []
    for line in source[source.index("def call(") :].splitlines():
        if message := re.search(r"fdp_compiled\.(start|wait)_\.default\(.*, (\d+)\)", line):
            found.append(f"{message[1]} {message[2]}")
        else:
            found += [mark for mark, call in CALLS.items() if re.search(call, line)]
    return sorted_between_messages(found)


def sorted_between_messages(found: list[str]) -> list[str]:
    pieces = itertools.groupby(found, key=lambda mark: mark.split()[0] in ("start", "wait"))
    return [mark for messages, piece in pieces for mark in (piece if messages else sorted(piece))]


@pytest.mark.usefixtures("text_only")
@pytest.mark.parametrize(
    ("name", "donate"), some([("mlp", True), ("gpt", True), ("cnn", True), ("cnn", False), ("mlp", False)], 5)
)
def test_the_generated_program_keeps_the_plan(name: str, donate: bool) -> None:
    plan = plan_of(name, donate)
    expected = planned_order(plan)
    assert len(plan.buckets) >= 3
    # The marks tell something: there are some between starts, and an update after each wait.
    starts = [at for at, mark in enumerate(expected) if mark.startswith("start")]
    assert any(two - one > 1 for one, two in itertools.pairwise(starts))
    assert generated_order(generated(plan)) == expected


@exhaustive
@pytest.mark.usefixtures("text_only")
@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("cnn", ("KEPT", {**inductor.KEPT, "reorder_for_peak_memory": True, "reorder_for_locality": True})),
        pytest.param("gpt", ("_keeping_message_order", lambda choices: choices), marks=exhaustive),
    ],
    ids=["settings of the scheduler", "what may be fused"],
)
def test_the_compilers_own_choices_would_move_messages(
    name: str, default: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the test above could not fail, and what is kept would be kept for nothing."""
    plan = plan_of(name, donate=True)
    monkeypatch.setattr(inductor, *default)
    assert generated_order(generated(plan)) != planned_order(plan)
