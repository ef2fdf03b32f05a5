"""Checkpoints of a run, one for each of its last saves, written while training goes on."""

from __future__ import annotations

import copy
import logging
import os
import sys
import time
import warnings
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from fdp.context.axis import refuse_inside
from fdp.distributed.desynchronised import refuse_desynchronised
from fdp.distributed.exchange import tell_all
from fdp.distributed.group import Group, Ranks, is_destroyed, resolve_group
from fdp.distributed.second_group import group_beside
from fdp.errors import ArgumentError, FdpError, build_message, first_line
from fdp.pytree import Tree
from fdp.state.checkpoint import (
    ignore_what_is_meant,
    load,
    prepared,
    ready_on_all_ranks,
    seed_anew,
    write,
)
from fdp.state.containers import lies_in_parts
from fdp.state.contents import ranks_that_saved_generators
from fdp.state.index import INDEX, read_index
from fdp.state.lock import DirectoryLock
from fdp.state.pace import Pace, Writing
from fdp.state.pieces import ChangedCheckpoint
from fdp.state.storage import delete_checkpoint, directory_of
from fdp.state.unwritten import NotWritten, not_written, reason
from fdp.tracebacks import hiding_frames

_LOG = logging.getLogger("fdp")


class CheckpointManager:
    """Keeps the last checkpoints of a run, and always at least one whole checkpoint once there was one.

    Each checkpoint is a directory, `directory/STEP`, as `fdp.save` writes it; `fdp.load` reads it as well. It counts
    when it is whole: whatever cuts a save short, the checkpoints before it are there. One run at a time may write to
    a directory.

    Args:
        directory: on storage that all ranks see; made by the first save.
        keep: how many checkpoints to keep, the newest; None for all.
        group: as for `data_parallel`.

    Raises:
        ArgumentError: `keep` is no such number.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, CheckpointManager(folder) as manager:
        ...     manager.save(10, {"w": torch.ones(2)})
        ...     manager.save(20, {"w": torch.zeros(2)})
        ...     manager.wait_until_finished()
        ...     manager.restore(like={"w": torch.empty(2)})
        ({'w': tensor([0., 0.])}, 20)

    References:
        Orbax, `orbax.checkpoint.CheckpointManager`: the interface. torch.distributed.checkpoint: the format.
    """

    @hiding_frames
    def __init__(self, directory: str | os.PathLike[str], keep: int | None = 3, *, group: Ranks = None) -> None:
        if keep is not None and (not isinstance(keep, Integral) or isinstance(keep, bool) or keep < 1):
            raise ArgumentError(
                build_message(
                    f"fdp.CheckpointManager was given keep={keep!r}.",
                    remedy="pass how many checkpoints to keep, at least 1, or None for all.",
                )
            )
        given = directory_of("fdp.CheckpointManager", directory)
        # Absolute: the program may change its working directory while a thread writes.
        self._directory, self._keep, self._group = Path(os.path.abspath(given)), keep, group
        self._lock = DirectoryLock(self._directory)
        self._writing: Writing | None = None
        self._beside: tuple[Group, dist.ProcessGroup] | None = None

    @hiding_frames
    def save(self, step: int, state: Tree, random: bool = True, blocking: bool = False) -> None:
        """Write a checkpoint; every rank of the group takes part.

        A save that does not block compares the state between ranks, copies what this rank is to write to the memory
        of the CPU, and returns. The copy is written by a thread, slowly enough that steps do not feel it. Each
        replicated leaf is copied and written by one rank. What goes wrong while it is written is raised by the next
        call of `save`, `restore`, `wait_until_finished` or `close`, on every rank. A save waits for the one before.

        Args:
            step: number of steps that are done, the same on every rank, and not below the latest checkpoint's. A
                checkpoint of the same step is replaced.
            state: as for `fdp.save`.
            random: whether to save the state of each rank's generators, too.
            blocking: whether to return only when the checkpoint is there. It needs no memory for a copy.

        Raises:
            ArgumentError: `step` is no such number; another run writes to the directory; or as `fdp.save`.
            ReplicationError, AgreementError: as `fdp.save`.
            FdpError: the disk is full, or the like, also from the save before; on every rank.
        """
        refuse_inside("CheckpointManager.save")
        ranks = resolve_group(self._group)
        refuse_desynchronised(ranks, "CheckpointManager.save")
        self.wait_until_finished()
        own = f"step={_plain(step)}, random={bool(random)}, blocking={bool(blocking)}"
        with ready_on_all_ranks(ranks, f"CheckpointManager.save({own})"):
            _check_step("save", step)
            if ranks.rank == 0:
                try:
                    self._make_room(int(step))
                except OSError as error:
                    what, why = f"the checkpoint of step {int(step)}", f"rank 0: {reason(error, self._directory)}"
                    raise NotWritten(
                        str(not_written("CheckpointManager.save", what, self._directory, [why]))
                    ) from error
        named = prepared("CheckpointManager.save", state, ranks, random)
        ignore_what_is_meant()
        if blocking:
            self._write(int(step), named, ranks, None, None)
            return
        with ready_on_all_ranks(ranks, f"CheckpointManager.save({own})"):
            named = {name: _copied(leaf) for name, leaf in _of_this_rank(named, ranks).items()}
        if ranks.size > 1 and (self._beside is None or self._beside[0] != ranks):  # or the group was made anew
            self._beside = ranks, group_beside(ranks, "CheckpointManager.save")
        among = None if self._beside is None else self._beside[1]
        self._writing = Writing(
            lambda pace: self._write(int(step), named, ranks, pace, among), f"checkpoint of step {int(step)}"
        )

    @hiding_frames
    def restore(
        self, like: Tree, step: int | None = None, random: bool = True, missing_ok: bool = False
    ) -> tuple[Tree, int]:
        """Read a checkpoint, the same on every rank; every rank of the group takes part.

        Args:
            like: as for `fdp.load`.
            step: of which step; None for the newest that is whole. Newer ones that are damaged, be it in one bit, are
                named in a warning.
            random: whether to set this rank's generators to the states that were saved. Those of another number of
                ranks cannot be; then torch's are seeded anew, from what was saved and the rank, with a warning.
            missing_ok: whether a directory without a checkpoint is no error, as at the start of a run. Then all ranks
                get `like` itself, and step 0. One whose checkpoints are all damaged is an error all the same.

        Returns:
            The state, with new tensors, and its step.

        Raises:
            ArgumentError: there is no checkpoint, or none of that step; or as `fdp.load`.
            AgreementError: as `fdp.load`.
            FdpError: the directory, or the disk, cannot be read; on every rank.
        """
        refuse_inside("CheckpointManager.restore")
        ranks = resolve_group(self._group)
        refuse_desynchronised(ranks, "CheckpointManager.restore")
        self.wait_until_finished()
        own = f"step={_plain(step)}, random={bool(random)}, missing_ok={bool(missing_ok)}"
        with ready_on_all_ranks(ranks, f"CheckpointManager.restore({own})"):
            if step is not None:
                _check_step("restore", step)
        if step is not None:
            return self._read(int(step), like, ranks, random), int(step)
        damaged: list[str] = []
        below = None
        while True:
            # What rank 0 sees is what all take: file systems show other ranks a new file later.
            seen = self._seen(below, damaged) if ranks.rank == 0 else {"step": None, "damaged": [], "unread": ""}
            newest = tell_all(ranks, seen, "CheckpointManager.restore", "was called")[0]
            if newest["unread"]:
                raise FdpError(newest["unread"])
            below, damaged = newest["step"], newest["damaged"]
            if below is None and missing_ok and not damaged:
                return like, 0
            if below is None:
                raise ArgumentError(
                    build_message(
                        f"there is no whole checkpoint in {os.fspath(self._directory)!r}.",
                        damaged,
                        remedy="restore(like, missing_ok=True) gives the state of a new run where there is none.",
                    )
                )
            try:
                state = self._read(below, like, ranks, random)
            except ChangedCheckpoint as error:  # on all ranks
                damaged.append(_first_part(error))
                continue
            if damaged:
                warnings.warn(
                    f"CheckpointManager.restore takes step {below}: newer checkpoints are damaged. {' '.join(damaged)}",
                    stacklevel=2,
                )
            return state, below

    def _seen(self, below: int | None, damaged: list[str]) -> dict[str, Any]:
        """What this rank tells all of the directory: its newest whole checkpoint, or why it cannot be read."""
        try:
            step, more = self._newest(below)
        except OSError as error:
            unread = build_message(
                f"CheckpointManager.restore could not read {os.fspath(self._directory)!r}.",
                [f"rank 0: {type(error).__name__}: {first_line(error)}"],
                remedy="pass a directory that all ranks can read, or one that is not there yet.",
            )
            return {"step": None, "damaged": damaged, "unread": unread}
        return {"step": step, "damaged": damaged + more, "unread": ""}

    def _read(self, step: int, like: Tree, ranks: Group, random: bool) -> Tree:
        path = self._directory / str(step)
        saved = ranks_that_saved_generators(path) if random else None
        if saved is None or saved == ranks.size:
            return load(path, like, ranks, random=random)
        state = load(path, like, ranks)
        seed_anew(path, ranks)
        warnings.warn(
            f"the checkpoint in {os.fspath(path)!r} holds the generators of {saved} ranks, and this is one of "
            f"{ranks.size}. Torch's generators were seeded anew, from the checkpoint and the rank; others are as they "
            "were.",
            stacklevel=3,
        )
        return state

    def latest_step(self) -> int | None:
        """The step of the newest whole checkpoint that this rank sees, without waiting for other ranks.

        File systems show a new file to some ranks later. So do not decide by it whether to call `restore`, which all
        ranks have to call: `restore(like, missing_ok=True)`.

        Returns:
            The step; None if there is no checkpoint. One that is being written does not count.
        """
        return self._newest()[0]

    def wait_until_finished(self) -> None:
        """Wait until all saves are on the disk, written at full speed from now on.

        Raises:
            FdpError: it could not be written; on every rank.
        """
        if (writing := self._writing) is not None:
            writing.wait()  # interrupted, it can be waited for again
            self._writing = None
            if writing.error is not None:
                raise writing.error

    def close(self) -> None:
        """Wait as `wait_until_finished`, and let others write to the directory; a later `save` takes it again.

        Raises:
            FdpError: what was saved could not be written; on every rank.
        """
        try:
            self.wait_until_finished()
        finally:
            if self._writing is None:  # otherwise something interrupted the waiting, and a thread still writes
                self._lock.release()
                beside, self._beside = self._beside, None
                if beside is not None and not is_destroyed(beside[1]):
                    dist.destroy_process_group(beside[1])

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.close()
        except FdpError as failure:
            if error is None:
                raise
            _LOG.error("the last checkpoint was not written: %s", first_line(failure))

    def __repr__(self) -> str:
        return f"fdp.CheckpointManager({os.fspath(self._directory)!r}, keep={self._keep})"

    def _write(self, step: int, named: dict[str, Any], ranks: Group, pace: Pace | None, among: object) -> None:
        started = time.monotonic()
        what = f"the checkpoint of step {step}"
        write("CheckpointManager.save", self._directory / str(step), named, ranks, pace, among, what)
        if ranks.rank == 0:
            _LOG.info("checkpoint of step %d: written in %.1f s", step, time.monotonic() - started)
            try:
                for old in self._whole()[self._keep or sys.maxsize :]:
                    delete_checkpoint(self._directory / str(old))
            except OSError as error:  # of this rank alone; the next save tries again
                _LOG.warning("old checkpoints in %s were not deleted: %s", self._directory, first_line(error))

    def _make_room(self, step: int) -> None:
        """Lock the directory, and refuse a step that is older than the latest checkpoint."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        if (self._directory / str(step)).is_symlink():
            raise ArgumentError(
                build_message(
                    f"CheckpointManager.save was given step {step}, and {os.fspath(self._directory / str(step))!r} is "
                    "a link.",
                    remedy="delete the link; what it leads to would be replaced.",
                )
            )
        latest, _ = self._newest()
        if latest is not None and step < latest:
            raise ArgumentError(
                build_message(
                    f"CheckpointManager.save was given step {step}; the latest checkpoint in "
                    f"{os.fspath(self._directory)!r} is of step {latest}, and would be taken for the newer one.",
                    remedy="count the steps on from where the run was restored. To go on from an older checkpoint, let "
                    "the run have another directory, or delete the folders of the later steps.",
                )
            )
        for each in self._steps():  # what a killed save left behind
            if each != step and not (self._directory / str(each) / INDEX).exists():
                delete_checkpoint(self._directory / str(each))

    def _steps(self) -> list[int]:
        """The steps that have folders, newest first."""
        try:
            names = [entry.name for entry in os.scandir(self._directory) if entry.is_dir()]
        except FileNotFoundError:
            return []
        return sorted((int(name) for name in names if name.isdecimal() and str(int(name)) == name), reverse=True)

    def _whole(self) -> list[int]:
        return [step for step in self._steps() if self._damage(step) is None]

    def _newest(self, below: int | None = None) -> tuple[int | None, list[str]]:
        """The step of the newest whole checkpoint below a given one, and the defects of newer ones."""
        damaged: list[str] = []
        for step in self._steps():
            if (below is None or step < below) and (self._directory / str(step) / INDEX).exists():
                found = self._damage(step)
                if found is None:
                    return step, damaged
                damaged.append(found)
        return None, damaged

    def _damage(self, step: int) -> str | None:
        try:
            read_index(self._directory / str(step) / INDEX)
        except (ArgumentError, OSError) as error:
            return _first_part(error)
        return None


def _of_this_rank(named: dict[str, Any], ranks: Group) -> dict[str, Any]:
    """The leaves that this rank writes: its own, and its share of the replicated leaves, by bytes."""
    held = [0] * ranks.size
    own: dict[str, Any] = {}
    for name, leaf in sorted(named.items(), key=lambda item: (-_bytes_of(item[1]), item[0])):
        if not name.startswith("state") or lies_in_parts(leaf):
            own[name] = leaf
            continue
        writer = min(range(ranks.size), key=held.__getitem__)
        held[writer] += _bytes_of(leaf)
        if writer == ranks.rank:
            own[name] = leaf
    return own


def _bytes_of(leaf: object) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, torch.Tensor) else 0


def _copied(leaf: object) -> Any:
    """A copy in the memory of the CPU, which later calls do not overwrite."""
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf)
    return leaf.clone() if leaf.device.type == "cpu" else leaf.to("cpu")


def _first_part(error: Exception) -> str:
    """The text of an error in one line, without its remedy."""
    return " ".join(str(error).split("Remedy:")[0].split())


def _plain(step: object) -> Any:
    """A step number as a Python int, also from one of NumPy's."""
    return int(step) if isinstance(step, Integral) else step


def _check_step(method: str, step: object) -> None:
    if not isinstance(step, Integral) or isinstance(step, bool) or step < 0:
        raise ArgumentError(
            build_message(
                f"CheckpointManager.{method} was given step={step!r}.",
                remedy="pass the number of steps that are done, from 0 on.",
            )
        )
