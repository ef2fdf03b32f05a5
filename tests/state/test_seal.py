"""The index of a checkpoint has a checksum: no flipped bit of it goes unnoticed, and others read it as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fdp
from fdp.state.index import INDEX, read_index
from fdp.state.seal import without_seal


def saved(folder: Path) -> dict[str, object]:
    """A checkpoint of a state in which a changed index could mean another value: equal shapes, and neighbours."""
    state = {"a": torch.arange(6.0), "b": torch.arange(6.0) + 10, "m": torch.ones(2, 3), "n": 7}
    fdp.save(folder, state)
    return state


def test_each_flipped_bit_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    path = tmp_path / "a" / INDEX
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(bytes(damaged))
        with pytest.raises(fdp.ArgumentError) as caught:
            read_index(path)
        assert str(caught.value).startswith(f"'{path}' is not the index of a whole checkpoint"), at
    path.write_bytes(whole)
    assert set(read_index(path).state_dict_metadata) >= {"state['a']", "state['b']", "state['m']", "state['n']"}


def test_the_manager_takes_an_older_checkpoint_for_it(tmp_path: Path) -> None:
    with fdp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((3,), float(step))}, blocking=True)
        path = tmp_path / "2" / INDEX
        damaged = bytearray(path.read_bytes())
        damaged[-30] ^= 1
        path.write_bytes(bytes(damaged))
        with pytest.warns(UserWarning, match="takes step 1: .* its bits are not those that were"):
            state, step = manager.restore({"w": torch.zeros(3)})
    assert step == 1
    assert torch.equal(state["w"], torch.ones(3))


def test_one_without_a_checksum_is_loaded_as_before(tmp_path: Path) -> None:
    state, path = saved(tmp_path / "a"), tmp_path / "a" / INDEX
    content, is_sealed = without_seal(path.read_bytes())
    assert is_sealed
    path.write_bytes(content)
    found = fdp.load(tmp_path / "a", {**state, "a": torch.zeros(6)})
    assert torch.equal(found["a"], torch.arange(6.0))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_one_with_a_checksum(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    into = {"state['b']": torch.zeros(6)}
    dcp.load(into, checkpoint_id=tmp_path / "a", no_dist=True)
    assert torch.equal(into["state['b']"], torch.arange(6.0) + 10)
