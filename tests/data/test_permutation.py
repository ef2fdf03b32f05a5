"""Permutations from a key: each number once, every order as likely as another, any position at once."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fdp
from fdp.data.permutation import Permutation


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**64))
@settings(max_examples=60, deadline=None)
def test_every_number_comes_once(length: int, seed: int) -> None:
    whole = Permutation(length, fdp.random.key(seed))(torch.arange(length))
    assert sorted(whole.tolist()) == list(range(length))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 25, 26])
def test_every_number_of_a_few_comes_once(length: int) -> None:
    for seed in range(20):
        whole = Permutation(length, fdp.random.key(seed))(torch.arange(length))
        assert sorted(whole.tolist()) == list(range(length))


@given(length=st.integers(1, 2**62), seed=st.integers(0, 100), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_position_does_not_depend_on_what_else_is_asked(length: int, seed: int, data: st.DataObject) -> None:
    positions = torch.tensor(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=9)))
    permutation = Permutation(length, fdp.random.key(seed))
    together = permutation(positions)
    assert ((together >= 0) & (together < length)).all()
    assert len(set(together.tolist())) == len(set(positions.tolist()))
    for position, found in zip(positions, together, strict=True):
        assert permutation(position.unsqueeze(0)) == found


def permutations(length: int, keys: torch.Tensor) -> list[tuple[int, ...]]:
    """The permutations of many keys: as `Permutation` makes them, one after the other, but all at once."""
    together = Permutation(length, keys[:, None])
    found = together._moved(torch.arange(length).expand(len(keys), length))
    while (outside := found >= length).any():
        found = torch.where(outside, together._moved(found), found)
    for number in (0, len(keys) // 2, len(keys) - 1):
        assert found[number].equal(Permutation(length, keys[number])(torch.arange(length)))
    return [tuple(each) for each in found.tolist()]


def chi_square(counts: list[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 for count in counts) / expected


@pytest.mark.parametrize(("length", "at_most"), [(3, 20.5), (4, 49.7), (5, 173.0)])
def test_every_order_of_a_few_is_as_likely_as_another(length: int, at_most: float) -> None:
    keys = fdp.random.split(fdp.random.key(1), 4800)
    found = Counter(permutations(length, keys))
    counts = [found[order] for order in itertools.permutations(range(length))]
    # 5, 23 and 119 degrees of freedom: beyond it once in a thousand runs, and keys are fixed.
    assert chi_square(counts) < at_most


@pytest.mark.parametrize("length", [5, 10, 13])
def test_every_pair_of_positions_is_as_likely_to_hold_one_pair_of_numbers_as_another(length: int) -> None:
    keys = fdp.random.split(fdp.random.key(2), 4000)
    pairs = Counter(whole[:2] for whole in permutations(length, keys))
    counts = [pairs[pair] for pair in itertools.permutations(range(length), 2)]
    freedom = len(counts) - 1
    assert chi_square(counts) < freedom + 3.3 * (2 * freedom) ** 0.5


def test_neighbours_lie_anywhere() -> None:
    """As in a random permutation: distances between neighbours have the mean n / 3, steps up as many as down."""
    length = 100_000
    whole = Permutation(length, fdp.random.key(3))(torch.arange(length)).double()
    steps = whole.diff()
    assert abs(steps.abs().mean() / length - 1 / 3) < 0.003
    assert abs((steps > 0).double().mean() - 0.5) < 0.005
    assert abs(torch.corrcoef(torch.stack([whole, torch.arange(length).double()]))[0, 1]) < 0.015


def test_a_permutation_of_a_billion_and_more_takes_no_memory_of_that_size() -> None:
    started = time.monotonic()
    for length in (10**9, 2**62):
        positions = torch.tensor([0, 1, length // 2, length - 1])
        assert len(set(Permutation(length, fdp.random.key(0))(positions).tolist())) == 4
    assert time.monotonic() - started < 30  # and not for ever: it is no list
