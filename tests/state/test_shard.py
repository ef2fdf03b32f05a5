"""Each rank keeps a part: `fdp.shard` and `fdp.unshard`, and what else takes such leaves."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from bits import same_leaves
from samples import ALL_SAMPLES, exhaustive

import fdp
from fdp.state.shards import Part, layout_of


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def divides() -> None:
    rank, size = int(fdp.axis_index()), fdp.axis_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool):
        for shape, dim in (((2 * size, 3), 0), ((5, 3 * size), 1), ((7, 5, size), 2), ((size,), 0)):
            whole = numbers(*shape, dtype=dtype)
            given = whole.clone()
            leaf = fdp.shard(given, min_size=0)
            given.zero_()  # parts are copies
            assert layout_of(leaf).part == Part(dim, size)
            assert torch.equal(leaf.to_local(), whole.chunk(size, dim)[rank]) and leaf.dtype == dtype
            assert torch.equal(fdp.unshard(leaf), whole) and torch.equal(leaf.full_tensor(), whole)
            assert fdp.unshard(leaf).is_contiguous()
            assert fdp.shard(leaf, min_size=0) is leaf
    turned = fdp.shard(numbers(4 * size, 3).t(), min_size=0)
    assert torch.equal(fdp.unshard(turned), numbers(4 * size, 3).t()) and turned.stride() == (4 * size, 1)


@pytest.mark.parametrize("size", [2, 3])
def test_a_leaf_is_divided_along_the_first_dimension_that_ranks_divide(size: int) -> None:
    ranks.run(size, divides)


def keeps() -> None:
    own = fdp.per_rank(numbers(8, 8))
    tree = {
        "small": numbers(10), "odd": numbers(5, 7, 31), "none": None, "text": "a", "number": 3, "own": own,
        "scalar": torch.ones(()), "empty": torch.ones(0, 4), "large": numbers(32, 32),
    }  # fmt: skip
    made = fdp.shard(tree)
    assert {key for key, leaf in made.items() if type(leaf).__name__ == "DTensor"} == {"large"}
    assert made["own"] == own and torch.equal(made["small"], tree["small"]) and made["number"] == 3
    assert torch.equal(fdp.unshard(made)["large"], tree["large"])
    whole = fdp.shard(tree, min_size=10**9)
    assert all(torch.equal(whole[key], leaf) for key, leaf in tree.items() if isinstance(leaf, torch.Tensor))


def test_what_is_small_or_odd_or_labelled_stays_whole() -> None:
    ranks.run(2, keeps)


def test_alone_nothing_is_divided() -> None:
    tree = {"w": numbers(8, 8)}
    for made in (fdp.shard(tree, min_size=0), fdp.unshard(tree)):
        assert type(made["w"]) is torch.Tensor and same_leaves(made, tree)


@pytest.mark.parametrize("size", [-1, 1.5, True, "8"])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(fdp.ArgumentError, match="min_size"):
        fdp.shard({"w": numbers(2)}, min_size=size)


def others() -> None:
    tree = fdp.shard({"w": numbers(4, 4)}, min_size=0)
    copied = fdp.replicate(tree)
    assert copied["w"].to_local().data_ptr() != tree["w"].to_local().data_ptr()
    assert torch.equal(fdp.unshard(copied)["w"], numbers(4, 4))
    fdp.assert_replicated(tree)
    for refused in (fdp.pmean, fdp.psum, fdp.all_gather, fdp.broadcast, fdp.per_rank):
        with pytest.raises(fdp.ArgumentError, match="sharded leaf"):
            refused(tree)
    state = fdp.optim.from_torch(torch.optim.AdamW, lr=0.1).init(tree)["state"]["w"]
    assert {key: type(leaf).__name__ for key, leaf in state.items()} == {
        "step": "Tensor", "exp_avg": "DTensor", "exp_avg_sq": "DTensor",
    }  # fmt: skip
    factored = fdp.optim.from_torch(torch.optim.Adafactor, lr=0.1).init(tree)["state"]["w"]
    assert type(factored["row_var"]) is torch.Tensor and factored["row_var"].shape == (4, 1)


def test_other_functions_keep_sharded_leaves_or_refuse_them() -> None:
    ranks.run(2, others)


def saves(folder: str) -> None:
    state = {"w": fdp.shard(numbers(12, 4), min_size=0), "b": numbers(3), "u": fdp.shard(numbers(5, 12), min_size=0)}
    fdp.save(f"{folder}/once", state)
    with fdp.CheckpointManager(f"{folder}/many") as manager:
        manager.save(7, state)


def loads(folder: str) -> None:
    warnings.simplefilter("ignore")  # of generators, which are those of another number of ranks
    plain = {"w": torch.zeros(12, 4), "b": torch.zeros(3), "u": torch.zeros(5, 12)}
    for like in (plain, fdp.shard(plain, min_size=4)):
        found = fdp.load(f"{folder}/once", like)
        assert type(found["w"]) is type(like["w"])
        with fdp.CheckpointManager(f"{folder}/many") as manager:
            also, step = manager.restore(like)
        assert step == 7
        for each in (fdp.unshard(found), fdp.unshard(also)):
            assert torch.equal(each["w"], numbers(12, 4)) and torch.equal(each["u"], numbers(5, 12))
            assert torch.equal(each["b"], numbers(3))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=exhaustive)])
def test_a_checkpoint_of_parts_is_loaded_on_other_numbers_of_ranks(size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks.run(size, saves, folder)
        assert Path(folder, "once").is_dir()
        for other in (1, 2, 3, 4) if ALL_SAMPLES else (1, 3):
            ranks.run(other, loads, folder) if other > 1 else loads(folder)


def mixed(function: str) -> str:
    tree = fdp.shard({"w": numbers(8, 4)}, min_size=1) if fdp.axis_index() == 0 else {"w": numbers(8, 4)}
    with pytest.raises(fdp.AgreementError) as caught:
        getattr(fdp, function)(tree)
    return str(caught.value)


@pytest.mark.parametrize("function", ["replicate", "assert_replicated"])
def test_sharded_on_one_rank_and_whole_on_another_is_refused_by_name(function: str) -> None:
    for message in ranks.run(2, mixed, function):  # replicate would wait for the rank that has nothing to send
        assert "rank 0: tree['w']: sharded, [8, 4] torch.float32" in message
        assert "rank 1: tree['w']: [8, 4] torch.float32" in message
