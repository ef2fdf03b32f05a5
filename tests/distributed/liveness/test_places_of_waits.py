"""Ranks that run the same program are never taken for ranks in different places; those with two orders always are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdp.distributed import sending
from fdp.distributed.liveness.places import PlaceOfWait, contradiction, merged
from fdp.distributed.liveness.watched import Watched

EVENTS = st.lists(st.sampled_from(["sum", "gather", "exchange"]), min_size=1, max_size=8)


def place_of(events: list[str], at: int, rank: int) -> PlaceOfWait:
    """Where a rank waits that has begun the event `at`, and all before it."""
    begun, kind = events[: at + 1], events[at]
    turns = begun.count("exchange")
    return PlaceOfWait("" if kind == "exchange" else kind, turns, len(begun) - turns, rank, f"event {at}")


@given(EVENTS, st.data())
def test_places_of_one_program_never_contradict_each_other(events: list[str], data: st.DataObject) -> None:
    """At whatever time each of them was seen."""
    at = st.lists(st.integers(0, len(events) - 1), min_size=2, max_size=4)
    places = [place_of(events, where, rank) for rank, where in enumerate(data.draw(at))]
    assert contradiction(merged(places)) is None


@given(EVENTS, st.integers(0, 3), st.permutations(["sum", "gather", "exchange"]))
def test_ranks_in_another_order_do(events: list[str], rank: int, order: list[str]) -> None:
    at, (first, second, _) = len(events), order
    one = place_of([*events, first, second], at, rank)
    other = place_of([*events, second, first], at, rank + 1)
    found = contradiction(merged([one, other, place_of(events, 0, rank + 2)]))
    assert found is not None
    assert set(found) == {one, other}


def test_messages_of_devices_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank replays them in a CUDA graph, unseen, while another one starts them by itself: counts would differ."""
    nothing: Any = None
    watched = Watched("group", 0, 2, nothing)
    monkeypatch.setattr(sending, "watch_over", lambda group: watched)
    backends = {"cpu": "gloo", "meta": "nccl"}
    group: Any = SimpleNamespace(process_group=None, backend_for=lambda device: backends[device.type])
    group.watched = group
    for device, count in (("cpu", 1), ("meta", 1), ("meta", 1), ("cpu", 2)):
        sending.start_message(
            "a sum", torch.empty(1, device=device), group, None, lambda ranks: SimpleNamespace(wait=None)
        )
        assert watched.messages == count
