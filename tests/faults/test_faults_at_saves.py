"""A rank is gone while the others save, in waits of torch's that nothing interrupts: they raise all the same."""

from __future__ import annotations

import pathlib

import pytest
from programs import errors_of_others

PROGRAM = pathlib.Path(__file__).with_name("program.py")


@pytest.mark.parametrize(
    ("kind", "victim", "reason"),
    [
        # The others wait for it in the store, to connect to it: for as long as the process group may take.
        ("killed in the making of a group for a save", 2, "died"),
        # It holds the store, which does not answer any more: to look into it does not come back.
        ("frozen before a save", 0, "frozen"),
    ],
)
def test_every_other_rank_names_it(kind: str, victim: int, reason: str, tmp_path: pathlib.Path) -> None:
    fault, errors = errors_of_others(PROGRAM, kind, victim, tmp_path, range(3), 60)
    for error in errors:
        assert (error["ranks"], error["reason"]) == ([victim], reason), error
        assert error["when_s"] - fault["when_s"] < 15, error
