"""What code reads, and not only to count it on: by the instructions of whatever Python runs the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fdp.trace.calls.names_in_code import names_read_for_more

TABLE, NUMBER = {"n": 0, 0: 1}, 0


def adds_to_an_attribute(held: Any) -> None:
    held.turn += 1


def adds_to_an_attribute_in_full(held: Any) -> None:
    held.inner.turn = held.inner.turn + held.step


def adds_to_an_item(held: Any) -> None:
    TABLE["n"] += 1


def adds_to_an_item_in_full(held: Any) -> None:
    TABLE["n"] = TABLE["n"] + 1


def adds_to_a_global(held: Any) -> None:
    global NUMBER
    NUMBER += held.by


def adds_and_reads(held: Any) -> int:
    held.turn += 1
    return int(held.turn % 16)


def adds_and_reads_an_item(held: Any) -> int:
    TABLE["n"] += 1
    return TABLE["n"] % 2 + TABLE[0]


def moves_to_another_place(held: Any) -> None:
    held.other = held.turn + 1


def takes_turns(held: Any) -> None:
    held.turn = not held.turn


def reads_in_a_function_of_its_own(held: Any) -> Callable[[], int]:
    count = 0

    def inner() -> int:
        nonlocal count
        count += 1
        return count

    return inner


@pytest.mark.parametrize(
    ("function", "read"),
    [
        (adds_to_an_attribute, set()),
        (adds_to_an_attribute_in_full, {"inner", "step"}),
        (adds_to_an_item, {"TABLE"}),
        (adds_to_an_item_in_full, {"TABLE"}),
        (adds_to_a_global, {"by"}),
        (adds_and_reads, {"int", "turn"}),
        (adds_and_reads_an_item, {"TABLE", "['n']", "[0]"}),
        (moves_to_another_place, {"turn"}),
        (takes_turns, {"turn"}),
        (reads_in_a_function_of_its_own, {"count"}),
    ],
)
def test_what_is_read_for_more(function: Callable[[Any], Any], read: set[str]) -> None:
    assert names_read_for_more(function.__code__) == read
