"""The index of a checkpoint: it is read as names and numbers, and refused where it does not say all, or too much."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from checkpoints import Exploit, names_in, version
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.serialization import _get_layout

import fdp
from fdp.state.index import INDEX, read_index

# From a stranger.


def test_an_index_that_is_a_program_is_not_run(tmp_path: Path) -> None:
    fdp.save(tmp_path / "a", version(1))
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Exploit(tmp_path / "hurt")))
    with pytest.raises(fdp.ArgumentError, match=r"is not the index of a whole checkpoint. Nothing of it was run"):
        fdp.load(tmp_path / "a", version(0))
    assert not (tmp_path / "hurt").exists()


def test_a_program_deep_inside_of_an_index_is_not_run(tmp_path: Path) -> None:
    fdp.save(tmp_path / "a", version(1))
    index = read_index(tmp_path / "a" / INDEX)
    index.planner_data = {"state['a']": Exploit(tmp_path / "hurt")}
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(fdp.ArgumentError, match=r"it calls posix.mkdir"):
        fdp.load(tmp_path / "a", version(0))
    assert not (tmp_path / "hurt").exists()


def test_an_index_of_gibibytes_is_not_read(tmp_path: Path) -> None:
    fdp.save(tmp_path / "a", version(1))
    with (tmp_path / "a" / INDEX).open("r+b") as file:
        file.truncate(2**31)  # with a hole, which takes no room
    with pytest.raises(fdp.ArgumentError, match=r"it has 2\.0 GiB, more than any index"):
        fdp.load(tmp_path / "a", version(0))


def text(value: str) -> bytes:
    return pickle.BINUNICODE + len(value).to_bytes(4, "little") + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


def changing(target: bytes, attribute: str, value: bytes) -> bytes:
    """A pickle that sets an attribute of what it names, by a state that is meant for objects with slots."""
    slots = pickle.EMPTY_DICT + text(attribute) + value + pickle.SETITEM
    return pickle.PROTO + b"\x04" + target + pickle.NONE + slots + pickle.TUPLE2 + pickle.BUILD


PATH, ENCODING = named("pathlib", "PosixPath"), named("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")


@pytest.mark.parametrize(
    "program",
    [
        changing(PATH, "name", text("x")),
        changing(named("torch.serialization", "_get_layout"), "cache", text("x")),
        changing(ENCODING + pickle.BININT1 + b"\x00" + pickle.TUPLE1 + pickle.REDUCE, "_value_", text("x")),
        changing(named("torch.distributed.checkpoint.metadata", "Metadata"), "version", text("x")),
        pickle.PROTO + b"\x04" + named("builtins", "print") + text("x") + pickle.TUPLE1 + pickle.REDUCE,
        pickle.PROTO + b"\x04" + pickle.EMPTY_DICT + pickle.EMPTY_TUPLE + text("x") + pickle.SETITEM,
        pickle.PROTO + b"\x04" + pickle.BINBYTES8 + (2**40).to_bytes(8, "little"),
    ],
    ids=["class", "function", "enum", "dataclass", "print", "tuple as dict", "bytes without end"],
)
def test_an_index_changes_nothing_of_the_process(tmp_path: Path, program: bytes) -> None:
    fdp.save(tmp_path / "a", version(1))
    before = PosixPath.name, Metadata.version, [each.value for each in _MEM_FORMAT_ENCODING]
    layout = dict(_get_layout.__dict__)
    (tmp_path / "a" / ".metadata").write_bytes(program + pickle.STOP)
    with pytest.raises(fdp.ArgumentError, match="is not the index of a whole checkpoint"):
        fdp.load(tmp_path / "a", version(0))
    assert before == (PosixPath.name, Metadata.version, [each.value for each in _MEM_FORMAT_ENCODING])
    assert layout == _get_layout.__dict__


# Damaged.


def without_pieces(index: Any) -> None:
    index.state_dict_metadata["state['a']"].chunks.clear()


def with_a_smaller_piece(index: Any) -> None:
    index.state_dict_metadata["state['a']"].chunks[0].sizes = torch.Size([299])


def with_a_larger_tensor(index: Any) -> None:
    index.state_dict_metadata["state['a']"].size = torch.Size([301])


def in_pieces(index: Any, *pieces: tuple[int, int]) -> None:
    """Say that a tensor lies in other pieces than it does; where each lies, the index says."""
    place = index.storage_data.pop(MetadataIndex("state['a']", torch.Size([0])))
    chunks = [ChunkStorageMetadata(torch.Size([at]), torch.Size([size])) for at, size in pieces]
    index.state_dict_metadata["state['a']"].chunks = chunks
    index.storage_data.update({MetadataIndex("state['a']", chunk.offsets): place for chunk in chunks})


def with_a_piece_outside(index: Any) -> None:
    in_pieces(index, (1, 300))


def with_pieces_that_overlap(index: Any) -> None:
    in_pieces(index, (0, 200), (100, 100))


def with_a_piece_of_more_dimensions(index: Any) -> None:
    index.state_dict_metadata["state['a']"].chunks[0].sizes = torch.Size([300, 1])


def without_a_place(index: Any) -> None:
    index.storage_data.popitem()


def with_a_place_beyond_the_end(index: Any) -> None:
    next(iter(index.storage_data.values())).length = 10**9


def without_properties(index: Any) -> None:
    index.state_dict_metadata["state['a']"].properties = None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_pieces, "a tensor is not there as a whole"),
        (with_a_smaller_piece, "a tensor is not there as a whole"),
        (with_a_larger_tensor, "a tensor is not there as a whole"),
        (with_a_piece_outside, "a piece of a tensor lies outside of it"),
        (with_pieces_that_overlap, "pieces of a tensor overlap"),
        (with_a_piece_of_more_dimensions, "is not the index of a whole checkpoint"),
        (without_a_place, "it does not say where"),
        (with_a_place_beyond_the_end, "and not 1000000000"),
        (without_properties, "is not the index of a whole checkpoint"),
    ],
)
def test_an_index_that_does_not_say_all_is_refused(tmp_path: Path, damage: Callable[[Any], None], said: str) -> None:
    fdp.save(tmp_path / "a", version(1))
    index = read_index(tmp_path / "a" / INDEX)
    damage(index)
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(fdp.ArgumentError, match="is not the index of a whole checkpoint") as caught:
        fdp.load(tmp_path / "a", version(0))
    assert said in str(caught.value)


@pytest.mark.parametrize("how", ["cut off", "gone", "elsewhere"])
def test_data_that_is_not_whole_is_refused(tmp_path: Path, how: str) -> None:
    fdp.save(tmp_path / "a", version(1))
    (name,) = names_in(tmp_path / "a")
    data = tmp_path / "a" / name
    whole = data.read_bytes()
    data.unlink()
    if how == "cut off":
        data.write_bytes(whole[:-100])
    elif how == "elsewhere":
        (tmp_path / "secret").write_bytes(whole)
        data.symlink_to(tmp_path / "secret")
    with pytest.raises(fdp.ArgumentError, match="is not the index of a whole checkpoint"):
        fdp.load(tmp_path / "a", version(0))


@pytest.mark.parametrize("name", ["../b/secret.distcp", "/etc/passwd", ""])
def test_an_index_names_no_file_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    fdp.save(tmp_path / "a", version(1))
    index = read_index(tmp_path / "a" / INDEX)
    next(iter(index.storage_data.values())).relative_path = name
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(fdp.ArgumentError, match="it names the file"):
        fdp.load(tmp_path / "a", version(0))


@pytest.mark.parametrize("kept", [0, 1, 100, 400])
def test_an_index_that_is_cut_off_is_refused(tmp_path: Path, kept: int) -> None:
    fdp.save(tmp_path / "a", version(1))
    whole = (tmp_path / "a" / ".metadata").read_bytes()
    (tmp_path / "a" / ".metadata").write_bytes(whole[:kept])
    with pytest.raises(fdp.ArgumentError, match="is not the index of a whole checkpoint"):
        fdp.load(tmp_path / "a", version(0))
