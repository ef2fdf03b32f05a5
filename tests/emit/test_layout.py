"""The layout of memory: pieces that are in use at once lie apart, and the same program is laid out alike."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import examples, some

from fdp.emit.memory import layout as layout_room
from fdp.emit.memory.layout import ALIGNMENT_BYTES, Lifetime, lay_out


@st.composite
def lifetimes(draw: Any) -> list[Lifetime]:
    pieces: list[Lifetime] = []
    for key in range(draw(st.integers(1, 25))):
        first = draw(st.integers(0, 20))
        last = first + draw(st.integers(0, 8))
        size = draw(st.sampled_from((1, 64, 65, 128, 1000, 4096)))
        older = [piece.key for piece in pieces if piece.first < piece.last == first]
        reusable = tuple(draw(st.lists(st.sampled_from(older), max_size=2))) if older else ()
        pieces.append(Lifetime(key, size, first, last, reusable))
    return pieces


@examples(300)
@given(lifetimes())
def test_pieces_that_are_in_use_at_once_do_not_overlap(pieces: list[Lifetime]) -> None:
    layout = lay_out(pieces)
    assert layout.offsets.keys() == {piece.key for piece in pieces}
    for piece in pieces:
        start = layout.offsets[piece.key]
        assert start % ALIGNMENT_BYTES == 0
        assert start >= 0 and start + piece.size_bytes <= layout.size_bytes
    for index, one in enumerate(pieces):
        for two in pieces[:index]:
            if two.key in one.may_reuse and two.last == one.first:
                continue  # it may take that one's place
            if one.first <= two.last and two.first <= one.last:
                first, second = layout.offsets[one.key], layout.offsets[two.key]
                assert first + one.size_bytes <= second or second + two.size_bytes <= first, (one, two)
    assert layout.needed_bytes <= layout.size_bytes


@examples(100)
@given(lifetimes())
def test_one_place_is_reused_once(pieces: list[Lifetime]) -> None:
    layout = lay_out(pieces)
    for index, one in enumerate(pieces):
        for two in pieces[:index]:
            # Two pieces that may reuse one place begin at the same position, and must not both have it.
            if one.first == two.first:
                assert layout.offsets[one.key] != layout.offsets[two.key]


def test_a_chain_of_pointwise_results_takes_one_place() -> None:
    chain = [Lifetime(k, 100, k, k + 1, (k - 1,) if k else ()) for k in range(9)]
    assert lay_out(chain).size_bytes == 128
    assert lay_out([Lifetime(k, 100, k, k + 1) for k in range(9)]).size_bytes == 256


@pytest.mark.parametrize("way", some([(way,) for way in layout_room._WAYS], 3))
@pytest.mark.parametrize("check", [test_pieces_that_are_in_use_at_once_do_not_overlap, test_one_place_is_reused_once])
def test_placed_the_largest_first_they_lie_apart_too(check: Any, way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_order, largest_first = layout_room._in_order, layout_room._largest_first
    monkeypatch.setattr(f"{__name__}.lay_out", lambda pieces: largest_first(*in_order(pieces), *way))
    check()


@examples(100)
@given(lifetimes())
def test_no_way_is_smaller_than_the_one_that_is_taken(pieces: list[Lifetime]) -> None:
    taken, (first, heads) = lay_out(pieces), layout_room._in_order(pieces)
    others = [layout_room._largest_first(first, heads, *way).size_bytes for way in layout_room._WAYS]
    assert taken.size_bytes == min(first.size_bytes, *others)


def test_where_the_order_of_use_leaves_gaps_the_largest_come_first() -> None:
    """Two large pieces in turn, with small ones between that outlive the first: in order, the second finds no gap."""
    pieces = [Lifetime("a", 1024, 0, 1), Lifetime("b", 64, 1, 4), Lifetime("c", 2048, 2, 3), Lifetime("d", 64, 3, 5)]
    layout = lay_out(pieces)
    assert layout.size_bytes == layout.needed_bytes == 2048 + 128
