"""Checkpoints on disk: at every moment there is a whole one, and reading one runs no code of whoever wrote it."""

from __future__ import annotations

import datetime
import enum
import errno
import os
import resource
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import Exploit, held, names_in, version
from samples import exhaustive

import fdp
from fdp.state import checkpoint
from fdp.state.storage import CheckpointWriter

# Cut short.


class Killed(BaseException):
    """This process is dead: from here on it does nothing to the disk."""


class Disk:
    """Counts what is done to files below a folder, and stops all of it from a given operation on."""

    def __init__(self) -> None:
        self.folder, self.done, self.last = "", 0, -1
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: Any) -> None:
        if not self.folder or not event.startswith(("open", "os.")):
            return
        if any(isinstance(each, (str, os.PathLike)) and self.folder in os.fspath(each) for each in args):
            if self.done == self.last:
                raise Killed
            self.done += 1

    @contextmanager
    def watched(self, folder: Path, last: int = -1) -> Iterator[None]:
        self.folder, self.done, self.last = str(folder), 0, last
        try:
            yield
        finally:
            self.folder = ""


disk = Disk()  # a hook stays for as long as the process


@pytest.mark.parametrize("settled", [True, pytest.param(False, marks=exhaustive)])
def test_wherever_a_save_is_cut_short_there_is_a_whole_checkpoint(tmp_path: Path, settled: bool) -> None:
    with disk.watched(tmp_path):
        fdp.save(tmp_path / "a", version(1))
        fdp.save(tmp_path / "a", version(2))
    operations = disk.done // 2
    assert operations >= 4  # data, the index, its name, what is left over
    found = []
    for last in range(operations):
        folder = tmp_path / f"{last}"
        fdp.save(folder, version(1))
        with disk.watched(folder, last), pytest.raises((Killed, fdp.FdpError)):
            fdp.save(folder, version(2))
        found.append(held(folder))
        if settled:  # the next save finds its way, and clears up
            fdp.save(folder, version(3))
            assert held(folder) == 3
            assert {path.name for path in folder.iterdir()} == {".metadata", *names_in(folder)}
    assert found == sorted(found) and set(found) <= {1, 2} and found[0] == 1


def saves(folder: Path, told: Any) -> None:
    """In another process, until it is killed."""
    for n in range(1, 10**9):
        fdp.save(folder, version(n))
        told.send(n)


def test_a_process_that_is_killed_while_it_saves_leaves_what_it_saved_last(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    for attempt in range(3):
        heard, told = ranks.context().Pipe(duplex=False)
        process = ranks.context().Process(target=saves, args=(folder, told), daemon=True)
        process.start()
        told.close()
        said = heard.recv()
        time.sleep(0.05 + 0.013 * attempt)
        process.kill()
        with suppress(EOFError):
            while True:
                said = heard.recv()
        process.join()
        assert held(folder) - said in (0, 1)


def fail_to_write(path: str) -> str:
    fdp.save(path, version(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        own = fdp.per_rank(torch.zeros(10**5))
        with pytest.raises(fdp.FdpError) as caught:
            fdp.save(path, {**version(2), "own": own})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert held(Path(path)) == 1
    return str(caught.value)


def test_a_disk_that_is_full_on_one_rank_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    first, second = ranks.run(2, fail_to_write, str(tmp_path / "a"))
    assert first == second and "rank 1: " in first and "File too large" in first
    assert {path.name for path in (tmp_path / "a").iterdir()} == {".metadata", *names_in(tmp_path / "a")}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_itself_reads_what_fdp_wrote(tmp_path: Path) -> None:
    fdp.save(tmp_path / "a", version(1))
    fdp.save(tmp_path / "a", version(2))
    named = {"state['a']": torch.zeros(300), "state['b'][0]": torch.zeros(7, dtype=torch.int64), "state['b'][1]": 0}
    dcp.load(named, checkpoint_id=tmp_path / "a", no_dist=True)
    assert named["state['b'][1]"] == 2 and torch.equal(named["state['a']"], version(2)["a"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_itself_wrote_is_replaced(tmp_path: Path) -> None:
    named = {"state['a']": torch.zeros(300), "state['b'][0]": torch.zeros(7, dtype=torch.int64), "state['b'][1]": 0}
    dcp.save(named, checkpoint_id=tmp_path / "a", no_dist=True)
    assert fdp.load(tmp_path / "a", version(1))["b"][1] == 0
    fdp.save(tmp_path / "a", version(2))
    assert held(tmp_path / "a") == 2 and not (tmp_path / "a" / "__0_0.distcp").exists()


# Values that are no tensors.


class Phase(enum.Enum):
    WARM = "warm"
    COLD = "cold"


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (Phase.COLD, Phase.WARM), (np.float64(0.5), np.float64(0)), (np.int64(3), np.int64(0)), (np.True_, np.False_),
        (Decimal("0.1"), Decimal(0)), (datetime.datetime(2020, 1, 2), datetime.datetime(2021, 1, 1)),
        (datetime.timedelta(3), datetime.timedelta(0)), (Fraction(1, 3), Fraction(0)), (b"bytes", b""),
        (torch.float16, torch.float32), (torch.device("cpu"), torch.device("meta")), (frozenset({1}), frozenset()),
        (1j, 0j), (True, False), (range(3), range(0)), (Path("a/b"), Path("c")),
    ],
)  # fmt: skip
def test_plain_values_come_back(tmp_path: Path, one: Any, two: Any) -> None:
    fdp.save(tmp_path / "a", {"x": one, "w": torch.ones(2)})
    found = fdp.load(tmp_path / "a", {"x": two, "w": torch.zeros(2)})["x"]
    assert found == one and type(found) is type(one)


def test_a_value_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    fdp.save(tmp_path / "a", version(1))
    with pytest.raises(fdp.ArgumentError, match=r"state\['f'\] cannot be read from a checkpoint"):
        fdp.save(tmp_path / "a", {"f": os.getcwd})
    assert held(tmp_path / "a") == 1


def test_a_program_in_the_place_of_a_number_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "refuse_unreadable", lambda *given: None)
    fdp.save(tmp_path / "a", {**version(1), "c": Exploit(tmp_path / "hurt")})
    with pytest.raises(fdp.ArgumentError, match=r"state\['c'\] cannot be read from a checkpoint without running code"):
        fdp.load(tmp_path / "a", {**version(0), "c": 0})
    assert not (tmp_path / "hurt").exists()


# With others.


def test_an_index_is_not_put_in_place_whose_files_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job that saves to the same directory has cleared up."""
    fdp.save(tmp_path / "a", version(1))
    mine = names_in(tmp_path / "a")

    def finish(self: Any, **given: Any) -> None:
        for path in self._directory.glob("*.distcp"):
            if path.name not in mine:
                path.unlink()
        dcp.FileSystemWriter.finish(self, **given)

    monkeypatch.setattr(CheckpointWriter, "finish", finish)
    with pytest.raises(fdp.FdpError, match=r"what ranks wrote is not all in (.|\n)*no other job saves"):
        fdp.save(tmp_path / "a", version(2))
    assert held(tmp_path / "a") == 1


def test_a_file_system_that_syncs_no_directories_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "no such thing")
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    fdp.save(tmp_path / "a", version(1))
    assert held(tmp_path / "a") == 1
