"""`restore(missing_ok=True)`: a new run where there is no checkpoint, on all ranks or on none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import fdp
from fdp.distributed.exchange import tell_all
from fdp.distributed.group import resolve_group


def test_a_directory_without_a_checkpoint_gives_the_state_of_a_new_run(tmp_path: Path) -> None:
    like = {"w": torch.zeros(2)}
    with fdp.CheckpointManager(tmp_path / "run") as manager:
        state, step = manager.restore(like, missing_ok=True)
        assert state is like and step == 0
        with pytest.raises(
            fdp.ArgumentError, match=r"no whole checkpoint(.|\n)*Remedy: restore\(like, missing_ok=True\)"
        ):
            manager.restore(like)
        manager.save(3, {"w": torch.ones(2)}, blocking=True)
        state, step = manager.restore(like, missing_ok=True)
        assert step == 3 and state["w"].tolist() == [1, 1]


def train(folder: Path, stop: int, own_generator: bool) -> torch.Tensor:
    """Train with dropout up to a step, from the newest checkpoint; there is one after step 3, in the first epoch."""
    fdp.seed(0)
    data = TensorDataset(torch.linspace(-1, 1, 80).view(20, 4))

    def train_step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return w - 0.1 * fdp.grad(lambda w: (torch.dropout(x, 0.5, True) @ w - 1).square().mean())(w)

    step_fn = fdp.data_parallel(train_step)
    with fdp.CheckpointManager(folder) as manager:
        w, step = manager.restore(torch.zeros(4), missing_ok=True)
        generator = torch.Generator() if own_generator else None
        loader = DataLoader(data, batch_sampler=fdp.BatchSampler(20, 4).at(step), generator=generator)
        while step < stop:
            for (x,) in loader:
                w, step = step_fn(w, x), step + 1
                if step == 3:
                    manager.save(step, w)
                if step == stop:
                    break
    return w


@pytest.mark.parametrize("own_generator", [True, False])
def test_a_run_that_draws_goes_on_if_its_loader_draws_elsewhere(tmp_path: Path, own_generator: bool) -> None:
    whole = train(tmp_path / "whole", 8, own_generator)
    train(tmp_path / "parts", 3, own_generator)
    assert torch.equal(train(tmp_path / "parts", 8, own_generator), whole) == own_generator


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    with fdp.CheckpointManager(tmp_path) as manager:
        manager.save(3, {"w": torch.ones(200)}, blocking=True)
        (file,) = (tmp_path / "3").glob("*.distcp")
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(fdp.ArgumentError, match="no whole checkpoint"):
            manager.restore({"w": torch.zeros(200)}, missing_ok=True)


def seen_late(path: str, blind: int) -> tuple[int, list[float], int | None]:
    """The file system does not show one rank what is there."""
    rank = dist.get_rank()
    with fdp.CheckpointManager(path) as manager:
        manager.save(5, {"w": torch.ones(2)}, blocking=True)
        if rank == blind:
            manager._newest = lambda *_: (None, [])  # type: ignore[method-assign]
        latest = manager.latest_step()
        state, step = manager.restore({"w": torch.zeros(2)}, missing_ok=True)
    return step, state["w"].tolist(), latest


@pytest.mark.parametrize(("blind", "found"), [(1, (5, [1, 1])), (0, (0, [0, 0]))])
def test_all_ranks_go_by_what_rank_0_sees(tmp_path: Path, blind: int, found: tuple[Any, ...]) -> None:
    outcomes = ranks.run(2, seen_late, str(tmp_path), blind)
    assert [outcome[:2] for outcome in outcomes] == [found, found]
    assert [outcome[2] for outcome in outcomes] == [None if rank == blind else 5 for rank in range(2)]


def asked_otherwise(path: str) -> str:
    with fdp.CheckpointManager(path) as manager, pytest.raises(fdp.AgreementError) as caught:
        manager.restore({"w": torch.zeros(2)}, missing_ok=dist.get_rank() == 0)
    return str(caught.value)


def test_ranks_that_ask_otherwise_are_told(tmp_path: Path) -> None:
    assert all("missing_ok=True" in text for text in ranks.run(2, asked_otherwise, str(tmp_path)))


def unreadable(path: str) -> list[str]:
    """The directory cannot be read; then, as after an error on one rank alone, ranks are in exchanges of two kinds."""
    said = []
    with fdp.CheckpointManager(path) as manager:
        for missing_ok in (False, True):
            with pytest.raises(fdp.FdpError) as caught:
                manager.restore({"w": torch.zeros(2)}, missing_ok=missing_ok)
            said.append(str(caught.value))
    own: dict[str, Any] = {"changed": []} if dist.get_rank() else {"step": 1}
    with pytest.raises(fdp.AgreementError) as caught:
        tell_all(resolve_group(), own, f"what rank {dist.get_rank()} does", "has begun")
    return [*said, str(caught.value)]


@pytest.mark.parametrize("is_link", [False, True])
def test_a_directory_that_cannot_be_read_is_an_error_on_all_ranks(tmp_path: Path, is_link: bool) -> None:
    path = tmp_path / "run"
    if is_link:
        path.symlink_to(path)
    else:
        path.write_text("")
    why = "OSError: [Errno 40] Too many" if is_link else "NotADirectoryError: [Errno 20] Not a"
    for rank, (*said, last) in enumerate(ranks.run(2, unreadable, str(path))):
        for text in said:
            assert f"could not read '{path}'" in text and f"rank 0: {why}" in text, text
        assert f"what rank {rank} does has begun on rank {rank}, and other ranks" in last, last
        assert f"rank {1 - rank}: something else" in last, last
