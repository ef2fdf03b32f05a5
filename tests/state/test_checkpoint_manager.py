"""The last checkpoints of a run: kept, found again, never none, also when ranks are killed while they save."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from checkpoints import flip_a_bit, held, version
from samples import exhaustive

import fdp
from fdp.state import storage
from fdp.state.index import INDEX


def folders(path: Path) -> list[int]:
    return sorted(int(name) for name in os.listdir(path) if name.isdigit())


def held_steps(manager: fdp.CheckpointManager) -> list[int]:
    return [step for step in range(10) if step == manager.latest_step()]


def test_it_keeps_the_newest_and_restores_them(tmp_path: Path) -> None:
    with fdp.CheckpointManager(tmp_path / "run", keep=2) as manager:
        assert manager.latest_step() is None
        for step in (5, 10, 200):
            manager.save(step, version(step), blocking=step == 10)
        manager.wait_until_finished()
        assert folders(tmp_path / "run") == [10, 200]
        assert manager.latest_step() == 200
        for step, wanted in ((None, 200), (200, 200), (10, 10)):
            state, found = manager.restore(version(0), step)
            assert (repr(state), found) == (repr(version(wanted)), wanted)
        assert repr(manager) == f"fdp.CheckpointManager({str(tmp_path / 'run')!r}, keep=2)"
    again = fdp.CheckpointManager(tmp_path / "run", keep=None)
    for step in (200, 300, 400):  # 200 is replaced
        again.save(step, version(step + 1))
    again.close()
    assert folders(tmp_path / "run") == [10, 200, 300, 400]
    assert held(tmp_path / "run" / "200") == 201
    fdp.save(tmp_path / "run" / "500", version(500), random=True)
    assert again.restore(version(0))[1] == 500  # a checkpoint is one of fdp.save's, in a folder with its step's name


def test_what_is_saved_is_what_it_was_at_the_call(tmp_path: Path) -> None:
    state = {"w": torch.ones(1000), "t": torch.arange(6.0).view(2, 3).t(), "set": {1, 2}}
    own = fdp.seed(3)
    with fdp.CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        state["w"].zero_(), state["t"].zero_(), state["set"].add(3)
        due = torch.rand(3)
        found, _ = manager.restore(state)
        assert found["w"].tolist() == [1.0] * 1000
        assert found["t"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
        assert found["set"] == {1, 2}
        assert torch.equal(torch.rand(3), due)  # generators as well
        manager.save(2, state, random=False)
        with pytest.raises(fdp.ArgumentError, match="holds none"):
            manager.restore(state)
        assert manager.restore(state, random=False)[1] == 2
    assert own == fdp.seed(3)


def breaking(patch: pytest.MonkeyPatch, rank: int | None = None) -> None:
    """Let the disk be full on a rank."""
    real = storage.CheckpointWriter.write_data

    def full(self: Any, *args: Any) -> Any:
        if rank is None or dist.get_rank() == rank:
            raise OSError(28, "No space left on device")
        return real(self, *args)

    patch.setattr(storage.CheckpointWriter, "write_data", full)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_disk_leaves_the_last_one_and_is_told(tmp_path: Path, blocking: bool, caplog: Any) -> None:
    manager = fdp.CheckpointManager(tmp_path, keep=1)
    manager.save(1, version(1), blocking=True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(fdp.FdpError, match="No space left"):
        breaking(patch)
        manager.save(2, version(2), blocking=blocking)
        manager.wait_until_finished()
    assert manager.latest_step() == 1
    manager.wait_until_finished()  # the error was raised once
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.ERROR), pytest.raises(KeyError):
        breaking(patch)
        with manager:
            manager.save(3, version(3))
            raise KeyError
    assert "not written" in caplog.text  # the error of the loop is the one that is raised
    with fdp.CheckpointManager(tmp_path, keep=1) as again:
        assert again.restore(version(0))[1] == 1
        again.save(4, version(4), blocking=True)
    assert folders(tmp_path) == [4]
    assert held(tmp_path / "4") == 4


def full_on_one(path: str) -> list[str]:
    manager, told = fdp.CheckpointManager(path), []
    manager.save(1, version(1), blocking=True)
    for blocking in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            breaking(patch, rank=1)
            try:
                manager.save(2, version(2), blocking=blocking)
                manager.close()
            except fdp.FdpError as error:
                told.append(str(error))
    assert manager.restore(version(0))[1] == 1
    manager.close()
    return told


def test_what_fails_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    for told in ranks.run(2, full_on_one, str(tmp_path)):
        assert len(told) == 2
        assert all("rank 1" in text and "No space left" in text for text in told)


def cut(path: Path) -> None:
    data = max(path.glob("*.distcp"), key=lambda each: each.stat().st_size)
    os.truncate(data, data.stat().st_size // 2)


def test_a_damaged_one_is_named_and_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    with fdp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, version(step), blocking=True)
        cut(tmp_path / "3")
        assert manager.latest_step() == 2
        with pytest.warns(UserWarning, match=f"takes step 2: newer checkpoints are damaged. '{tmp_path}/3/{INDEX}'"):
            assert manager.restore(version(0))[1] == 2
        with pytest.raises(fdp.ArgumentError, match=f"{tmp_path}/3/{INDEX}.* is not the index of a whole checkpoint"):
            manager.restore(version(0), 3)
        with pytest.raises(fdp.ArgumentError, match="found no checkpoint in"):
            manager.restore(version(0), 7)
        with pytest.raises(fdp.ArgumentError, match="does not have the structure of `like`"):
            manager.restore({"other": torch.ones(1)}, 2)
        cut(tmp_path / "1"), cut(tmp_path / "2")
        with pytest.raises(fdp.ArgumentError, match=r"no whole checkpoint in(.|\n)*/3/(.|\n)*/1/"):
            manager.restore(version(0))
        assert manager.latest_step() is None
        manager.save(2, version(2), blocking=True)
        assert held(tmp_path / "2") == 2


def test_one_with_a_changed_bit_is_passed_over(tmp_path: Path) -> None:
    with fdp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((1000,), step + 0.5)}, blocking=True)
        flip_a_bit(tmp_path / "2", 2.5)
        with pytest.warns(UserWarning, match=r"takes step 1: .*/2' has been changed .* state\['w'\]: not the bits"):
            state, found = manager.restore({"w": torch.zeros(1000)})
        assert (found, set(state["w"].tolist())) == (1, {1.5})
        with pytest.raises(fdp.ArgumentError, match="has been changed since it was saved"):
            manager.restore(state, 2)
        flip_a_bit(tmp_path / "1", 1.5)
        with pytest.raises(fdp.ArgumentError, match=r"no whole checkpoint in(.|\n)*/2'(.|\n)*/1'"):
            manager.restore(state)


def test_the_folder_is_where_it_was_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    manager = fdp.CheckpointManager("run")
    with manager:
        manager.save(1, {"w": torch.ones(5_000_000)})
        monkeypatch.chdir(tmp_path / "there")
    assert held_steps(manager) == [1]
    assert os.listdir() == []
    with fdp.CheckpointManager(tmp_path / "here" / "run") as again:  # the lock was given back
        again.save(np.int64(2), version(2))
        assert again.restore(version(0), np.int64(2))[1] == 2


def test_what_links_lead_to_stays(tmp_path: Path) -> None:
    fdp.save(tmp_path / "best" / "1", version(1))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "1").symlink_to(tmp_path / "best" / "1")
    (tmp_path / "run" / "9").symlink_to(tmp_path / "nowhere")
    with fdp.CheckpointManager(tmp_path / "run", keep=1) as manager:
        assert manager.restore(version(0), random=False)[1] == 1
        with pytest.raises(fdp.ArgumentError, match="is a link"):
            manager.save(1, version(2))
        manager.save(2, version(2))
    assert folders(tmp_path / "run") == [2, 9]
    assert held(tmp_path / "best" / "1") == 1


def test_what_is_none_of_its_own_stays(tmp_path: Path) -> None:
    for name in ("notes", "007", "12.old", "5"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text("mine")
    (tmp_path / "6").mkdir()
    (tmp_path / "6" / "__0_0.distcp").write_text("what a killed save left")
    with fdp.CheckpointManager(tmp_path, keep=1) as manager:
        assert manager.latest_step() is None
        manager.save(1, version(1))
        manager.save(2, version(2))
    assert sorted(os.listdir(tmp_path)) == [".lock", "007", "12.old", "2", "5", "notes"]
    assert (tmp_path / "5" / "text").read_text() == "mine"


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "3"])
def test_a_number_to_keep_that_is_none_is_refused(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(fdp.ArgumentError, match="keep="):
        fdp.CheckpointManager(tmp_path, keep=keep)


def test_steps_that_would_mislead_are_refused(tmp_path: Path) -> None:
    with fdp.CheckpointManager(tmp_path) as manager:
        for step in (-1, 1.0, None, True):
            with pytest.raises(fdp.ArgumentError, match=r"CheckpointManager\.save was given step="):
                manager.save(step, version(1))  # type: ignore[arg-type]
        manager.save(10, version(10))
        with pytest.raises(fdp.ArgumentError, match=r"given step 9; the latest checkpoint in .* is of step 10"):
            manager.save(9, version(9))
        with pytest.raises(fdp.ArgumentError, match=r"CheckpointManager\.restore was given step='last'"):
            manager.restore(version(0), step="last")  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        fdp.FdpError, match=r"could not write the checkpoint of step 1 to '.*/file'.*\n.*FileExistsError"
    ):
        fdp.CheckpointManager(tmp_path / "file").save(1, version(1))


def holds(folder: Path, told: Any) -> None:
    """In another process: save there, and go on."""
    manager = fdp.CheckpointManager(folder)
    manager.save(1, {"w": torch.ones(3)}, blocking=True)
    told.send("saved")
    time.sleep(100)


def test_one_run_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    with fdp.CheckpointManager(tmp_path) as manager:
        manager.save(0, version(0), blocking=True)
        with pytest.raises(fdp.ArgumentError, match="another CheckpointManager of this process"):
            fdp.CheckpointManager(tmp_path).save(1, version(1))
    heard, told = ranks.context().Pipe(duplex=False)
    other = ranks.context().Process(target=holds, args=(tmp_path, told), daemon=True)
    other.start()
    assert heard.recv() == "saved"
    with pytest.raises(fdp.ArgumentError, match=f"another run writes checkpoints to .*process {other.pid} on "):
        fdp.CheckpointManager(tmp_path).save(1, version(1))
    other.kill()
    other.join()
    with fdp.CheckpointManager(tmp_path) as manager:
        manager.save(1, version(1))
    manager = fdp.CheckpointManager(tmp_path)
    manager.save(2, version(2), blocking=True)
    del manager  # as in a notebook
    with fdp.CheckpointManager(tmp_path) as manager:
        manager.save(3, version(3))


AT_THE_END = """
    import sys, torch, fdp
    fdp.CheckpointManager(sys.argv[1]).save(4, {"w": torch.ones(20_000_000)})
    if sys.argv[2:]:
        raise ValueError("a loop that failed")
"""


@pytest.mark.parametrize("fails", [pytest.param(False, marks=exhaustive), True])
def test_a_process_that_ends_has_written_what_it_saved(tmp_path: Path, fails: bool) -> None:
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(AT_THE_END), tmp_path, *["x"] * fails], check=False)
    assert ended.returncode == fails
    assert fdp.CheckpointManager(tmp_path).latest_step() == 4
