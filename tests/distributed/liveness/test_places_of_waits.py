"""Ranks that run the same program are never taken for ranks in different places; those with two orders always are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fdp.distributed.liveness.places import PlaceOfWait, contradiction, merged

EVENTS = st.lists(st.sampled_from(["message", "exchange"]), min_size=1, max_size=8)


def place_of(events: list[str], at: int, rank: int) -> PlaceOfWait:
    """Where a rank waits that has begun the event `at`, and all before it."""
    begun = events[: at + 1]
    return PlaceOfWait(events[at] == "exchange", begun.count("exchange"), begun.count("message"), rank, f"event {at}")


@given(EVENTS, st.data())
def test_places_of_one_program_never_contradict_each_other(events: list[str], data: st.DataObject) -> None:
    """At whatever time each of them was seen."""
    at = st.lists(st.integers(0, len(events) - 1), min_size=2, max_size=4)
    places = [place_of(events, where, rank) for rank, where in enumerate(data.draw(at))]
    assert contradiction(merged(places)) is None


@given(EVENTS, st.integers(0, 3))
def test_ranks_in_another_order_do(events: list[str], rank: int) -> None:
    at = len(events)
    one = place_of([*events, "exchange", "message"], at, rank)
    other = place_of([*events, "message", "exchange"], at, rank + 1)
    assert contradiction(merged([one, other, place_of(events, 0, rank + 2)])) == (one, other)
