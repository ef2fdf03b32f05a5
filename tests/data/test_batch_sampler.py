"""The samples of each step: equal global batches on any number of ranks, every sample once an epoch, from any step."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from samples import examples
from torch.utils.data import DataLoader, TensorDataset

import fdp
from fdp.data import batch_sampler
from fdp.distributed.group import Group


def test_the_order_stays_what_it_is() -> None:
    """A run that goes on after fdp or torch was updated takes the samples that it would have taken."""
    sampler = fdp.BatchSampler(10, 4, seed=7)
    assert list(sampler) == ORDER[:3]
    assert list(sampler) == ORDER[3:]


ORDER = [[6, 3, 7, 5], [2, 8, 0, 9], [4, 1], [2, 9, 7, 4], [3, 8, 5, 0], [1, 6]]


def passes(sampler: fdp.BatchSampler, count: int) -> list[list[int]]:
    return [batch for _ in range(count) for batch in sampler]


@given(
    length=st.integers(1, 200),
    batch_size=st.integers(1, 60),
    seed=st.integers(-5, 2**70),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    data=st.data(),
)
@examples(80)
def test_epochs_and_steps(
    length: int, batch_size: int, seed: int, shuffle: bool, drop_last: bool, data: st.DataObject
) -> None:
    if drop_last and batch_size > length:
        return
    make = lambda: fdp.BatchSampler(length, batch_size, seed, shuffle, drop_last)  # noqa: E731
    sampler = make()
    steps = len(sampler)
    assert steps == (length // batch_size if drop_last else -(-length // batch_size))
    whole = passes(sampler, 3)
    assert len(whole) == 3 * steps
    for epoch in range(3):
        batches = whole[epoch * steps : (epoch + 1) * steps]
        samples = [sample for batch in batches for sample in batch]
        assert len(set(samples)) == len(samples)
        assert set(samples) <= set(range(length))
        assert len(samples) == (steps * batch_size if drop_last else length)
        assert all(len(batch) == batch_size for batch in batches[:-1])
        if not shuffle:
            assert samples == list(range(len(samples)))
    step = data.draw(st.integers(0, 3 * steps - 1))
    later = make().at(step)
    assert len(later) == steps - step % steps
    assert passes(later, 3 - step // steps) == whole[step:]
    assert make().global_batch(step) == whole[step]


def test_of_a_seed_the_lowest_64_bits_count() -> None:
    orders = [fdp.BatchSampler(1000, 100, seed=seed).global_batch(0) for seed in (3, 3 + 2**64, 3 - 2**64, 3 + 2**63)]
    assert orders[0] == orders[1] == orders[2] != orders[3]


def test_epochs_and_seeds_have_other_orders() -> None:
    orders = [passes(fdp.BatchSampler(50, 50, seed=seed), 3) for seed in (0, 1, 2**64 - 1)]
    assert len({tuple(epoch) for order in orders for epoch in order}) == 9


def parts_of(size: int, length: int, batch_size: int, drop_last: bool = False) -> list[list[list[int]]]:
    """The batches of each rank: parts are a matter of arithmetic, which needs no other rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fdp.BatchSampler, "_refuse_disagreement", lambda *_: None)
        every = [
            fdp.BatchSampler(length, batch_size, drop_last=drop_last, group=Group(None, size, rank))
            for rank in range(size)
        ]
        return [passes(sampler, 2) for sampler in every]


@given(length=st.integers(1, 300), batch_size=st.integers(1, 50), at_once=st.integers(1, 100), drop_last=st.booleans())
@examples(40)
def test_ranks_divide_the_batches_of_one_rank(length: int, batch_size: int, at_once: int, drop_last: bool) -> None:
    if drop_last and batch_size > length:
        return
    (whole,) = parts_of(1, length, batch_size, drop_last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_sampler, "_AT_ONCE", at_once)  # how many are computed together changes nothing
        for size in (2, 3, 4):
            if min(map(len, whole)) < size:
                with pytest.raises(fdp.ArgumentError, match=f"cannot be divided between {size} ranks"):
                    parts_of(size, length, batch_size, drop_last)
                continue
            parts = parts_of(size, length, batch_size, drop_last)
            assert [list(chain(*step)) for step in zip(*parts, strict=True)] == whole
            for step in zip(*parts, strict=True):
                assert max(map(len, step)) - min(map(len, step)) <= 1


def loaded(workers: int, start: int) -> list[list[float]]:
    loader = DataLoader(
        TensorDataset(torch.arange(22.0)),
        batch_sampler=fdp.BatchSampler(22, 8, seed=1).at(start),
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return [batch.tolist() for _ in range(2) for (batch,) in loader]


def test_a_data_loader_takes_every_step_once() -> None:
    whole = fdp.BatchSampler(22, 8, seed=1)
    steps = [whole.global_batch(step) for step in range(1, 6)]
    for workers in (0, 2):
        assert loaded(workers, 1) == steps
    for size in (2, 3):
        parts = ranks.run(size, loaded, 0, 1)
        assert [list(chain(*step)) for step in zip(*parts, strict=True)] == steps


def test_a_pass_that_is_left_early_counts_as_whole() -> None:
    sampler = fdp.BatchSampler(12, 4)
    next(iter(sampler))
    assert repr(sampler) == "fdp.BatchSampler(12, 4, seed=0, shuffle=True, drop_last=False).at(3)"
    assert next(iter(sampler)) == sampler.global_batch(3)


def test_batches_are_on_the_cpu_whatever_the_default_device() -> None:
    before = list(fdp.BatchSampler(9, 2))
    with torch.device("meta"):
        assert list(fdp.BatchSampler(9, 2)) == before
        assert fdp.BatchSampler(9, 2).global_batch(1) == before[1]


def test_a_thousand_million_samples_begin_at_any_step() -> None:
    sampler = fdp.BatchSampler(10**9, 512).at(3 * 10**9)
    assert next(iter(sampler)) == sampler.global_batch(3 * 10**9)
    assert len(sampler) == 1_953_125  # of the epoch that comes


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"length": 0}, "length=0"),
        ({"length": 2.0}, "length=2.0"),
        ({"length": 2**62 + 1}, "length="),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"seed": "a"}, "seed='a'"),
        ({"batch_size": 9, "drop_last": True}, "would have no batch"),
    ],
)
def test_arguments_without_a_meaning_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(fdp.ArgumentError, match=named):
        fdp.BatchSampler(**{"length": 8, "batch_size": 2, **arguments})


@pytest.mark.parametrize("step", [-1, 1.0, None])
def test_a_step_that_is_none_is_refused(step: Any) -> None:
    sampler = fdp.BatchSampler(8, 2)
    for method in (sampler.at, sampler.global_batch):
        with pytest.raises(fdp.ArgumentError, match=f"{method.__name__}\\(step\\)={step}"):
            method(step)


def differing(what: str) -> str:
    # A group of the test's own: passes of one test are not compared with those of another.
    group, rank = dist.new_group(), dist.get_rank()
    length = 12 - 4 * rank if what == "length" else 12
    sampler = fdp.BatchSampler(length, 4, seed=rank if what == "seed" else 0, group=group)
    if what == "epoch":
        sampler = sampler.at(3 * rank)
    try:
        list(sampler)
        list(sampler)
    except fdp.AgreementError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["seed", "length", "epoch", "none"])
def test_ranks_that_go_through_other_batches_are_told(what: str) -> None:
    first, second = ranks.run(2, differing, what)
    assert bool(first or second) == (what != "none")
    if what == "seed":
        error = first or second
        assert "seed=0" in error
        assert "seed=1" in error
        assert "go through them equally often" in error
