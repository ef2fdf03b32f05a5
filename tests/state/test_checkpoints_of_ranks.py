"""Checkpoints of several ranks: shared between them, read by others, and whole whenever ranks are killed."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import exhaustive

import fdp
from fdp.state import checkpoint_manager
from fdp.state.index import INDEX


def folders(path: Path) -> list[int]:
    return sorted(int(name) for name in os.listdir(path) if name.isdigit())


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((40,), float(step)), "b": torch.full((3,), float(step)), "n": step}


def save_on_ranks(path: str, own: bool) -> list[str]:
    fdp.seed(1)
    with fdp.CheckpointManager(path) as manager:
        for step in (1, 2):
            state = state_of(step)
            if own:
                state["own"] = fdp.per_rank(torch.full((2,), float(dist.get_rank())))
            manager.save(step, state)
        found, step = manager.restore(state)
        assert step == 2
        if own:
            assert found["own"].value.tolist() == [float(dist.get_rank())] * 2
    return sorted(os.listdir(Path(path) / "2"))


def restore_on_ranks(path: str) -> tuple[list[float], str]:
    manager = fdp.CheckpointManager(path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state, step = manager.restore(state_of(0))
    assert repr(state) == repr(state_of(2))
    assert step == 2
    return torch.rand(2).tolist(), "".join(str(each.message) for each in told)


def test_ranks_share_the_writing_and_others_read_it(tmp_path: Path) -> None:
    files, _ = ranks.run(2, save_on_ranks, str(tmp_path), False)
    assert len([name for name in files if name.endswith(".distcp")]) == 2
    (same, silence), _ = ranks.run(2, restore_on_ranks, str(tmp_path))
    assert silence == ""
    found = ranks.run(3, restore_on_ranks, str(tmp_path))
    assert ranks.run(3, restore_on_ranks, str(tmp_path)) == found  # a function of the checkpoint and the rank
    draws = [draw for draw, _ in found]
    assert len({tuple(draw) for draw in (*draws, same)}) == 4
    assert all("holds the generators of 2 ranks, and this is one of 3" in text for _, text in found)
    manager = fdp.CheckpointManager(tmp_path)
    with pytest.warns(UserWarning, match="and this is one of 1"):
        assert manager.restore(state_of(0))[1] == 2


def test_leaves_of_each_ranks_own(tmp_path: Path) -> None:
    ranks.run(2, save_on_ranks, str(tmp_path), True)
    with pytest.raises(fdp.ArgumentError, match="saved by 2 ranks"):
        fdp.CheckpointManager(tmp_path).restore({**state_of(0), "own": fdp.per_rank(torch.zeros(2))}, random=False)


def no_memory(leaf: Any) -> Any:
    raise MemoryError("no memory for a copy")


def misused(path: str, how: str) -> str:
    rank = dist.get_rank()
    with fdp.CheckpointManager(path) as manager:
        try:
            if how == "step":
                manager.save(1 + rank, state_of(1))
            elif how == "blocking":
                manager.save(1, state_of(1), blocking=rank == 1)
            elif how == "random":
                manager.save(1, state_of(1), random=rank == 1)
            elif how == "copy":
                with pytest.MonkeyPatch.context() as patch:
                    if rank == 1:
                        patch.setattr(checkpoint_manager, "_copied", no_memory)
                    manager.save(1, state_of(1))
            elif how == "state":
                manager.save(1, state_of(1 + rank))
            elif how == "folder" and rank == 0:
                fdp.CheckpointManager(Path(path) / "no" / "way" / "\0").save(1, state_of(1))
            elif how == "restore":
                manager.restore(state_of(0))
            else:
                manager.save(1, state_of(1))
        except (fdp.FdpError, ValueError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("step", r"CheckpointManager.save\(step=2, "),
        ("blocking", "blocking=True"),
        ("random", "random=False"),
        ("copy", "MemoryError"),
        ("state", "ReplicationError: CheckpointManager.save was given a state that is not the same on every rank"),
        ("folder", "ValueError"),
        ("restore", "ArgumentError: there is no whole checkpoint in"),
    ],
)
def test_misuse_is_an_error_on_all_ranks(tmp_path: Path, how: str, told: str) -> None:
    found = ranks.run(2, misused, str(tmp_path), how)
    assert all(found)
    assert any(re.search(told, text) for text in found)
    assert folders(tmp_path) == []


def in_a_part(path: str) -> int | None:
    part = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    with fdp.CheckpointManager(path, group=part) as manager:
        manager.save(1, state_of(1))
        return manager.restore(state_of(0))[1]


def left_to_a_destroyed_group(path: str, is_late: bool) -> tuple[list[str], int | None, int | None]:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    manager, told = fdp.CheckpointManager(path, keep=1), []
    manager.save(1, state_of(1), blocking=True)
    with pytest.MonkeyPatch.context() as patch:
        real, may_write = checkpoint_manager.write, threading.Event()

        def write(*args: Any) -> None:
            may_write.wait()
            real(*args)

        patch.setattr(checkpoint_manager, "write", write)
        manager.save(2, state_of(2))
        if not is_late:
            may_write.set()
            time.sleep(0.01)
        dist.destroy_process_group()
        may_write.set()
        try:
            manager.wait_until_finished()
        except fdp.FdpError as error:
            told.append(str(error))
    latest = manager.latest_step()
    again = dist.PrefixStore("again", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=again, rank=rank, world_size=2)
    manager.save(3, state_of(3))
    manager.close()
    return told, latest, manager.latest_step()


@pytest.mark.parametrize("is_late", [True, pytest.param(False, marks=exhaustive)])
def test_a_group_that_is_destroyed_meanwhile(tmp_path: Path, is_late: bool) -> None:
    found = ranks.run_fresh(2, left_to_a_destroyed_group, str(tmp_path), is_late)
    for told, latest, newest in (each.value for each in found):
        assert newest == 3
        assert told or (latest == 2 and not is_late)
        if is_late:
            assert ("the process group was destroyed meanwhile" in told[0], latest) == (True, 1)
    assert fdp.load(tmp_path / "3", state_of(0))["n"] == 3


def test_a_group_that_is_a_part_of_all(tmp_path: Path) -> None:
    assert ranks.run(3, in_a_part, str(tmp_path)) == [None, 1, 1]


def saves_on(path: Path, store: Path, rank: int, told: Any) -> None:
    """In another process, until it is killed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    manager = fdp.CheckpointManager(path, keep=2)
    at = torch.zeros(())
    state = {name: at + torch.zeros(200_000) for name in "abcdef"}
    own = fdp.per_rank(torch.full((1000,), float(rank)))
    told.send(0)
    for step in range(1, 10_000):
        state = {name: x + 1 for name, x in state.items()}
        manager.save(step, {**state, "own": own, "n": step}, blocking=step % 3 == 0)
        told.send(step)


def killed(tmp_path: Path, victims: tuple[int, ...], after_s: float) -> None:
    """Kill ranks that save without a pause, and look at what is there."""
    path, store = tmp_path / "run", tmp_path / "store"
    each, said, told = [], [], []
    try:
        for rank in range(2):
            heard, tells = ranks.context().Pipe(duplex=False)
            each.append(ranks.context().Process(target=saves_on, args=(path, store, rank, tells), daemon=True))
            each[-1].start()
            tells.close()
            said.append(heard)
        assert [heard.recv() for heard in said] == [0, 0]
        time.sleep(after_s)
        for victim in victims:
            each[victim].kill()
        time.sleep(1.0)
        for process, heard in zip(each, said, strict=True):  # those that are left wait for the others, or have ended
            process.kill()
            told.append(0)
            with contextlib.suppress(EOFError):
                while True:
                    told[-1] = heard.recv()
    finally:
        for process in each:
            process.kill()
            process.join()
    manager = fdp.CheckpointManager(path)
    latest = manager.latest_step()
    # What save has returned for is there, but for the last, which a thread was writing.
    assert (latest or 0) >= max(told) - 1
    if latest is None:
        return
    whole = [step for step in folders(path) if (path / str(step) / INDEX).exists()]
    for step in whole:
        like = {**{name: torch.zeros(200_000) for name in "abcdef"}, "n": 0}
        saved = torch.distributed.checkpoint.FileSystemReader(path / str(step)).read_metadata().state_dict_metadata
        assert sum(name.startswith("rank ") for name in saved) == 2
        found: dict[str, Any] = {f"state['{name}']": x for name, x in like.items() if name != "n"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.distributed.checkpoint.load(found, checkpoint_id=path / str(step), no_dist=True)
        assert all(bool((x == step).all()) for x in found.values())


@pytest.mark.parametrize(
    ("victims", "after_s"),
    [
        ((0,), 0.31),
        *(
            pytest.param(victims, after_s, marks=exhaustive)
            for victims, after_s in [((1,), 0.12), ((0, 1), 0.47), *(((at % 2,), 0.013 * at) for at in range(100))]
        ),
    ],
)
def test_killed_while_they_save(tmp_path: Path, victims: tuple[int, ...], after_s: float) -> None:
    killed(tmp_path, victims, after_s)
