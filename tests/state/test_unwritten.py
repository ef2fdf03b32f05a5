"""What a disk refuses is an error of all ranks that names the folder, the step and the reason; what was there stays."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from checkpoints import held, version

import fdp
from fdp.state import unwritten
from fdp.state.lock import DirectoryLock


def limited(path: str, blocking: bool) -> str:
    """Save where files may have some bytes only, which is less than the archive's own records."""
    manager = fdp.CheckpointManager(path)
    manager.save(1, version(1), blocking=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(fdp.FdpError) as caught:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
        try:
            manager.save(2, {**version(2), "a": torch.full((10**5,), 2.0)}, blocking=blocking)
            manager.wait_until_finished()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert manager.latest_step() == 1
    manager.close()
    return str(caught.value)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_write_that_the_system_cuts_off_is_named(tmp_path: Path, blocking: bool) -> None:
    first, second = ranks.run(2, limited, str(tmp_path), blocking)
    assert first == second
    assert first.startswith(f"CheckpointManager.save could not write the checkpoint of step 2 to '{tmp_path}/2'.")
    assert "File too large" in first and first.splitlines()[-1].startswith("Remedy: look at the disk")
    assert held(tmp_path / "1") == 1


def read_only(path: str) -> str:
    manager = fdp.CheckpointManager(path)
    with pytest.MonkeyPatch.context() as patch:

        def refuse(self: DirectoryLock) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), f"{path}/.lock")

        patch.setattr(DirectoryLock, "acquire", refuse)
        with pytest.raises(fdp.FdpError) as caught:
            manager.save(2, version(2))
    fdp.assert_replicated({"w": torch.ones(2)})  # the ranks are still in step
    manager.save(3, version(3), blocking=True)
    manager.close()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_disk_that_may_only_be_read_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    first, second = ranks.run(2, read_only, str(tmp_path))
    assert first == second
    assert first.startswith(
        f"FdpError: CheckpointManager.save could not write the checkpoint of step 2 to '{tmp_path}'"
    )
    assert "rank 0: OSError: [Errno 30] Read-only file system" in first
    assert held(tmp_path / "3") == 3


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("error", "free", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 10**9, "the disk is full: 1000000000 bytes free (OSError: "),
        (RuntimeError("unexpected pos 704 vs 598"), 4096, "the disk is full: 4096 bytes free (RuntimeError: unexp"),
        (RuntimeError("unexpected pos 704 vs 598"), 10**9, "RuntimeError: unexpected pos"),
        (OSError(errno.EFBIG, "File too large"), 0, "OSError: [Errno 27] File too large"),
    ],
)
def test_what_is_said_of_a_disk(tmp_path: Path, monkeypatch: Any, error: Exception, free: int, said: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free, 0, free))
    assert unwritten.reason(error, tmp_path / "not" / "there").startswith(said)


def test_the_systems_error_is_found_behind_the_one_that_followed_from_it(tmp_path: Path) -> None:
    try:
        try:
            raise OSError(errno.EFBIG, "File too large")
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")
    except RuntimeError as error:
        assert unwritten.reason(error, tmp_path) == "OSError: [Errno 27] File too large"
