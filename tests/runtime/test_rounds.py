"""The parts of the state that calls compare: all of it within 100 calls, in even parts, the same on all ranks."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdp.runtime.rounds import ROUNDS, last_compared, share_out

sizes = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 50), st.integers(0, 5_000_000)),
        st.sampled_from([1, 2, 4, 8, 16]),
    ),
    max_size=60,
)


def cost(pieces: tuple, leaves: list[tuple[int, int]]) -> int:  # type: ignore[type-arg]
    return sum(4096 + (piece.stop - piece.start) * leaves[piece.leaf][1] for piece in pieces)


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_every_element_is_compared_within_the_rounds(leaves: list[tuple[int, int]]) -> None:
    assert ROUNDS < 100 and all(ROUNDS % k for k in range(2, ROUNDS))
    rounds = share_out(leaves)
    assert len(rounds) == ROUNDS
    pieces = sorted({piece for each in rounds for piece in each})
    for leaf, (numel, _) in enumerate(leaves):
        own = [(piece.start, piece.stop) for piece in pieces if piece.leaf == leaf]
        assert all(start < stop and start % 64 == 0 for start, stop in own)
        # Slices follow each other, from the first element to the last.
        assert [start for start, _ in own] == [0, *(stop for _, stop in own)][:-1] if own else numel == 0
        assert not own or own[-1][1] == numel
    assert all(rounds) or not pieces, "a call compares nothing"
    assert rounds == share_out(list(leaves))


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_no_call_compares_much_more_than_its_part(leaves: list[tuple[int, int]]) -> None:
    rounds = share_out(leaves)
    pieces = {piece for each in rounds for piece in each}
    total = cost(tuple(pieces), leaves)
    largest = max((cost((piece,), leaves) for piece in pieces), default=0)
    assert largest <= 4096 + max(8192, sum(n * size for n, size in leaves) // ROUNDS + 1) + 64 * 16
    assert all(cost(each, leaves) <= total / ROUNDS + largest for each in rounds)


def test_states_that_are_trained_in_turn_go_through_all_rounds() -> None:
    rounds = share_out([(1000, 4)] * 7)
    for states, own in itertools.product((2, 3, 7), (0, 1)):
        seen = {piece.leaf for call in range(own, states * ROUNDS, states) for piece in rounds[call % ROUNDS]}
        assert seen == set(range(7))


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 300), st.integers(1, 300))
def test_when_a_piece_was_compared_last(leaves: list[tuple[int, int]], call: int, since: int) -> None:
    rounds = share_out(leaves)
    found = last_compared(rounds, call, since)
    for piece in {piece for each in rounds for piece in each}:
        before = [at for at in range(since, call) if piece in rounds[at % ROUNDS]]
        assert found.get(piece) == (before[-1] if before else None)
        assert call - since < ROUNDS or piece in found


def test_a_large_embedding_is_not_read_at_once() -> None:
    rounds = share_out([(2**29, 4), (1, 8)])
    assert max(cost(each, [(2**29, 4), (1, 8)]) for each in rounds) < 1.05 * 2**31 / ROUNDS
    assert torch.iinfo(torch.int32).max > 2**29
