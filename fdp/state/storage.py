"""Checkpoints on disk, by torch.distributed.checkpoint: one replaces another in one moment, and reading one runs no
code.

References: torch.distributed.checkpoint (`StorageWriter`, `StorageReader`).
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata

from fdp.distributed.exchange import announce_failure
from fdp.distributed.group import Group
from fdp.errors import ArgumentError, FdpError, build_message, first_line
from fdp.state.index import INDEX, files_of, read_index
from fdp.state.pace import Pace, Paced
from fdp.state.pieces import is_intact, refuse_changed
from fdp.state.seal import seal_of
from fdp.state.unwritten import NOT_SEEN, NotWritten, with_reasons

_DATA = "*.distcp"


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes a checkpoint beside the one that a directory holds, under other names, and then replaces the index.

    The index is replaced by renaming, which happens at once, and after it was found to be that of a whole checkpoint.
    So there is one at every moment, and what cuts a save short leaves the last one.

    Relied on: that data files begin with the prefix in `SavePlan.storage_data`, and that the index is written aside and
    renamed by the writer's `fs`. Otherwise the index is refused, or `finish` notices.

    Args:
        path: the directory.
        size: number of ranks that write.
        pace: how fast to write; None for as fast as it goes.
    """

    def __init__(self, path: Path, size: int = 1, pace: Pace | None = None) -> None:
        super().__init__(path, overwrite=True)
        self._directory, self._size, self._mark = path, size, secrets.token_hex(4)
        self.fs = _ReplacesAtOnce(self._check, pace)

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Give the files of this checkpoint names that no earlier one has. Called on one rank, for all."""
        if len(plans) != self._size:  # the library goes on alone where it finds no process group
            raise process_group_destroyed(self._directory)
        return [
            replace(plan, storage_data=replace(plan.storage_data, prefix=self._mark + plan.storage_data.prefix))
            for plan in super().prepare_global_plan(plans)
        ]

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Make the directory."""
        with with_reasons(self._directory):
            return super().prepare_local_plan(plan)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """Write this rank's files."""
        with with_reasons(self._directory):
            return super().write_data(plan, planner)

    def _check(self, path: Path) -> set[str]:
        """Refuse an index of files that are not this checkpoint's own, or not all there; returns their names."""
        named = files_of(read_index(path))
        if not all(name.startswith(self._mark) for name in named):
            raise FdpError(
                build_message(
                    f"fdp.save wrote a checkpoint to {os.fspath(self._directory)!r} in an unexpected format.",
                    remedy="this release of PyTorch writes checkpoints in a way that fdp does not know: take one that "
                    "docs/reference/torch.md lists.",
                )
            )
        return named

    def finish(self, *args: Any, **kwargs: Any) -> None:
        """Write the index, and see that it is there. Called on one rank; an error of it is one of all ranks.

        Raises:
            FdpError: it is not there.
        """
        with with_reasons(self._directory):
            super().finish(*args, **kwargs)
        self._check(self._directory / INDEX)

    def settle(self) -> None:
        """Delete the files that no checkpoint needs. Called on the planning rank, after all ranks have written."""
        with suppress(OSError):  # what is left over does no harm; the next save tries again
            pattern, named = self._mark + _DATA, set[str]()
            with suppress(OSError, ArgumentError):
                pattern, named = _DATA, files_of(read_index(self._directory / INDEX))
            for path in (*self._directory.glob(pattern), self._directory / f"{INDEX}.tmp"):
                if path.name not in named:
                    with suppress(OSError):
                        path.unlink()


def directory_of(caller: str, path: Any, ranks: Group | None = None) -> Path:
    """The directory that a user gave.

    Args:
        caller: the function that the user called.
        path: what was given.
        ranks: who else is told that it is none.

    Raises:
        ArgumentError: it is none; `torch.save` takes the object first.
    """
    with suppress(TypeError):
        return Path(path)
    kind = type(path).__name__
    error = ArgumentError(
        build_message(
            f"{caller} takes a directory first, as a string or a path. It was given an object of type {kind}.",
            remedy=f"call {caller}(directory, ...).",
        )
    )
    if ranks is not None:
        announce_failure(ranks, error)
    raise error


def process_group_destroyed(directory: Path) -> FdpError:
    """The error for a checkpoint whose process group was destroyed while it was written."""
    return FdpError(
        build_message(
            f"the checkpoint in {os.fspath(directory)!r} was not written: the process group was destroyed meanwhile.",
            remedy="close the CheckpointManager before destroy_process_group().",
        )
    )


class _ReplacesAtOnce(FileSystem):
    """A file system whose index file is replaced without ever being missing.

    Args:
        check: raises if an index must not take the place of the last one.
        pace: how fast to write.
    """

    def __init__(self, check: Callable[[Path], object], pace: Pace | None) -> None:
        self._check, self._pace = check, pace

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode == "wb":  # what a link leads to is not written to, nor is a pipe waited for
            Path(path).unlink(missing_ok=True)
        with super().create_stream(path, mode) as stream:
            yield stream if self._pace is None else cast(io.IOBase, Paced(stream, self._pace))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        if Path(path).name != INDEX:
            super().rm_file(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        _seal(Path(path))
        try:
            self._check(Path(path))
        except ArgumentError as error:  # another rank wrote elsewhere, or another job has deleted it
            cause = first_line(error.__cause__) if error.__cause__ is not None else first_line(error)
            raise NotWritten(f"{NOT_SEEN} in {os.fspath(Path(path).parent)!r} ({cause})") from error
        _sync(Path(path).parent)  # the names of data files are there before the index names them
        os.replace(path, new_path)
        _sync(Path(path).parent)


def _seal(path: Path) -> None:
    """Write a checksum behind what a file holds, and have both outlive a loss of power."""
    with path.open("r+b") as file:
        file.write(seal_of(file.read()))
        file.flush()
        os.fsync(file.fileno())


def delete_checkpoint(directory: Path) -> None:
    """Delete a checkpoint: its index first, so that the remaining files do not look like a whole one.

    Files that are none of a checkpoint's stay, and so does the directory then. Of a link, the link is deleted.
    """
    with suppress(OSError):  # what is left over does no harm; the next save tries again
        if directory.is_symlink():
            directory.unlink()
            return
        for path in (directory / INDEX, directory / f"{INDEX}.tmp", *directory.glob(_DATA)):
            path.unlink(missing_ok=True)
        directory.rmdir()


def _sync(directory: Path) -> None:
    """Make the names in a directory survive a loss of power, on a file system that supports it."""
    with suppress(OSError):
        opened = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


class Reader(dcp.FileSystemReader):
    """Reads an untrusted checkpoint, in which the disk may have changed some bits.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._index = functools.cache(lambda: read_index(path / INDEX))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, read once, so that what was checked is what is loaded: see `read_index`."""
        return self._index()

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> torch.futures.Future[None]:
        """Read pieces into a state, if the bits of each are those that were written.

        Raises:
            ChangedCheckpoint: some are not; names what they belong to.
        """
        changed: list[str] = []
        for item in plan.items:
            name = item.dest_index.fqn
            if not is_intact(self._piece(item)):
                changed.append(f"{name}: not the bits that were saved")
                continue
            try:
                super().read_data(replace(plan, items=[item]), planner)
            except (FdpError, OSError, MemoryError, pickle.UnpicklingError):
                raise
            except Exception as error:  # of a bit that has no checksum, such as one of an archive's table of contents
                changed.append(f"{name}: cannot be read: {type(error).__name__}: {first_line(error)}")
        refuse_changed(self.path, changed)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _piece(self, item: dcp.planner.ReadItem) -> bytes:
        """A whole saved record, even if only a part of it is needed, because its checksum covers all of it."""
        place = self._index().storage_data[item.storage_index]
        with (Path(self.path) / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            result: bytes = file.read(place.length)
            return result


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Reads non-tensor values without calling anything that they name, except for a list of harmless functions.

    Args:
        like: such values, by name. Their classes are the user's own choice, and are allowed.
    """

    def __init__(self, like: dict[str, Any]) -> None:
        super().__init__()
        self._like = like

    def load_bytes(self, read_item: dcp.planner.ReadItem, value: io.BytesIO) -> None:
        """Put a non-tensor value into the flat state.

        Raises:
            ArgumentError: it is of a class that is not known to be harmless.
        """
        name = read_item.dest_index.fqn
        self.original_state_dict[name] = read_plain(name, value, self._like.get(name))


def read_plain(name: str, value: io.BytesIO, like: object) -> Any:
    """Read a non-tensor value.

    Args:
        name: of the leaf.
        value: as `torch.save` wrote it.
        like: a value of the class that is expected.

    Raises:
        ArgumentError: it is of another class, which is not known to be harmless.
    """
    try:
        with _harmless(like):
            found = torch.load(value, weights_only=True)
    except pickle.UnpicklingError as error:
        lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
        raise ArgumentError(
            build_message(
                f"{name} cannot be read from a checkpoint without running code that the checkpoint names.",
                lines[:1],
                remedy="let this leaf be a number, a string, a tensor, or a value of a class that is read as it was "
                "written, such as an enum; and let `like` hold a value of the same class.",
            )
        ) from error
    if isinstance(found, torch.Tensor):
        raise ArgumentError(
            build_message(
                f"{name} is a tensor in a checkpoint whose index says that it is none.",
                remedy="load another checkpoint, and find out what wrote this one.",
            )
        )
    return found


@contextmanager
def _harmless(like: object) -> Iterator[None]:
    """Let values of the class of `like` be read, and numbers of NumPy's."""
    with torch.serialization.safe_globals([type(like), *(_of_numpy() if "numpy" in sys.modules else ())]):
        yield


@functools.cache
def _of_numpy() -> tuple[Any, ...]:
    """The functions and classes that NumPy's numbers and arrays need."""
    import numpy

    kinds = {type(numpy.dtype(each)) for each in numpy.sctypeDict.values()}
    makers = numpy.float64(0).__reduce__()[0], numpy.empty(0).__reduce__()[0]
    return *kinds, numpy.dtype, numpy.ndarray, *makers
