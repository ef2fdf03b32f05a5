"""A bit of a checkpoint that flips on the disk is an error that names what it belongs to, whatever that is."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from checkpoints import flip_a_bit
from samples import exhaustive, some

import fdp
from fdp.state.index import INDEX, read_index
from fdp.state.pieces import is_intact
from fdp.state.storage import read_plain

VALUES = {"n": 123456789, "f": 3.25, "s": "hello world", "b": True, "c": 1 + 2j}


def flip_in_the_value(folder: Path, name: str) -> None:
    """Flip a bit in the middle of what says which value a leaf has; the value stays one of its class."""
    index = read_index(folder / INDEX)
    (place,) = (info for key, info in index.storage_data.items() if key.fqn == name)
    path = folder / place.relative_path
    data = bytearray(path.read_bytes())
    piece = bytes(data[place.offset : place.offset + place.length])
    at = piece.index(b"data.pkl")
    like = read_plain(name, io.BytesIO(piece), None)
    for byte in range(at, len(piece)):
        damaged = bytearray(piece)
        damaged[byte] ^= 1
        try:
            found = read_plain(name, io.BytesIO(bytes(damaged)), like)
        except Exception:  # this bit matters in another way
            continue
        if found != like:
            data[place.offset + byte] ^= 1
            path.write_bytes(bytes(data))
            return
    raise AssertionError(f"no bit of {name} changes its value")


@pytest.mark.parametrize("name", [*VALUES])
def test_a_value_that_is_no_tensor(tmp_path: Path, name: str) -> None:
    fdp.save(tmp_path / "a", {**VALUES, "t": torch.arange(5)})
    flip_in_the_value(tmp_path / "a", f"state['{name}']")
    with pytest.raises(fdp.ArgumentError, match="has been changed since it was saved") as caught:
        fdp.load(tmp_path / "a", {**VALUES, "t": torch.arange(5)})
    assert str(caught.value).splitlines()[1:-1] == [f"  state['{name}']: not the bits that were saved"]


def test_the_manager_passes_over_one_with_such_a_value(tmp_path: Path) -> None:
    with fdp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.ones(3), "n": 2**20 + step}, blocking=True)
        flip_in_the_value(tmp_path / "2", "state['n']")
        with pytest.warns(UserWarning, match=r"takes step 1: .*/2' has been changed .* state\['n'\]: not the bits"):
            state, step = manager.restore({"w": torch.zeros(3), "n": 0})
    assert (state["n"], step) == (2**20 + 1, 1)


@pytest.mark.parametrize("value", some([123456789, "hello world", torch.arange(3.0)], every=3))
def test_no_bit_of_a_piece_makes_another_value_of_it(value: Any) -> None:
    written = io.BytesIO()
    torch.save(value, written)
    piece = written.getvalue()
    assert is_intact(piece)
    passed = 0
    for at in range(0, len(piece) * 8, 3):
        damaged = bytearray(piece)
        damaged[at // 8] ^= 1 << at % 8
        if is_intact(bytes(damaged)):
            passed += 1
            try:
                found = torch.load(io.BytesIO(bytes(damaged)), weights_only=True)
            except Exception:  # an error names the leaf as well
                continue
            assert repr(found) == repr(value)
    assert passed  # bits of the archive's table that mean nothing to a reader


def test_any_bit_is_the_same_value_or_an_error_with_the_leafs_name(tmp_path: Path) -> None:
    fdp.save(tmp_path / "a", {"n": 123456789})
    (path,) = (tmp_path / "a").glob("*.distcp")
    whole, refused = path.read_bytes(), 0
    for at in range(0, len(whole) * 8, 61):
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(bytes(damaged))
        try:
            assert fdp.load(tmp_path / "a", {"n": 0}) == {"n": 123456789}
        except fdp.ArgumentError as error:
            assert "state['n']: " in str(error) or "fingerprints: " in str(error)
            refused += 1
    assert refused


def test_what_was_written_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        fdp.save(tmp_path / "a", {"n": 3, "w": torch.ones(2)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert fdp.load(tmp_path / "a", {"n": 0, "w": torch.zeros(2)})["n"] == 3


# Parts of sharded leaves.


def sharded(number: float) -> dict[str, Any]:
    return {"w": fdp.shard(torch.full((4096,), number), min_size=0), "n": 1}


def save_parts(folder: str) -> None:
    with fdp.CheckpointManager(folder) as manager:
        for step in (1, 2):
            manager.save(step, sharded(step + 0.5), blocking=True)


def damaged_parts(folder: str, whole: bool) -> tuple[str, int, str]:
    like = {"w": torch.zeros(4096), "n": 0} if whole else sharded(0.0)
    with pytest.raises(fdp.ArgumentError, match="has been changed since it was saved") as caught:
        fdp.load(f"{folder}/2", like)
    with pytest.warns(UserWarning, match="takes step 1") as told:
        state, step = fdp.CheckpointManager(folder).restore(like, random=False)
    values = fdp.unshard(state)["w"] if not whole else state["w"]
    assert set(values.tolist()) == {1.5}
    return str(caught.value), step, str(told[0].message)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [1, *(pytest.param(n, marks=exhaustive) for n in (2, 3))])
def test_a_part_of_a_sharded_leaf_on_any_number_of_ranks(size: int, whole: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        ranks.run(2, save_parts, name)
        flip_a_bit_of_one_part(Path(name) / "2", 2.5)
        told = ranks.run(size, damaged_parts, name, whole)
    for text, step, warned in told:
        assert text.splitlines()[1:-1] == ["  state['w']: not the bits that were saved"]
        assert step == 1 and "state['w']: not the bits" in warned


def flip_a_bit_of_one_part(folder: Path, number: float) -> None:
    other, *_ = sorted(folder.glob("*.distcp"))
    other.rename(folder / "aside")  # each rank's file begins alike
    flip_a_bit(folder, number)
    (folder / "aside").rename(other)
