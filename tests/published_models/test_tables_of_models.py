"""The tables of models in the documents are those that the command makes, from what the tests demand."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tables_of_models as tables

TESTS = Path(__file__).resolve().parents[1]


def test_the_page_has_the_tables_that_the_command_makes() -> None:
    text = tables.PAGE.read_text()
    made = tables.table_of_families(tables.expected()), tables.table_of_libraries(tables.expected())
    for head, rows in zip(tables.HEADS.values(), made, strict=True):
        assert tables.with_table(text, head, rows) == text
        assert tables.with_table(text, head, rows[:-1]) != text


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="no transformers: pip install fdp[huggingface]"
)
def test_the_command_prints_what_it_found() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS, TESTS / "oracles")))}
    command = [sys.executable, "-m", "published_models.run", "--only", "ResNet", "XLM"]
    done = subprocess.run(command, cwd=TESTS, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "| ResNet | vision | yes |" in done.stdout and "| XLM | encoder | refused |" in done.stdout
    assert "XLM: refused: " in done.stderr and "modeling_xlm.py:" in done.stderr
