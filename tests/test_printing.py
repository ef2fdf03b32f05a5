"""Traces, plans, memory plans, timelines and scalings print within the terminal, and say in one line what they are."""

from __future__ import annotations

import html
import itertools
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_ranks import fake_group
from samples import some

import fdp
from fdp import tables
from fdp.plan import Machine

NETWORK = fdp.Network(latency_s=1e-4, bandwidth_bytes_per_s=1e9)
LAYERS = 12


def train_step(weights: list[torch.Tensor], batch: torch.Tensor) -> Any:
    def loss_fn(weights: list[torch.Tensor]) -> torch.Tensor:
        x = batch
        for weight in weights:
            x = (x @ weight).tanh()
        return x.square().mean()

    loss, grads = fdp.value_and_grad(loss_fn)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], fdp.pmean(loss)


def a_step_whose_name_says_all_that_it_does_and_is_wider_than_a_line(*args: Any) -> Any:
    return train_step(*args)


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return values_of(train_step)


def values_of(step: Callable[..., Any]) -> dict[str, Any]:
    arguments = [torch.eye(8) for _ in range(LAYERS)], torch.ones(4, 8)
    plan = fdp.data_parallel(step, group=fake_group(2)).trace(*arguments).plan("auto", network=NETWORK)
    assert plan.forecast is not None
    emitted = plan.emit(fake_group(2))
    return {
        "Trace": plan.trace,
        "Plan": plan,
        "MemoryPlan": plan.memory_plan(),
        "Timeline": plan.timeline(NETWORK),
        "Scaling": fdp.scaling(plan, network=NETWORK),
        "MemoryMap": emitted.memory,
        "MemoryForecast": plan.memory(),
        "Forecast": plan.forecast,
        "Input": plan.trace.inputs[0],
        "Output": plan.trace.outputs[0],
        "Operation": plan.trace.operations[-1],
        "Reduction": plan.trace.reductions[-1],
        "Bucket": plan.buckets[0],
        "Emitted": emitted,
        "Program": emitted.program,
        "Piece": emitted.memory.pieces[0],
        "Interval": plan.timeline(NETWORK).intervals[0],
        "Scale": fdp.scaling(plan, network=NETWORK, world_sizes=(2, 4)).scales[0],
        "Costs": plan.forecast.costs,
        "Network": NETWORK,
        "Machine": Machine(),
        "PerRank": fdp.per_rank(torch.ones(100, 100)),
        "Step": fdp.data_parallel(step),
        "Optimizer": fdp.optim.from_torch(torch.optim.Adam, lr=1e-3),
        "CheckpointManager": fdp.CheckpointManager("checkpoints"),
        "BatchSampler": fdp.BatchSampler(50_000, 256, seed=3),
    }


OF_A_STEP = ("Trace", "Plan", "MemoryPlan", "Timeline", "Scaling", "MemoryMap", "MemoryForecast")
KINDS = (*OF_A_STEP, "Forecast")


def narrow_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(tables.shutil, "get_terminal_size", lambda: os.terminal_size((width, 24)))


def test_what_a_value_is_takes_one_line(values: dict[str, Any]) -> None:
    for kind, value in values.items():
        text = repr(value)
        assert len(text) <= 80 and "\n" not in text and " at 0x" not in text, kind
        assert kind in text and (kind not in OF_A_STEP or text.startswith(f"<{kind} of train_step: ")), text


def test_it_takes_one_line_of_a_step_with_a_long_name() -> None:
    for kind, value in values_of(a_step_whose_name_says_all_that_it_does_and_is_wider_than_a_line).items():
        assert len(repr(value)) <= 80 and kind in repr(value), repr(value)


def test_a_network_is_told_to_the_last_digit() -> None:
    # Buckets that are kept on disk are named by it.
    network = fdp.Network(1 / 3, 1e9 / 7, ranks_per_host=2, inner_latency_s=0.1 + 0.2, inner_bandwidth_bytes_per_s=1e9)
    assert eval(repr(network), {"Network": fdp.Network}) == network and "in_flight" not in repr(network)


def test_a_small_labelled_tensor_is_shown_and_a_large_one_printed() -> None:
    assert repr(fdp.per_rank(torch.ones(2))) == "PerRank(tensor([1., 1.]))"
    large = fdp.per_rank(torch.ones(100, 100))
    assert repr(large) == "PerRank(<float32 [100, 100] on cpu>)" and str(large) == f"PerRank({large.value})"


@pytest.mark.parametrize("kind", some(KINDS))
def test_a_notebook_shows_what_is_printed(values: dict[str, Any], kind: str) -> None:
    shown = values[kind]._repr_html_()
    assert html.unescape(shown.removeprefix("<pre>").removesuffix("</pre>")) == str(values[kind])
    assert "<" not in shown.removeprefix("<pre>").removesuffix("</pre>")


@pytest.mark.parametrize("width", some([60, 80, 120], every=3))
@pytest.mark.parametrize("kind", KINDS)
def test_all_lines_are_at_most_as_wide_as_the_terminal(
    values: dict[str, Any], kind: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow_terminal(monkeypatch, width)
    assert max(map(len, str(values[kind]).splitlines())) <= width


@pytest.mark.parametrize("width", some([60, 80]))
@pytest.mark.parametrize("kind", KINDS)
def test_no_word_of_a_table_is_broken(
    values: dict[str, Any], kind: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = set(re.split(r"[\s|]+", str(values[kind])))
    narrow_terminal(monkeypatch, width)
    told = {word for word in re.split(r"[\s|]+", str(values[kind])) if not re.fullmatch(r"[-+]*", word)}
    assert told <= wide and len(told) > 8


def test_a_word_that_is_wider_than_the_terminal_is_broken_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    table = tables.Table("leaves", ("name", "shape", "dtype"))
    name = "state" + "['inner']" * 20
    table.add(name, [128, 128], "float32")
    narrow_terminal(monkeypatch, 60)
    lines = str(table).splitlines()
    assert max(map(len, lines)) <= 60 and "[128," in str(table) and "float32" in str(table)
    first = itertools.takewhile(bool, lines[3:])  # up to the second part
    assert "".join(line.partition("|")[0].strip() for line in first) == name


def test_a_rank_alone_is_not_each_of_one() -> None:
    plan = fdp.data_parallel(train_step).plan([torch.eye(8)], torch.ones(4, 8))
    assert str(plan.memory()).startswith("Memory of train_step on 1 rank: ")


def test_tables_are_the_same_in_every_file(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = str(values["Plan"])
    monkeypatch.setenv("COLUMNS", "40")
    assert str(values["Plan"]) == before
