"""A store that is slow to answer, as one of many ranks is: who has told what it had to tell may leave meanwhile."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import exhaustive

from fdp.distributed.exchange import ask, tell_all
from fdp.distributed.group import Group, resolve_group
from fdp.distributed.liveness.patience import until
from fdp.distributed.liveness.watch import has_met


class Busy:
    """A store that takes its time for questions of one kind."""

    def __init__(self, store: Any, question: str) -> None:
        self._store, self._question = store, question

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self._store, name)

        def late(*args: Any) -> Any:
            time.sleep(0.8)
            return asked(*args)

        return late if name == self._question else asked


def told(question: str) -> list[dict[str, Any]]:
    group = resolve_group()
    tell_all(group, {}, "a test", "has begun")
    until(lambda: has_met(dist.group.WORLD), dist.group.WORLD, 10.0, "a test")
    if group.rank == 0:
        busy = Busy(group.store(), question)
        Group.store = lambda self: busy  # type: ignore[method-assign]
    found = tell_all(group, {"rank": group.rank}, "a test", "goes on")
    if group.rank == 1:
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("question", ["check", pytest.param("get", marks=exhaustive)])
def test_who_has_told_may_leave_before_others_hear_it(question: str) -> None:
    for outcome in ranks.run_fresh(2, told, question):
        assert outcome.ok, outcome.describe()
        assert outcome.value == [{"rank": 0}, {"rank": 1}]


def test_a_question_to_the_store_sets_up_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def sets_up() -> int:
        raise AssertionError("a program for the CPU would take memory of a GPU")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", sets_up)
    assert ask(None, lambda: 7) == 7
