"""Names that a user gives, such as keys of a state, are text in programs, tables, pictures and files."""

from __future__ import annotations

import functools
import json
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import some

import fdp

NAMES = [
    "a'b", 'a"b', "a\nb", "'''", '"""', "#", "\\", "\\N{x}", "{0}", "{{{", "%s %d", "$x_1$ $", "$\\frac{$", "]", "",
    " ", "[bold red]x[/bold red]", "[/]", "</svg><script>", "&amp;", "\x00", "\x1b[31mred", "\u202eabc", "\ud800",
    "é😀", "../../etc/passwd", "a/b", "import os", "__class__", "rank 0 of 2: x", "fingerprints", "x" * 10_000,
]  # fmt: skip


def made() -> dict[str, torch.Tensor]:
    return {name: torch.full((3,), at + 1.0) for at, name in enumerate(NAMES)}


def train_step(state: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> torch.Tensor:
        return torch.stack([(params[name] * batch["[red]x"]).sum() ** 2 for name in NAMES]).sum()

    loss, grads = fdp.value_and_grad(loss_of)(state)
    return {name: state[name] - 0.01 * grads[name] for name in NAMES}, fdp.pmean({"l\n'": loss})


BATCH = {"[red]x": torch.ones(3)}


@pytest.mark.parametrize("compile", some([False, True]))
def test_a_step_trains_what_has_such_names(compile: bool) -> None:
    state, loss = fdp.data_parallel(train_step, donate_argnums=0, compile=compile)(made(), BATCH)
    for name, before in made().items():
        torch.testing.assert_close(state[name], before - 0.01 * 2 * before.sum() * torch.ones(3))
    assert list(loss) == ["l\n'"]


@functools.cache
def plan() -> fdp.Plan:
    network = fdp.Network(latency_s=1e-4, bandwidth_bytes_per_s=1e8)
    return fdp.data_parallel(train_step, network=network).plan(made(), BATCH)


def is_printable(text: str) -> bool:
    """Whether a terminal shows it as it is, and every encoding can hold it."""
    text.encode()
    return not set(text) & {"\x00", "\x1b", "\u202e"}


def test_tables_and_messages_print_them(capsys: pytest.CaptureFixture[str]) -> None:
    for value in (plan().trace, plan(), plan().timeline(), plan().emit().memory):
        print(value)
        assert is_printable(str(value))
    assert repr("[bold red]x[/bold red]") in str(plan().trace)  # it is no markup
    for wrong, error in (
        (lambda s, b: {name: s[name] + b["[red]x"] for name in NAMES}, fdp.ReplicationError),
        (lambda s, b: {name: s[name].add_(1) for name in NAMES}, fdp.PurityError),
        (lambda s, b: s["a'b"] if s["a'b"].sum() > 0 else 0, fdp.TraceError),
    ):
        with pytest.raises(error) as caught:
            fdp.data_parallel(wrong)(made(), BATCH)
        assert is_printable(str(caught.value))
    with pytest.raises(fdp.NonFiniteError) as caught:
        fdp.data_parallel(train_step, check_finite=True)(made(), {"[red]x": torch.full((3,), torch.nan)})
    assert len(caught.value.names) == len(NAMES)
    assert is_printable(str(caught.value))


def test_pictures_and_files_hold_them(tmp_path: Path) -> None:
    plan().timeline().draw(tmp_path / "timeline.svg")
    plan().emit().memory.draw(tmp_path / "memory.svg")
    plan().timeline().save_trace(tmp_path / "trace.json")
    for name in ("timeline.svg", "memory.svg"):
        root = xml.etree.ElementTree.parse(tmp_path / name)
        assert not [each for each in root.iter() if each.tag.endswith("script")]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    fdp.save(tmp_path / "saved", made())
    assert repr(fdp.load(tmp_path / "saved", made())) == repr(made())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory.svg", "saved", "timeline.svg", "trace.json"]
    assert {path.suffix for path in (tmp_path / "saved").iterdir()} == {"", ".distcp"}
