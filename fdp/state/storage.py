"""Checkpoints on disk, by torch.distributed.checkpoint: one replaces another at once, and reading one runs no code.

References: torch.distributed.checkpoint (`StorageWriter`, `StorageReader`).
"""

from __future__ import annotations

import io
import os
import pickle
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata

from fdp.errors import ArgumentError, FdpError, build_message

INDEX = ".metadata"
"""The file of a checkpoint that says what lies in which other file of its directory."""

_DATA = "*.distcp"


class Writer(dcp.FileSystemWriter):
    """Writes a checkpoint beside the one that a directory holds, under other names, and then replaces the index.

    The index is replaced by renaming, which happens at once. So there is a whole checkpoint at every moment, and what
    cuts a save short leaves the last one.

    Relied on: that data files begin with the prefix in `SavePlan.storage_data`, and that the index is written aside and
    renamed by the writer's `fs`. `settle` notices if it is otherwise.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, overwrite=True)
        self.fs = _ReplacesAtOnce()
        self._directory = path
        self._mark = secrets.token_hex(4)

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Give the files of this checkpoint names that no earlier one has. Called on one rank, for all."""
        return [
            replace(plan, storage_data=replace(plan.storage_data, prefix=self._mark + plan.storage_data.prefix))
            for plan in super().prepare_global_plan(plans)
        ]

    def settle(self, written: bool) -> None:
        """Delete the files that no checkpoint needs. Called on the rank that planned, when no rank writes any more.

        Args:
            written: whether this checkpoint was written.

        Raises:
            FdpError: it was, and the index does not say so.
        """
        found = True
        try:
            named = set(_files_of(read_index(self._directory)))
        except (OSError, ArgumentError):
            found, named = False, set()
        if written and not (found and all(name.startswith(self._mark) for name in named)):
            raise FdpError(
                build_message(
                    f"fdp.save wrote a checkpoint to {os.fspath(self._directory)!r} in another way than it meant to.",
                    remedy="this release of PyTorch writes checkpoints in a way that fdp does not know: take one that "
                    "docs/torch.md lists.",
                )
            )
        for path in self._directory.glob(_DATA if found else self._mark + _DATA):
            if path.name not in named:
                with suppress(OSError):  # what is left over does no harm; the next save tries again
                    path.unlink()


class _ReplacesAtOnce(FileSystem):
    """Files, of which the index is never missing once it is there."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        if Path(path).name != INDEX:
            super().rm_file(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        _sync(path)
        os.replace(path, new_path)
        if os.name == "posix":  # elsewhere a directory cannot be opened
            _sync(Path(new_path).parent)


def _sync(path: str | os.PathLike[str]) -> None:
    """Have a file, or the names in a directory, outlive a loss of power."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class Reader(dcp.FileSystemReader):
    """Reads a checkpoint that a stranger may have written.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._directory = path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index: see `read_index`."""
        return read_index(self._directory)


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Reads plain values of a state as PyTorch reads weights: without calling anything that they name."""

    def load_bytes(self, read_item: dcp.planner.ReadItem, value: io.BytesIO) -> None:
        """Put a value that is no tensor into the state, which is flat.

        Raises:
            ArgumentError: it is of a class that is not known to be harmless.
        """
        name = read_item.dest_index.fqn
        try:
            self.original_state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ArgumentError(
                build_message(
                    f"{name} of a checkpoint is no plain value, and was not read: reading it could run code.",
                    [str(error).splitlines()[0]],
                    remedy="if the checkpoint is yours, allow the class: torch.serialization.add_safe_globals([cls]).",
                )
            ) from error


def read_index(directory: Path) -> Metadata:
    """Read which tensors and values a checkpoint holds, and in which files; nothing that it names is called.

    The index is a pickle. Of what a pickle can ask for it gets the classes that an index is made of, and no other.

    Raises:
        ArgumentError: it is damaged, asks for something else, or names files outside of its directory.
        OSError: it is not there, or cannot be read.
    """
    path = directory / INDEX
    with path.open("rb") as file:
        try:
            index = _IndexUnpickler(file).load()
            outside = [name for name in _files_of(index) if Path(name).name != name or not name]
            if outside or not isinstance(index.state_dict_metadata, dict):
                raise pickle.UnpicklingError(f"it names the file {outside[0]!r}" if outside else "it is no index")
        except OSError:
            raise
        except Exception as error:  # whatever a damaged pickle makes of itself
            raise ArgumentError(
                build_message(
                    f"{os.fspath(path)!r} is not the index of a checkpoint. Nothing of it was run.",
                    [f"{type(error).__name__}: {error}"],
                    remedy="load another checkpoint; find out who wrote this one.",
                )
            ) from error
    return index


def _files_of(index: Metadata) -> Iterator[str]:
    """The files that a checkpoint consists of, besides its index."""
    yield from {info.relative_path for info in index.storage_data.values()}


_FORMAT = "torch.distributed.checkpoint"
_CLASSES = frozenset({
    *((f"{_FORMAT}.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    (f"{_FORMAT}.filesystem", "_StorageInfo"),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks a name up in a table
})  # fmt: skip
"""What an index is made of, besides dtypes: classes that keep what they are given."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """What the pickle asks for by name.

        Raises:
            pickle.UnpicklingError: no index is made of it.
        """
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)
