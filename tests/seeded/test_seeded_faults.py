"""Seeded faults: each still fits its file, and a few of them are made, run and caught; `make faults` makes all."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
import run_faults
import seeded_faults_trace
from samples import ALL_SAMPLES, exhaustive, few
from seeded_fault import Fault
from seeded_faults import COMPILED_FAULTS, FAULTS

_EVERY = [fault for table in (FAULTS, COMPILED_FAULTS) for faults in table.values() for fault in faults]


@pytest.mark.parametrize("fault", [*_EVERY, *seeded_faults_trace.FAULTS], ids=lambda fault: fault.name)
def test_what_a_fault_replaces_is_there_once(fault: Fault) -> None:
    ast.parse(run_faults.source_with(fault))


def test_names_of_faults_are_unique() -> None:
    for faults in (_EVERY, seeded_faults_trace.FAULTS):
        assert len({fault.name for fault in faults}) == len(faults)


def test_a_fault_that_fits_no_more_is_noticed() -> None:
    with pytest.raises(ValueError, match="0 times"):
        run_faults.source_with(Fault("gone", "emit/memory/layout.py", "no such text", "", ""))


_SHOWN = {
    "in the place of what is still read": "chain",
    "offset of a view dropped": "in_a_row",
    "copied back before the last reader": "old_values",
    "read after the bucket started": "in_the_bucket",
    "packed before it is whole": "early",
    "deferred without a word": "deferred_past_a_message",
    "no wait for what is only returned": "in_a_row",
    "calls wait for one bucket": "in_the_bucket",
    "statistics are added up": "batch_norm",
    "buckets at the beginning": "in_a_row",
    "header over the last member": "in_a_row",
    "not divided in the wider type": "wire",
    "every part read at the first": "parts_of_ranks",
    "sent the other way": "parts_of_ranks",
}
"""Of each kind of fault one, with a program that shows it."""

_SHOWN_ON_A_MESH = {"one message along two dimensions": "along", "two levels, one of them left out": "in_two_levels"}
"""Likewise, with six ranks on a mesh."""

_SHOWN_COMPILED = {"compiled, not divided": "large", "compiled, beta left out": "large"}
"""Likewise, of compiled steps."""


@pytest.mark.parametrize(
    "shown, option",
    [
        (_SHOWN, []),
        pytest.param(_SHOWN_ON_A_MESH, [], marks=exhaustive),
        pytest.param(_SHOWN_COMPILED, ["--compiled"], marks=exhaustive),
    ],
    ids=["emitted", "on a mesh", "compiled"],
)
def test_faults_that_change_a_number_are_caught_before_it_is_computed(shown: dict[str, str], option: list[str]) -> None:
    shown = few(shown)
    words = [*shown, *option, "--programs", *sorted(set(shown.values())), "--workers", "1"]
    if not ALL_SAMPLES:  # each by its own program, and not by those of the others
        words += ["--shown-by", *(f"{fault}={program}" for fault, program in shown.items())]
    done = subprocess.run(
        [sys.executable, run_faults.__file__, *words], capture_output=True, text=True, timeout=280, check=False
    )
    lines = {name: line for name in shown for line in done.stdout.splitlines() if f" {name} " in line}
    assert lines.keys() == shown.keys(), done.stdout + done.stderr
    assert not [line for line in lines.values() if not line.endswith(": caught")], done.stdout
    assert done.returncode == 0, done.stdout
