"""The index of a checkpoint, read without running any of its code, and checked against the files.

The index of torch.distributed.checkpoint is a pickle. A pickle is a program, which can call what it names, and change
classes and functions of the process that reads it. So this one gets no real functions and classes: whatever it names
stays a name, and whatever it makes stays a record of names and plain values. Only then is the index made of these, each
part of which has to be of its type, and to lie in its file.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import stat
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

# Private to torch, and in every checkpoint of its `FileSystemWriter`: file, offset and length of an entry.
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fdp.errors import ArgumentError, build_message
from fdp.state.seal import without_seal
from fdp.tables import format_bytes

INDEX = ".metadata"
"""The file of a checkpoint that says what lies in which other file of its directory."""

_LARGEST_BYTES = 2**30
"""A larger file is no index, and would fill the memory: an index is read whole."""


def read_index(path: Path) -> Metadata:
    """Read which tensors and values a checkpoint holds, and where in which files of its directory.

    Args:
        path: the index.

    Returns:
        The index; it holds each tensor whole, in files that are there.

    Raises:
        ArgumentError: it is damaged, be it in one bit, or is none; or files are missing, cut off, or outside of its
            directory.
        OSError: it is not there, or cannot be read.
    """
    if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would be waited for
        raise _refused(path, "it is no file")
    if path.is_file() and path.stat().st_size > _LARGEST_BYTES:
        raise _refused(path, f"it has {format_bytes(path.stat().st_size)}, more than any index")
    with path.open("rb") as file:
        try:
            content, is_sealed = without_seal(file.read())
            stream = io.BytesIO(content)
            root = _IndexUnpickler(stream).load()
            if stream.read(1):  # such as a seal of which a bit has flipped
                raise _Broken("it goes on after its end" if not is_sealed else "it ends before its seal")
            return _index_of(root, path.parent)
        except OSError:
            raise
        except Exception as error:  # whatever a damaged pickle makes of itself
            raise _refused(path, f"{type(error).__name__}: {error}") from error


def _refused(path: Path, why: str) -> ArgumentError:
    return ArgumentError(
        build_message(
            f"{os.fspath(path)!r} is not the index of a whole checkpoint. Nothing of it was run.",
            [why],
            remedy="load another checkpoint, and find out what wrote this one.",
        )
    )


def files_of(index: Metadata) -> set[str]:
    """The files that a checkpoint consists of, besides its index."""
    return {info.relative_path for info in index.storage_data.values()}


# What a pickle names, and makes.


@dataclass(frozen=True)
class _Name:
    """Something that the pickle names. It is not looked up."""

    module: str
    name: str


class _Record:
    """An object that the pickle makes: the name of its class, and its attributes."""

    def __init__(self, kind: str) -> None:
        self.kind, self.state = kind, None


_FORMAT = "torch.distributed.checkpoint"
_RECORDS = frozenset({
    *((f"{_FORMAT}.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata",
    )),
    (f"{_FORMAT}.filesystem", "_StorageInfo"),
})  # fmt: skip
_CALLED = frozenset({
    # What is called on plain values, and of which those values say enough.
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_FORMAT}.metadata", "_MEM_FORMAT_ENCODING"),
})  # fmt: skip


_PLAIN = (
    pickle.PROTO, pickle.FRAME, pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET,
    pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2,
    pickle.LONG1, pickle.BINFLOAT, pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.EMPTY_DICT, pickle.EMPTY_LIST,
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.APPEND, pickle.APPENDS,
    pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.STOP,
)  # fmt: skip
"""Instructions that make plain values, and names."""

_InPython: Any = pickle._Unpickler
"""Of the standard library, and private: `Unpickler` in Python, of which each instruction can be replaced."""


class _IndexUnpickler(_InPython):  # type: ignore[misc]  # it has no types of its own
    """Knows the instructions that an index consists of, and no other."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {code[0]: _InPython.dispatch[code[0]] for code in _PLAIN}

    def find_class(self, module: str, name: str) -> _Name:
        """Return the name that the pickle asks for, as a name."""
        return _Name(module, name)

    def load_newobj(self) -> None:
        """Make a record."""
        given, named = self.stack.pop(), self.stack.pop()
        if type(named) is not _Name or (named.module, named.name) not in _RECORDS or given != ():
            raise pickle.UnpicklingError(f"it makes {_record_text(named)}")
        self.append(_Record(named.name))

    def load_reduce(self) -> None:
        """Record a call with its arguments, in place of its result."""
        given, named = self.stack.pop(), self.stack.pop()
        if type(named) is not _Name or (named.module, named.name) not in _CALLED or type(given) is not tuple:
            raise pickle.UnpicklingError(f"it calls {_record_text(named)}")
        self.append(given)

    def load_build(self) -> None:
        """Give a record its attributes."""
        state = self.stack.pop()
        record = self.stack[-1]
        if type(record) is not _Record or record.state is not None:
            raise pickle.UnpicklingError(f"it changes {_record_text(record)}")
        record.state = state

    def load_setitem(self) -> None:
        """Fill a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        """Fill a dict."""
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        into = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(into) is not dict or type(key) not in (str, _Record):
                raise pickle.UnpicklingError(f"it uses {_record_text(key)} as a key")
            into[key] = value

    for _code, _load in (
        (pickle.NEWOBJ, load_newobj), (pickle.REDUCE, load_reduce), (pickle.BUILD, load_build),
        (pickle.SETITEM, load_setitem), (pickle.SETITEMS, load_setitems),
    ):  # fmt: skip
        dispatch[_code[0]] = _load


def _record_text(value: object) -> str:
    return f"{value.module}.{value.name}" if type(value) is _Name else f"a {type(value).__name__}"


# The index that they stand for.


class _Broken(Exception):
    """A part of an index is invalid."""


def _index_of(root: object, directory: Path) -> Metadata:
    state = _state(root, "Metadata")
    files = {_key(key): _info(value, directory) for key, value in _typed(state["storage_data"], dict).items()}
    items: dict[str, Any] = {}
    for name, record in _typed(state["state_dict_metadata"], dict).items():
        items[_typed(name, str)] = item = _item(record)
        chunks = [None] if isinstance(item, BytesStorageMetadata) else [chunk.offsets for chunk in item.chunks]
        for offsets in chunks:
            if MetadataIndex(name, offsets) not in files:
                raise _Broken(f"it does not say where {name} lies")
    return Metadata(items, storage_data=files)


def _item(record: object) -> Any:
    """The entry of a checkpoint under a name: a value, or a tensor in pieces that make up all of it."""
    if type(record) is _Record and record.kind == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(record, "TensorStorageMetadata")
    size = _numbers(state["size"])
    pieces: list[_Piece] = []
    for each in _typed(state["chunks"], list):
        piece = _state(each, "ChunkStorageMetadata")
        offsets, sizes = _numbers(piece["offsets"]), _numbers(piece["sizes"])
        if any(a + b > n for a, b, n in zip(offsets, sizes, size, strict=True)):
            raise _Broken("a piece of a tensor lies outside of it")
        pieces.append((offsets, sizes))
    if not pieces or sum(math.prod(sizes) for _, sizes in pieces) < math.prod(size):
        raise _Broken("a tensor is not there as a whole")
    if not are_the_whole(size, pieces):
        raise _Broken("pieces of a tensor overlap")
    chunks = [ChunkStorageMetadata(*piece) for piece in pieces]
    dtype, _, requires_grad, *_ = _typed(_typed(state["properties"], _Record).state, tuple)
    named = getattr(torch, dtype.name, None) if type(dtype) is _Name and dtype.module == "torch" else None
    properties = TensorProperties(_typed(named, torch.dtype), requires_grad=_typed(requires_grad, bool))
    return TensorStorageMetadata(properties, size, chunks)


_Piece = tuple[torch.Size, torch.Size]
"""Where a piece of a tensor begins, and its shape."""


def are_the_whole(size: Sequence[int], pieces: Sequence[_Piece]) -> bool:
    """Whether pieces cover a tensor, each element exactly once.

    Let a function be 1 in a piece and 0 elsewhere. Its differences along all dimensions are 1 or -1 at the corners of
    the piece, and 0 elsewhere. They tell the function, since summing gives it back. So pieces make up the whole exactly
    if the differences of all of them add up to those of the whole. That takes time in proportion to the pieces, and to
    their corners: two for each dimension in which some piece is not as large as the tensor, multiplied. Where these are
    more than the pieces, each piece is compared with each.

    Args:
        size: the shape of the tensor.
        pieces: of it; those without elements do not count.
    """
    pieces = [(start, shape) for start, shape in pieces if math.prod(shape)]
    divided = [at for at, n in enumerate(size) if any(shape[at] != n for _, shape in pieces)]
    if 2 ** len(divided) > len(pieces):
        found = sum(math.prod(shape) for _, shape in pieces) == math.prod(size)
        return found and not any(_overlap(*one, *two) for one, two in itertools.combinations(pieces, 2))
    left: dict[tuple[int, ...], int] = defaultdict(int)
    whole = (0,) * len(size), size
    for sign, (start, shape) in ((-1, whole), *((1, piece) for piece in pieces)):
        for ends in itertools.product((0, 1), repeat=len(divided)):
            corner = tuple(start[at] + end * shape[at] for at, end in zip(divided, ends, strict=True))
            left[corner] += sign * (-1) ** sum(ends)
    return not any(left.values()) or not math.prod(size)


def _overlap(start: Sequence[int], size: Sequence[int], other: Sequence[int], other_size: Sequence[int]) -> bool:
    return all(a < c + d and c < a + b for a, b, c, d in zip(start, size, other, other_size, strict=True))


def _key(record: object) -> MetadataIndex:
    state = _state(record, "MetadataIndex")
    offset, index = state.get("offset"), state.get("index")
    name = _typed(state["fqn"], str)
    return MetadataIndex(name, None if offset is None else _numbers(offset), None if index is None else _number(index))


def _info(record: object, directory: Path) -> _StorageInfo:
    """The file and offset of an entry, if the file exists and is long enough."""
    state = _state(record, "_StorageInfo")
    name, offset, length = _typed(state["relative_path"], str), _number(state["offset"]), _number(state["length"])
    if state.get("transform_descriptors") is not None:
        raise _Broken(f"{name} is encoded")
    if not name or Path(name).name != name:
        raise _Broken(f"it names the file {name!r}")
    try:
        found = (directory / name).lstat()
    except OSError as error:
        raise _Broken(f"{name} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size < offset + length:
        raise _Broken(f"{name} has {found.st_size} bytes, and not {offset + length}")
    return _StorageInfo(name, offset, length)


def _state(record: object, kind: str) -> Mapping[str, Any]:
    if type(record) is not _Record or record.kind != kind:
        raise _Broken(f"it has {_record_text(record)} in the place of a {kind}")
    result: Mapping[str, Any] = _typed(record.state, dict)
    return result


def _numbers(given: object) -> torch.Size:
    """The arguments of a call of torch.Size, as a tuple."""
    (numbers,) = _typed(given, tuple)
    return torch.Size([_number(each) for each in _typed(numbers, tuple)])


def _number(value: Any) -> int:
    if _typed(value, int) < 0:
        raise _Broken(f"it has {value} in the place of a size")
    return int(value)


def _typed(value: object, kind: type) -> Any:
    if type(value) is not kind:
        raise _Broken(f"it has {_record_text(value)} in the place of a {kind.__name__}")
    return value
