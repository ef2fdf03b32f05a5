"""Collectives along one dimension of a mesh, on real ranks: beside plain computations on the values of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from bits import same_bits
from meshes import mesh_of
from samples import exhaustive
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fdp
from fdp.distributed.group import resolve_group

NAMES = ("hosts", "local")


def value(rank: int, call: int = 0, numel: int = 12) -> torch.Tensor:
    """Small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randint(-50, 50, (numel,), generator=generator).float()


def expected_of(name: str, axis: str, sizes: tuple[int, int], place: tuple[int, int], given: Any) -> Any:
    """What a rank gets. `given(host, local)` is what a rank contributes."""
    at = NAMES.index(axis)
    others = [(n, place[1]) if at == 0 else (place[0], n) for n in range(sizes[at])]
    values, own, size = [given(*other) for other in others], place[at], sizes[at]
    stacked = torch.stack(values)
    return {
        "psum": lambda: stacked.sum(0),
        "pmean": lambda: stacked.sum(0) / size,
        "weighted": lambda: sum(v * (n + 1) for n, v in enumerate(values)) / sum(n + 1 for n in range(size)),
        "pmax": lambda: stacked.amax(0),
        "pmin": lambda: stacked.amin(0),
        "all_gather": lambda: stacked,
        "broadcast": lambda: values[size - 1],
        "psum_scatter": lambda: stacked.sum(0).chunk(size)[own],
        "pmean_scatter": lambda: (stacked.sum(0) / size).chunk(size)[own],
        "all_to_all": lambda: torch.cat([each.chunk(size)[own] for each in values]),
        "ppermute": lambda: values[(own - 1) % size],
        "axis_index": lambda: torch.tensor(own),
        "axis_size": lambda: torch.tensor(size),
    }[name]()


FEW = ("pmean", "all_gather", "psum_scatter", "ppermute", "axis_index")
"""Of compiled steps, since each collective takes the compiler time."""


def all_along(x: torch.Tensor, axis: str, few: bool) -> dict[str, torch.Tensor]:
    size = fdp.axis_size(axis)
    found: dict[str, Callable[[], torch.Tensor]] = {
        "psum": lambda: fdp.psum(x, axis),
        "pmean": lambda: fdp.pmean(x, axis=axis),
        "weighted": lambda: fdp.pmean(x, weight=(fdp.axis_index(axis) + 1).float(), axis=axis),
        "pmax": lambda: fdp.pmax(x, axis=axis),
        "pmin": lambda: fdp.pmin(x, axis=axis),
        "all_gather": lambda: fdp.all_gather(x, axis=axis),
        "broadcast": lambda: fdp.broadcast(x, root=size - 1, axis=axis),
        "psum_scatter": lambda: fdp.psum_scatter(x, axis_name=axis),
        "pmean_scatter": lambda: fdp.pmean_scatter(x, axis_name=axis),
        "all_to_all": lambda: fdp.all_to_all(x, 0, 0, axis=axis),
        "ppermute": lambda: fdp.ppermute(x, [(r, (r + 1) % size) for r in range(size)], axis=axis),
        "axis_index": lambda: fdp.axis_index(axis),
        "axis_size": lambda: torch.tensor(size),
    }
    return {name: found[name]() for name in (FEW if few else found)}


def one_step(sizes: tuple[int, int], compile: bool, donate: bool) -> None:
    """All of them at once, of values that the step computes; sums over all ranks beside them."""
    mesh, rank = mesh_of(sizes), int(fdp.axis_index())
    place = rank // sizes[1], rank % sizes[1]

    def step(state: torch.Tensor, x: torch.Tensor) -> Any:
        found = {axis: all_along(x + x, axis, few=compile) for axis in NAMES}
        return state + fdp.psum(x.sum()), fdp.per_rank(found)

    run = fdp.data_parallel(step, group=mesh, compile=compile, donate_argnums=0 if donate else ())
    state, total = torch.zeros(2), 0.0
    for call in range(3):
        state, found = run(state, value(rank, call))
        total += float(sum(value(r, call).sum() for r in range(sizes[0] * sizes[1])))
        assert state.tolist() == [total, total]
        for axis in NAMES:
            for name, result in found[axis].items():
                due = expected_of(name, axis, sizes, place, lambda h, l: 2 * value(h * sizes[1] + l, call))  # noqa: B023, E741
                close = torch.allclose(result, due) if name == "weighted" else same_bits(result, due)
                assert result.shape == due.shape and close, (call, axis, name, result, due)


@pytest.mark.parametrize(
    ("sizes", "compile", "donate"),
    [
        pytest.param((2, 2), False, False, marks=exhaustive),
        ((2, 2), False, True),
        pytest.param((2, 2), True, True, marks=exhaustive),
        pytest.param((1, 2), False, False, marks=exhaustive),
        pytest.param((2, 1), False, False, marks=exhaustive),
        pytest.param((3, 2), False, True, marks=exhaustive),
        pytest.param((2, 3), True, False, marks=exhaustive),
    ],
)
def test_each_collective_along_each_dimension(sizes: tuple[int, int], compile: bool, donate: bool) -> None:
    ranks.run(sizes[0] * sizes[1], one_step, sizes, compile, donate)


def what_is_replicated() -> None:
    """A mean along both dimensions is the same on all ranks, along one of them it is not."""
    mesh, rank = mesh_of((2, 2)), int(fdp.axis_index())
    both = fdp.data_parallel(lambda s, x: s + fdp.pmean(fdp.pmean(x, axis="local"), axis="hosts"), group=mesh)
    assert same_bits(both(torch.zeros(12), value(rank)), torch.stack([value(r) for r in range(4)]).mean(0))
    one = fdp.data_parallel(lambda s, x: s + fdp.pmean(x, axis="local"), group=mesh)
    with pytest.raises(fdp.ReplicationError, match="differ along hosts"):
        one(torch.zeros(12), value(rank))
    scattered = fdp.data_parallel(lambda s, x: fdp.psum_scatter(s, axis_name="local"), group=mesh)
    with pytest.raises(fdp.ReplicationError, match="differ along local"):
        scattered(torch.zeros(12), value(rank))
    index = fdp.data_parallel(lambda s, x: s + fdp.axis_index("hosts"), group=mesh)
    with pytest.raises(fdp.ReplicationError, match="differ along hosts"):
        index(torch.zeros(12), value(rank))
    # What was the same along a dimension stays so, whatever is done along the other one.
    half = fdp.data_parallel(lambda s, x: fdp.pmean(fdp.axis_index("hosts") * s, axis="hosts"), group=mesh)
    assert half(torch.full((2,), 4.0), value(rank)).tolist() == [2.0, 2.0]


def test_what_is_replicated_along_all_dimensions_is_replicated() -> None:
    ranks.run(4, what_is_replicated)


def derivatives() -> None:
    """Of a sum along one dimension: what is sent back goes along the same one."""
    mesh, rank = mesh_of((2, 2)), int(fdp.axis_index())
    host, local = rank // 2, rank % 2

    def step(s: torch.Tensor, x: torch.Tensor) -> Any:
        loss = lambda w: (fdp.psum(w * x, axis="local") * (fdp.axis_index() + 1)).sum()  # noqa: E731
        value, own = torch.func.grad_and_value(lambda w: loss(w))(s)
        return fdp.per_rank((value, own)), fdp.pmean(torch.func.grad(loss)(s))

    (grad, _), mean = fdp.data_parallel(step, group=mesh)(torch.ones(12), value(rank))
    sent_back = sum(2 * host + other + 1 for other in range(2))
    assert same_bits(grad, value(2 * host + local) * sent_back)
    every = [value(2 * h + n) * sum(2 * h + other + 1 for other in range(2)) for h in range(2) for n in range(2)]
    assert same_bits(mean, torch.stack(every).mean(0))


def test_derivatives_go_along_the_same_dimension() -> None:
    ranks.run(4, derivatives)


def trained(sizes: tuple[int, int], compile: bool) -> None:
    """Training on a mesh gives the bits of training on its ranks without one."""
    rank = int(fdp.axis_index())
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=0.1)

    def step(state: Any, x: torch.Tensor) -> Any:
        loss, grads = fdp.value_and_grad(lambda p: (x @ p["w"] + p["b"]).square().mean())(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, fdp.pmean(loss)

    params = {"w": torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), "b": torch.zeros(3)}
    results = []
    for group in (None, mesh_of(sizes)):
        run = fdp.data_parallel(step, group=group, compile=compile)
        state: Any = {"params": fdp.replicate(params), "opt": optimizer.init(params)}
        for call in range(4):
            state, loss = run(state, value(rank, call, 24).view(4, 6) / 50)
        fdp.assert_replicated(state, group=group)
        results.append((state, loss))
    for one, two in zip(*map(fdp.pytree.leaves_of, results), strict=True):
        assert same_bits(one, two)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=exhaustive)])
def test_training_on_a_mesh(compile: bool) -> None:
    ranks.run(4, trained, (2, 2), compile)


def refusals() -> None:
    rank, mesh = int(fdp.axis_index()), mesh_of((2, 2))
    with pytest.raises(fdp.ArgumentError, match="there is no mesh here"):
        fdp.psum(torch.ones(2), axis="hosts")
    wrong = fdp.data_parallel(lambda s, x: fdp.psum(s, axis="host"), group=mesh)
    with pytest.raises(fdp.ArgumentError, match=r"axis='host', and the mesh of the step has 'hosts', 'local'"):
        wrong(torch.ones(2), torch.ones(2))
    wrong = fdp.data_parallel(lambda s, x: fdp.psum(s, axis="hosts"))
    with pytest.raises(fdp.ArgumentError, match="there is no mesh here"):
        wrong(torch.ones(2), torch.ones(2))
    wrong = fdp.data_parallel(lambda s, x: fdp.broadcast(x, root=2, axis="local"), group=mesh)
    with pytest.raises(fdp.ArgumentError, match="root=2 in a world of 2"):
        wrong(torch.ones(2), torch.ones(2))
    wrong = fdp.data_parallel(lambda s, x: fdp.psum_scatter(x, axis="local"), group=mesh)
    with pytest.raises(fdp.ArgumentError, match="one of the mesh goes to axis_name"):
        wrong(torch.ones(2), torch.ones(2))
    step = lambda s, x: s + fdp.pmean(x)  # noqa: E731
    for names in (None, ("hosts", ""), ("", "local")):
        with pytest.raises(fdp.ArgumentError, match="not each has a name"):
            unnamed = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            fdp.data_parallel(step, group=unnamed)(torch.ones(2), torch.ones(2))
    turned = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=NAMES)
    with pytest.raises(fdp.ArgumentError, match="not in ascending order"):
        fdp.data_parallel(step, group=turned)(torch.ones(2), torch.ones(2))
    # A part of the world: each half is a mesh of its own.
    half = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("halves", *NAMES))["hosts", "local"]
    found = fdp.data_parallel(step, group=half)(torch.zeros(1), torch.full((1,), float(rank)))
    assert found.tolist() == [0.5 if rank < 2 else 2.5]


def test_bad_input() -> None:
    ranks.run(4, refusals)


def other_meshes(what: str) -> None:
    """Ranks that are on different meshes agree before anything is sent; none waits for another."""
    rank, summed = int(fdp.axis_index()), lambda s, x: (s + 1, fdp.per_rank(fdp.psum(x, axis="a")))
    square, row = (init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")) for sizes in ((2, 2), (1, 4)))
    if what == "names":
        # torch itself compares no names.
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b") if rank < 2 else ("b", "a"))
    else:
        mesh = row if rank == 3 else square
    with pytest.raises(fdp.AgreementError, match=r"mesh of [ab]=\d, [ab]=\d"):
        fdp.data_parallel(summed, group=mesh)(torch.zeros(1), torch.ones(1))


@pytest.mark.parametrize("what", ["names", pytest.param("sizes", marks=exhaustive)])
def test_ranks_on_different_meshes(what: str) -> None:
    ranks.run_fresh(4, other_meshes, what)


def steps_in_steps() -> None:
    """An inner step has the ranks of the outer one; where it was made for others, that is an error."""
    rank, mesh = int(fdp.axis_index()), mesh_of((2, 2))
    x = torch.full((1,), 10.0**rank)
    for inner, group, due in (
        (fdp.data_parallel(lambda x: fdp.pmean(x), group=mesh), mesh, 1111 / 4),
        (fdp.data_parallel(lambda x: fdp.pmean(x)), mesh, 1111 / 4),
        (fdp.data_parallel(lambda x: fdp.pmean(x), group=mesh["local"]), mesh, None),
        (fdp.data_parallel(lambda x: fdp.pmean(x), group=mesh), mesh["local"], None),
    ):
        outer = fdp.data_parallel(lambda s, x, inner=inner: s + inner(x), group=group)
        if due is None:
            with pytest.raises(fdp.FdpError, match="was called inside a step on another group"):
                outer(torch.zeros(1), x)
        else:
            assert outer(torch.zeros(1), x).tolist() == [due]


def test_a_step_inside_a_step_on_other_ranks_is_refused() -> None:
    ranks.run(4, steps_in_steps)


def only_dimension() -> None:
    """The name of a mesh of one dimension stands for all its ranks."""
    mesh, rank = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), int(fdp.axis_index())
    step = fdp.data_parallel(lambda s, x: s + fdp.psum(x, axis="dp") * fdp.axis_size("dp"), group=mesh)
    assert step(torch.zeros(1), torch.full((1,), 10.0**rank)).tolist() == [4444.0]


def test_a_mesh_of_one_dimension() -> None:
    ranks.run(4, only_dimension)


def of_equal_meshes() -> list[bool]:
    """Which group a mesh stands for, where torch takes two meshes for equal."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    meshes = [DeviceMesh.from_group(group, "cpu") for group in groups]
    assert meshes[0] == meshes[1]
    own = [
        resolve_group(mesh).process_group is group for _ in range(2) for mesh, group in zip(meshes, groups, strict=True)
    ]
    states = [fdp.shard(torch.ones(64, 64), group=group) for group in groups]
    for group, state in zip(groups, states, strict=True):
        doubled, _ = fdp.data_parallel(lambda w, x: (w * 2, fdp.pmean(x)), group=group)(state, torch.ones(3))
        own.append(same_bits(fdp.unshard(doubled), torch.full((64, 64), 2.0)))
    return own


def test_equal_meshes_of_two_groups_are_two_groups() -> None:
    assert ranks.run(2, of_equal_meshes) == [[True] * 6] * 2
