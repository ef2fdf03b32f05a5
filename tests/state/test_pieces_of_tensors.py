"""Whether the pieces of a tensor make up all of it: as counting its elements says, and for many pieces as well."""

from __future__ import annotations

import itertools
import math
import os
import time
from pathlib import Path

import pytest
import torch
from checkpoints import version
from hypothesis import given
from hypothesis import strategies as st

import fdp
from fdp.state.index import INDEX, are_the_whole, read_index

Piece = tuple[torch.Size, torch.Size]


def counted(size: tuple[int, ...], pieces: list[Piece]) -> bool:
    """Whether each element is in one piece; by looking at each."""
    times = torch.zeros(size)
    for start, shape in pieces:
        times[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))] += 1
    return bool((times == 1).all())


@st.composite
def divided(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Piece]]:
    """A tensor, cut again and again; then some pieces may be moved, doubled, or left out."""
    size = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    pieces = [((0,) * len(size), size)]
    for _ in range(draw(st.integers(0, 12)) if size else 0):
        start, shape = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        at = draw(st.integers(0, len(size) - 1))
        cut = draw(st.integers(0, shape[at]))
        for begin, length in ((0, cut), (cut, shape[at] - cut)):
            pieces.append((
                (*start[:at], start[at] + begin, *start[at + 1 :]), (*shape[:at], length, *shape[at + 1 :]),
            ))  # fmt: skip
    for _ in range(draw(st.integers(0, 2))):
        start, shape = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        start = tuple(draw(st.integers(0, n - length)) for n, length in zip(size, shape, strict=True))
        pieces += [(start, shape)] * draw(st.integers(1, 2))
    return size, [(torch.Size(start), torch.Size(shape)) for start, shape in draw(st.permutations(pieces))]


@given(divided())
def test_pieces_are_the_whole_exactly_if_each_element_is_in_one(case: tuple[tuple[int, ...], list[Piece]]) -> None:
    size, pieces = case
    assert are_the_whole(size, pieces) == counted(size, pieces)


@pytest.mark.parametrize("counts", [(20_000,), (140, 140), (27, 27, 27), (1, 5000, 1)])
def test_many_pieces_take_no_longer_each_than_few(counts: tuple[int, ...]) -> None:
    size = torch.Size(3 * n for n in counts)
    shape = torch.Size([3] * len(counts))
    pieces = [(torch.Size(3 * i for i in at), shape) for at in itertools.product(*map(range, counts))]
    begun_s = time.process_time()
    assert are_the_whole(size, pieces)
    # Each with each would be minutes: some 10**8 pairs.
    assert time.process_time() - begun_s < 10
    assert not are_the_whole(size, [*pieces[1:], pieces[1]])
    assert len(pieces) == math.prod(counts)


def test_a_pipe_in_the_place_of_an_index_is_not_waited_for(tmp_path: Path) -> None:
    fdp.save(tmp_path / "1", version(1), random=True)
    (tmp_path / "2").mkdir()
    os.mkfifo(tmp_path / "2" / INDEX)
    manager = fdp.CheckpointManager(tmp_path)
    assert manager.latest_step() == 1
    with pytest.warns(UserWarning, match="takes step 1: newer checkpoints are damaged.*it is no file"):
        assert manager.restore(version(0))[1] == 1
    for refuse in (lambda: read_index(tmp_path / "2" / INDEX), lambda: manager.restore(version(0), 2)):
        with pytest.raises(fdp.ArgumentError, match=r"it is no file|found no checkpoint"):
            refuse()
