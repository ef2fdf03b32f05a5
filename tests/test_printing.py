"""Traces, plans, memory plans, timelines and scalings print within the terminal, and say in one line what they are."""

from __future__ import annotations

import html
import os
import sys
from typing import Any

import pytest
import torch
from fake_ranks import fake_group

import fdp
from fdp import tables

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


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    arguments = [torch.eye(8) for _ in range(LAYERS)], torch.ones(4, 8)
    plan = fdp.data_parallel(train_step, group=fake_group(2)).plan(*arguments)
    return {
        "Trace": plan.trace,
        "Plan": plan,
        "MemoryPlan": plan.memory_plan(),
        "Timeline": plan.timeline(NETWORK),
        "Scaling": fdp.scaling(plan, network=NETWORK, world_sizes=(2, 4)),
    }


KINDS = ("Trace", "Plan", "MemoryPlan", "Timeline", "Scaling")


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_value_is_takes_one_line(values: dict[str, Any], kind: str) -> None:
    text = repr(values[kind])
    assert text.startswith(f"<{kind} of train_step: ") and text.endswith(">")
    assert len(text) < 100 and "\n" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_a_notebook_shows_what_is_printed(values: dict[str, Any], kind: str) -> None:
    shown = values[kind]._repr_html_()
    assert html.unescape(shown.removeprefix("<pre>").removesuffix("</pre>")) == str(values[kind])
    assert "<" not in shown.removeprefix("<pre>").removesuffix("</pre>")


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("kind", KINDS)
def test_all_lines_are_at_most_as_wide_as_the_terminal(
    values: dict[str, Any], kind: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(tables.shutil, "get_terminal_size", lambda: os.terminal_size((width, 24)))
    assert max(map(len, str(values[kind]).splitlines())) <= width


def test_tables_are_the_same_in_every_file(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = str(values["Plan"])
    monkeypatch.setenv("COLUMNS", "40")
    assert str(values["Plan"]) == before
