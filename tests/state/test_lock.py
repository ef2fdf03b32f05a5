"""One run at a time writes to a directory, whatever that run does with its own files."""

from __future__ import annotations

import fcntl
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import ranks
from samples import exhaustive

import fdp
from fdp.state.lock import DirectoryLock

HAS_LOCKS_OF_OPEN_FILES = pytest.mark.skipif(not hasattr(fcntl, "F_OFD_SETLK"), reason="the system has none")


def tries(folder: Path, told: Any) -> None:
    try:
        DirectoryLock(folder).acquire()
        told.send("")
    except fdp.FdpError as error:
        told.send(str(error))


def others_may(folder: Path) -> bool:
    """Whether another process gets the lock."""
    heard, told = ranks.context().Pipe(duplex=False)
    other = ranks.context().Process(target=tries, args=(folder, told), daemon=True)
    other.start()
    said = heard.recv()
    other.join()
    assert not said or f"process {os.getpid()} on " in said, said
    return not said


@HAS_LOCKS_OF_OPEN_FILES
def test_a_process_that_copies_its_own_folder_keeps_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lock = DirectoryLock(folder)
    lock.acquire()
    shutil.copytree(folder, tmp_path / "backup")
    assert not others_may(folder)
    lock.release()
    assert others_may(folder)


@HAS_LOCKS_OF_OPEN_FILES
def test_a_copy_of_the_process_does_not_hold_it(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other threads run
        child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        assert not others_may(tmp_path)  # the copy gave nothing back, and emptied nothing
        lock.release()
        assert others_may(tmp_path)
    finally:
        os.close(write)
        os.waitpid(child, 0)
        os.close(read)


@exhaustive
def test_where_the_file_system_knows_no_locks_of_open_files(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(fcntl, "F_OFD_SETLK", 9999, raising=False)  # the system says EINVAL
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    assert not others_may(tmp_path)
    with pytest.raises(fdp.ArgumentError, match="another CheckpointManager of this process"):
        DirectoryLock(tmp_path).acquire()
    lock.release()
    assert others_may(tmp_path)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_what_a_link_in_its_place_leads_to_is_not_emptied(link: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("all there")
    link(tmp_path / "precious", tmp_path / "run" / ".lock")
    with (
        fdp.CheckpointManager(tmp_path / "run") as manager,
        pytest.raises(fdp.ArgumentError, match="is a link, or no file"),
    ):
        manager.save(1, {"n": 1}, blocking=True)
    assert (tmp_path / "precious").read_text() == "all there"


def test_what_a_link_in_the_place_of_an_unfinished_index_leads_to_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "precious").write_text("all there")
    (tmp_path / "1" / ".metadata.tmp").symlink_to(tmp_path / "precious")
    with fdp.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1}, blocking=True)
        assert manager.latest_step() == 1
    assert (tmp_path / "precious").read_text() == "all there"
