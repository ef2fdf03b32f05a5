"""Collectives that give each rank a part of its own, on real ranks: beside plain computations on stacked values."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import stacked
import torch
from bits import same_bits
from samples import exhaustive

import fdp
from fdp.distributed import messages

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SUMMABLE = [*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.complex64]
MOVED = [*SUMMABLE, torch.bool, torch.int16, torch.complex128]


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_complex:
        parts = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
        return torch.complex(parts[0], parts[1]).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 60, shape, generator=generator).to(dtype)


def cases(size: int) -> list[tuple[str, tuple[int, ...], dict[str, Any], list[torch.dtype]]]:
    """(collective, shape, further arguments, dtypes)."""
    shift = [(rank, (rank + 1) % size) for rank in range(size)]
    swap = [(0, size - 1), (size - 1, 0)] if size > 1 else [(0, 0)]
    return [
        ("psum_scatter", (2 * size, 3), {}, SUMMABLE),
        ("psum_scatter", (3, size, 2), {"axis": 1}, [torch.float32, torch.int32]),
        ("psum_scatter", (2, 3 * size), {"axis": -1}, [torch.float32, torch.complex64]),
        ("psum_scatter", (size, 0), {}, [torch.float32]),
        ("psum_scatter", (0, 2), {}, [torch.float32]),
        ("pmean_scatter", (2 * size, 3), {}, [*FLOATS, torch.complex64]),
        ("pmean_scatter", (2, size), {"axis": 1}, [torch.float32]),
        ("all_to_all", (2 * size, 3), {"split_axis": 0, "concat_axis": 1}, MOVED),
        ("all_to_all", (2 * size, 3), {"split_axis": 0, "concat_axis": 0}, [torch.float32]),
        ("all_to_all", (2, 3, size), {"split_axis": -1, "concat_axis": 0}, [torch.float32, torch.bool]),
        ("all_to_all", (2, 2 * size, 3), {"split_axis": 1, "concat_axis": 2}, [torch.float32]),
        ("all_to_all", (size, 0), {"split_axis": 0, "concat_axis": 1}, [torch.float32]),
        ("ppermute", (2, 3), {"perm": shift}, MOVED),
        ("ppermute", (), {"perm": swap}, [torch.float32, torch.int64]),
        ("ppermute", (3,), {"perm": [(0, size - 1)]}, [torch.float32, torch.bool]),
        ("ppermute", (3,), {"perm": []}, [torch.float32]),
        ("ppermute", (0, 3), {"perm": shift}, [torch.float32]),
    ]


def outside_a_step() -> None:
    rank, size = fdp.axis_index().item(), fdp.axis_size()
    for name, shape, arguments, dtypes in cases(size):
        for dtype in dtypes:
            values = [value(each, shape, dtype) for each in range(size)]
            found = getattr(fdp, name)(values[int(rank)], **arguments)
            expected = expected_of(name, values, arguments)[int(rank)]
            assert found.dtype == dtype and found.shape == expected.shape, (name, arguments, dtype)
            assert found.is_contiguous(), (name, arguments)
            assert close(found, expected), (name, arguments, dtype, found, expected)


def expected_of(name: str, values: list[torch.Tensor], arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Of sixteen-bit values: added up in float32, and rounded once."""
    dtype = values[0].dtype
    if dtype.is_complex:
        numbers = [expected_of(name, [getattr(each, part) for each in values], arguments) for part in ("real", "imag")]
        return [torch.complex(real.contiguous(), imag.contiguous()) for real, imag in zip(*numbers, strict=True)]
    wide = dtype in (torch.float16, torch.bfloat16) and "scatter" in name
    given = [each.float() for each in values] if wide else values
    return [each.to(dtype) for each in stacked.COLLECTIVES[name](given, **arguments)]


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal to the bit: both add in the order of ranks."""
    if found.is_complex():
        return same_bits(torch.view_as_real(found), torch.view_as_real(expected.contiguous()))
    return same_bits(found, expected.contiguous())


@pytest.mark.parametrize("world", [pytest.param(n, marks=exhaustive if n != 2 else ()) for n in range(1, 6)])
def test_outside_of_a_step(world: int) -> None:
    """Beyond four ranks they no longer exchange row by row."""
    ranks.run(world, outside_a_step)


def by_a_backend_that_scatters() -> None:
    """As NCCL is asked to; gloo's own answer is right, and takes longer."""
    rank, size, known = int(fdp.axis_index()), fdp.axis_size(), messages._SCATTERING_BACKENDS
    values = [value(each, (2 * size, 3), torch.float64) for each in range(size)]
    messages._SCATTERING_BACKENDS = ("gloo",)
    try:
        for name in ("psum_scatter", "pmean_scatter"):
            expected = expected_of(name, values, {})[rank]
            scatter = getattr(fdp, name)
            torch.testing.assert_close(scatter(values[rank]), expected)
            step = fdp.data_parallel(lambda x, scatter=scatter: fdp.per_rank(scatter(x * 1.0) * 2))
            for _ in range(2):
                torch.testing.assert_close(step(values[rank]), expected * 2)
    finally:
        messages._SCATTERING_BACKENDS = known


@pytest.mark.parametrize("world", [*(pytest.param(n, marks=exhaustive) for n in (1, 2)), 3])
def test_by_a_backend_that_scatters(world: int) -> None:
    ranks.run(world, by_a_backend_that_scatters)


def changed_by_whoever_called() -> list[str]:
    """The result of a collective is no view: it can be detached and changed in place, and the argument stays."""
    size, found = fdp.axis_size(), []
    x = torch.arange(float(4 * size * size)).view(2 * size, 2 * size)
    kinds: dict[str, Any] = {
        f"all_to_all {split} {concat}": lambda x, s=split, c=concat: fdp.all_to_all(x, s, c)
        for split in (0, 1)
        for concat in (0, 1)
    }
    kinds |= {"psum_scatter": fdp.psum_scatter, "all_gather": fdp.all_gather, "pmean": fdp.pmean, "psum": fdp.psum}
    kinds |= {"ppermute": lambda x: fdp.ppermute(x, [(0, 0)]), "broadcast": lambda x: fdp.broadcast(x, root=0)}
    kinds["all_to_all of a row"] = lambda x: fdp.all_to_all(x[None], 2, 1)
    for name, collective in kinds.items():

        def step(s: torch.Tensor, x: torch.Tensor, collective: Any = collective) -> Any:
            y = collective(x[:])
            y.detach_()
            return fdp.per_rank((y.add_(1), x * 1))

        y, same = fdp.data_parallel(step)(torch.ones(1), x.clone())
        if not same_bits(y, collective(x) + 1) or not same_bits(same, x):
            found.append(name)
    return found


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=exhaustive)])
def test_what_a_collective_returns_can_be_changed(world: int) -> None:
    assert ranks.run(world, changed_by_whoever_called) == [[]] * world


def in_pieces() -> None:
    """Parts of more than 1 MiB, of lengths that pieces do not share evenly; alone and many at once."""
    rank, size = int(fdp.axis_index()), fdp.axis_size()
    for dtype, numel in ((torch.float32, 700_001), (torch.bfloat16, 1_100_003), (torch.uint8, 2**20 + 1)):
        values = [torch.arange(r, r + size * numel).remainder(97).to(dtype).view(size, -1) for r in range(size)]
        for name, arguments in (
            ("psum_scatter", {}),
            ("all_to_all", {"split_axis": 0, "concat_axis": 0}),
            ("ppermute", {"perm": [(r, (r + 1) % size) for r in range(1, size)]}),
        ):
            expected = expected_of(name, values, arguments)[rank]
            assert same_bits(getattr(fdp, name)(values[rank], **arguments), expected), (name, dtype)
        assert same_bits(fdp.all_gather(values[rank]), torch.stack(values)), dtype
        assert same_bits(fdp.all_gather(values[rank][:, :3]), torch.stack(values)[:, :, :3]), dtype  # in one piece
    step = fdp.data_parallel(lambda s, b: fdp.per_rank([fdp.psum_scatter(x) for x in b]), bucket_cap_mb=3)
    batch = [torch.full((size * 500_000,), rank + each + 1.0) for each in range(3)]
    for at, found in enumerate(step(torch.ones(1), batch)):
        assert found.unique().tolist() == [sum(each + at + 1.0 for each in range(size))]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=exhaustive)])
def test_large_messages_come_in_pieces(world: int) -> None:
    ranks.run(world, in_pieces)


def inside_a_step(compile: bool, donate: bool) -> None:
    """All of them at once: they share buckets, some are sent alone, and state goes in and comes out."""
    rank, size = int(fdp.axis_index()), fdp.axis_size()
    chosen = [(*case[:3], dtype) for case in cases(size) for dtype in case[3][: 1 if compile else None]]
    chosen = [chosen[at] for at in (1, 2, 6, 8, 12, 14)] if compile else chosen  # each takes a compiler seconds

    def step(state: torch.Tensor, batch: dict[str, Any]) -> Any:
        found = []
        for at, (name, _, arguments, _) in enumerate(chosen):
            given = batch["x"][at]
            given = given.logical_not() if given.dtype == torch.bool else given + given
            # What is sent is computed in the step, and what comes back is read there.
            result = getattr(fdp, name)(given, **arguments)
            found.append(result.logical_not() if result.dtype == torch.bool else result + 1)
        return state + fdp.pmean(batch["y"].sum()), fdp.per_rank(found)

    def shards(call: int) -> list[list[torch.Tensor]]:
        return [[value(r, shape, dtype, call) for _, shape, _, dtype in chosen] for r in range(size)]

    run = fdp.data_parallel(step, compile=compile, donate_argnums=0 if donate else ())
    state = torch.zeros(3)
    for call in range(3):
        all_values = shards(call)
        state, found = run(state, {"x": all_values[rank], "y": torch.full((2,), float(rank))})
        for at, (name, _, arguments, dtype) in enumerate(chosen):
            given = [values[at] for values in all_values]
            given = [x.logical_not() if dtype == torch.bool else x + x for x in given]
            expected = expected_of(name, given, arguments)[rank]
            expected = expected.logical_not() if dtype == torch.bool else expected + 1
            assert found[at].dtype == dtype and found[at].shape == expected.shape, (name, arguments, dtype)
            assert close(found[at], expected), (call, name, arguments, dtype, found[at], expected)
    assert state.tolist() == [3.0 * (size - 1)] * 3
    plan = run.plan(state, {"x": shards(0)[rank], "y": torch.ones(2)})
    shared = {bucket.op for bucket in plan.buckets if len(bucket.members) > 1}
    assert shared >= ({"sum_scatter"} if compile else {"sum_scatter", "mean_scatter"})
    assert compile or size > 2 or "permute" in shared, "those with equal pairs are sent together"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("world", [1, 2, *(pytest.param(n, marks=exhaustive) for n in (3, 4))])
def test_inside_of_a_step(world: int) -> None:
    ranks.run(world, inside_a_step, False, world == 2)


@exhaustive
@pytest.mark.parametrize("world", [2, 3])
def test_compiled(world: int) -> None:
    ranks.run(world, inside_a_step, True, world == 2)
