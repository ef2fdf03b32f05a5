"""Mistakes made on purpose in trace/ do not get through: a step with one is refused before it returns a number."""

from __future__ import annotations

import pytest
from samples import exhaustive
from seeded_faults_trace import FAULTS, TraceFault, outcomes

# Each takes a process that imports a copy of the package.
SOME = ("the first argument again and again",)


def test_there_are_enough_of_them() -> None:
    assert len(FAULTS) >= 15 and len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize(
    "fault", [pytest.param(x, id=x.name, marks=() if x.name in SOME else exhaustive) for x in FAULTS]
)
def test_a_mistake_does_not_get_through(fault: TraceFault) -> None:
    right, wrong = outcomes([None, fault], [fault.program, fault.program])
    assert right == ("same", ""), "the program is refused, or wrong, without the mistake"
    assert wrong[0] == "refused", f"{fault.why}: {wrong}"
