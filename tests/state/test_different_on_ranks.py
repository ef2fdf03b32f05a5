"""What ranks must have in common when they load, replicate or unshard: where they do not, all of them raise."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

import fdp


def told(call: Callable[[], Any]) -> str:
    """The class and the text of the error that a call raises."""
    try:
        call()
    except fdp.FdpError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def load_of_each_ranks_own(folder: str, sharded: bool) -> tuple[str, list[float]]:
    like = {"w": torch.zeros(4, 2)}
    for number in (0, 1):
        state = {"w": torch.full((4, 2), float(number))}
        fdp.save(f"{folder}/{number}", fdp.shard(state, min_size=0) if sharded else state)
    given = fdp.shard(like, min_size=0) if sharded else like
    error = told(lambda: fdp.load(f"{folder}/{dist.get_rank()}", like=given))
    return error, fdp.unshard(fdp.load(f"{folder}/1", like=given))["w"][:, 0].tolist()


@pytest.mark.parametrize("sharded", [True, False])
def test_a_state_is_not_put_together_from_two_checkpoints(tmp_path: Path, sharded: bool) -> None:
    for error, loaded in ranks.run(2, load_of_each_ranks_own, str(tmp_path), sharded):
        assert error.startswith("AgreementError: fdp.load") and "read by rank 1." in error
        assert loaded == [1.0] * 4


def save_to_each_ranks_own(folder: str) -> tuple[str, str, str]:
    state = fdp.shard({"w": torch.ones(4, 2)}, min_size=0)
    own = told(lambda: fdp.save(f"{folder}/{dist.get_rank()}", state))
    swapped = told(lambda: fdp.save(f"{folder}/all", state) if dist.get_rank() else fdp.save(state, f"{folder}/all"))
    return own, swapped, told(lambda: fdp.save(f"{folder}/all", state))


def test_directories_that_differ_and_a_state_in_the_place_of_one_are_said(tmp_path: Path) -> None:
    found = ranks.run(2, save_to_each_ranks_own, str(tmp_path))
    for rank, (own, swapped, afterwards) in enumerate(found):
        assert own.startswith(f"FdpError: fdp.save could not write the checkpoint to '{tmp_path}/{rank}'")
        assert f"rank 0: what ranks wrote is not all in '{tmp_path}/0'" in own
        assert own.endswith(
            "Remedy: pass one directory on all ranks, on storage that all of them see, and that no other job saves to."
        )
        assert swapped.startswith("AgreementError" if rank else "ArgumentError: fdp.save takes a directory first")
        assert afterwards == "no error"


@pytest.mark.parametrize("call", [fdp.save, fdp.load, lambda *args: fdp.CheckpointManager(args[0])])
def test_what_is_no_directory_is_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(fdp.ArgumentError, match=r"takes a directory first, .*\n.*\(directory, \.\.\.\)"):
        call({"w": torch.ones(2)}, "folder")


def replicate_from_different_roots() -> tuple[str, list[float]]:
    tree = {"w": torch.full((2,), float(dist.get_rank()))}
    error = told(lambda: fdp.replicate(tree, root=dist.get_rank()))
    return error, fdp.replicate(tree, root=1)["w"].tolist()


def test_roots_that_differ_are_refused_before_anything_is_sent() -> None:
    for error, found in ranks.run(2, replicate_from_different_roots):
        assert error.startswith("AgreementError: fdp.replicate") and "rank 1: root=1" in error
        assert found == [1.0, 1.0]


@pytest.mark.parametrize("root", [1, -1, True, 0.0])
def test_a_root_that_is_no_rank_is_refused(root: Any) -> None:
    with pytest.raises(fdp.ArgumentError, match=r"was given root=.* in a world of 1"):
        fdp.replicate({"w": torch.ones(2)}, root=root)


def unshard_in_another_order() -> tuple[str, list[float]]:
    one, two = (fdp.shard(torch.full((4, 2), float(n)), min_size=0) for n in (1, 2))
    error = told(lambda: fdp.unshard({"w": one, "v": two} if dist.get_rank() else {"u": one, "w": two}))
    return error, fdp.unshard(one)[:, 0].tolist()


def test_other_trees_are_not_put_together() -> None:
    for error, whole in ranks.run(2, unshard_in_another_order):
        assert error.startswith("AgreementError: fdp.unshard") and "tree['u']" in error
        assert whole == [1.0] * 4


def begin(folder: str, name: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=size)


def outlive_a_process_group(folder: str) -> list[str]:
    """State that was sharded over two ranks: without any, on one rank, on two that changed places, and as it was."""
    place = int(multiprocessing.current_process().name.startswith("rank1"))
    begin(folder, "first", place, 2)
    state = fdp.shard({"w": torch.arange(8.0).view(4, 2)}, min_size=0)
    step = fdp.data_parallel(lambda s, x: {"w": s["w"] + fdp.pmean(x.sum())})
    step(state, torch.ones(2))
    dist.barrier()
    dist.destroy_process_group()
    found = [told(lambda: fdp.unshard(state))]
    for name, rank, size in (("alone", 0, 1), ("swapped", 1 - place, 2), ("again", place, 2)):
        begin(folder, f"{name}{place if size == 1 else ''}", rank, size)
        found += [told(lambda: fdp.unshard(state)), told(lambda: step(state, torch.ones(2)))]
        if name == "again":
            found.append(str(fdp.unshard(state)["w"][:, 0].tolist()))
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_sharded_state_does_not_outlive_its_ranks(tmp_path: Path) -> None:
    outcomes = ranks.run_fresh(2, outlive_a_process_group, str(tmp_path), init=False, deadline_s=90)
    assert all(outcome.ok for outcome in outcomes), [outcome.describe() for outcome in outcomes]
    ends = [(*outcome.value[5:],) for outcome in outcomes]
    assert ends == [("no error", "no error", "[0.0, 2.0, 4.0, 6.0]")] * 2
    for outcome in outcomes:
        assert all("a process group that has ended" in each for each in outcome.value[:5]), outcome.value


@pytest.mark.parametrize("value", [lambda: 1, (n for n in "ab")], ids=["function", "generator"])
def test_a_value_that_cannot_be_written_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(fdp.ArgumentError, match=r"state\['value'\], a (function|generator), which cannot be written"):
        fdp.save(tmp_path / "one", {"w": torch.ones(2), "value": value})
    assert list(tmp_path.iterdir()) == []
