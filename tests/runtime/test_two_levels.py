"""Sums and means over a mesh in two levels: on real ranks beside sums of whole numbers; and proved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from bits import same_bits
from fake_ranks import fake_group, fake_mesh
from meshes import mesh_of
from samples import exhaustive

import fdp
from fdp.plan import Bucket
from fdp.runtime.proofs import sending
from fdp.runtime.two_levels import TwoLevelReduction
from fdp.verify import VerificationError, verify_sent

LARGE = 140_001
"""Elements of which a bucket in float32 goes in two levels; two ranks do not share them evenly."""


def step(state: Any, x: torch.Tensor) -> Any:
    total = fdp.psum(x["a"] * 2)
    mean = fdp.pmean([x["a"] + 1, x["b"] * 3])
    later = fdp.pmean(x["c"] + mean[0][:1])
    return {"total": total, "mean": mean, "later": later, "kept": state["kept"] + fdp.psum(x["few"])}


def inputs(rank: int, call: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Whole numbers, of which sums are exact also in sixteen bits; their means of four have two binary places."""
    generator = torch.Generator().manual_seed(10 * call + rank)
    sizes = {"a": LARGE, "b": LARGE + 4, "c": 2 * LARGE, "few": 3}
    return {name: torch.randint(-8, 8, (size,), generator=generator).to(dtype) for name, size in sizes.items()}


def reduced(sizes: tuple[int, ...], dtype: torch.dtype, compile: bool) -> None:
    mesh, rank = mesh_of(sizes), int(fdp.axis_index())
    run = fdp.data_parallel(step, group=mesh, donate_argnums=0, compile=compile, bucket_cap_mb=0.7)
    state: Any = {"kept": torch.zeros(3, dtype=dtype)}
    kept = torch.zeros(3, dtype=dtype)
    plan = run.plan(state, inputs(rank, 0, dtype))
    in_levels = [bucket for bucket in plan.buckets if bucket.pieces]
    assert [bucket.pieces for bucket in in_levels] == [sizes[-1]] * len(in_levels) and len(in_levels) > 2
    assert "two levels" in str(plan)
    for call in range(3):
        every = [inputs(r, call, dtype) for r in range(fdp.axis_size())]
        found = run(state, every[rank])
        size = len(every)
        mean = [sum(x["a"] + 1 for x in every) / size, sum(x["b"] * 3 for x in every) / size]
        kept = kept + sum(x["few"] for x in every)
        later = sum(x["c"] + mean[0][:1] for x in every) / size
        due = {"total": sum(x["a"] * 2 for x in every), "mean": mean, "later": later, "kept": kept}
        leaves = zip(fdp.pytree.leaf_names(found, ""), *map(fdp.pytree.leaves_of, (found, due)), strict=True)
        for path, one, two in leaves:
            # A twelfth of a whole number is rounded, once in each level.
            close = same_bits(one, two) if size in (4, 8) else torch.allclose(one, two, rtol=1e-6, atol=1e-5)
            assert close, (call, path, (one - two).abs().max())
        state = {"kept": found["kept"]}


@pytest.mark.parametrize(
    ("sizes", "dtype", "compile"),
    [
        ((2, 2), torch.float32, False),
        pytest.param((2, 2), torch.float16, False, marks=exhaustive),
        pytest.param((2, 2), torch.bfloat16, False, marks=exhaustive),
        pytest.param((2, 2), torch.float32, True, marks=exhaustive),
        pytest.param((2, 4), torch.float32, False, marks=exhaustive),
        pytest.param((2, 2, 2), torch.float32, False, marks=exhaustive),
        pytest.param((2, 6), torch.float32, False, marks=exhaustive),
    ],
)
def test_sums_and_means_in_two_levels(sizes: tuple[int, ...], dtype: torch.dtype, compile: bool) -> None:
    ranks.run(torch.Size(sizes).numel(), reduced, sizes, dtype, compile)


# --- which buckets go so --------------------------------------------------------------------------------------------


def buckets_of(group: Any, numel: int = LARGE, **options: Any) -> tuple[Bucket, ...]:
    made = fdp.data_parallel(lambda s, x: s + fdp.pmean(x), group=group, **options)
    buckets: tuple[Bucket, ...] = made.plan(torch.zeros(numel), torch.zeros(numel)).buckets
    return buckets


def test_large_buckets_of_a_mesh_go_in_two_levels() -> None:
    assert [bucket.pieces for bucket in buckets_of(fake_mesh(2, 3))] == [3]
    assert [bucket.pieces for bucket in buckets_of(fake_mesh(2, 3), numel=100)] == [0]
    assert [bucket.pieces for bucket in buckets_of(fake_mesh(1, 3))] == [0]
    assert [bucket.pieces for bucket in buckets_of(fake_mesh(3, 1))] == [0]
    assert [bucket.pieces for bucket in buckets_of(fake_group(6))] == [0]


def test_what_cannot_be_scattered_goes_in_one() -> None:
    made = fdp.data_parallel(lambda s, x: s + fdp.pmax(x), group=fake_mesh(2, 2))
    assert {bucket.pieces for bucket in made.plan(torch.zeros(LARGE), torch.zeros(LARGE)).buckets} == {0}
    wide = {"wire_dtype": torch.bfloat16, "accumulate_dtype": torch.float32}
    trained = fdp.data_parallel(lambda w, x: fdp.grad(lambda w: (w * x).sum())(w), group=fake_mesh(2, 2), **wide)
    assert [bucket.pieces for bucket in trained.plan(torch.zeros(4 * LARGE), torch.zeros(4 * LARGE)).buckets] == [0]


# --- what sends them is proved --------------------------------------------------------------------------------------


def prove(rank: int = 1) -> None:
    group = fake_mesh(2, 2, rank=rank)
    made = fdp.data_parallel(step, group=group, donate_argnums=0)
    emitted = made.plan({"kept": torch.zeros(3)}, inputs(0, 0, torch.float32)).emit(group)
    assert any(bucket.pieces for bucket in emitted.plan.buckets)
    verify_sent(emitted.plan, emitted.program, rank, sending(emitted.plan, emitted.program))


@pytest.mark.parametrize("rank", range(4))
def test_what_sends_right_is_let_through(rank: int) -> None:
    prove(rank)


def without_one(self: Any, *args: Any) -> None:
    right(self, *args)
    self._left.pop(0)


def twice(self: Any, *args: Any) -> None:
    right(self, *args)
    self._left.insert(0, self._left[0])


def gathered_at_once(self: Any, *args: Any) -> None:
    right(self, *args)
    self._left.reverse()


def along_another_dimension(self: Any, own: Any, received: Any, op: str, group: Any, *rest: Any) -> None:
    right(self, own, received, op, _Turned(group), *rest)


def sums(self: Any, own: Any, received: Any, op: str, *rest: Any) -> None:
    right(self, own, received, "sum", *rest)


def sums_between(self: Any, own: Any, received: Any, op: str, *rest: Any) -> None:
    right(self, own, received, op, *rest)
    first = self._left[0]
    self._left[0] = lambda: first.func(first.args[0], "sum")


class _Turned:
    def __init__(self, group: Any) -> None:
        self._group, self.sizes = group, group.sizes
        self._names = {one: two for one, two in zip(("hosts", "local"), ("local", "hosts"), strict=True)}

    def along(self, dimension: str) -> Any:
        return self._group.along(self._names[dimension] if self._first() else dimension)

    def _first(self) -> bool:
        self._asked = getattr(self, "_asked", 0) + 1
        return self._asked == 1


right = TwoLevelReduction.__init__

WRONG: dict[str, Callable[..., None]] = {
    "without a message": without_one,
    "a message twice": twice,
    "gathered before it is reduced": gathered_at_once,
    "along one dimension twice": along_another_dimension,
    "sums in place of means": sums,
    "a sum of means": sums_between,
}


@pytest.mark.parametrize("what", WRONG)
def test_what_sends_wrong_is_found_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwoLevelReduction, "__init__", WRONG[what])
    with pytest.raises((VerificationError, fdp.TraceError), match="do not carry what its program sends"):
        prove()


def test_results_that_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwoLevelReduction, "finish", lambda self: [self._go_on() for _ in self._left[:]])
    with pytest.raises((VerificationError, fdp.TraceError), match="whose message is under way"):
        prove()
