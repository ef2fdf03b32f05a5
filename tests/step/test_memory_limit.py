"""Steps within a limit of memory: sharded state is gathered again for the backward pass, and the numbers stay."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bits import same_bits
from gather_choices import gather_again
from samples import ALL_SAMPLES, exhaustive
from sharded_steps import STEPS, all_differences
from torch import nn

import fdp
from fdp import pytree
from fdp.distributed.group import resolve_group
from fdp.step.memory_limit import MemoryLimit

WIDTH, LAYERS = 512, 6 if ALL_SAMPLES else 4


def layers(p: Any, x: torch.Tensor) -> torch.Tensor:
    for at in range(len(p)):
        x = torch.tanh(x @ p[f"w{at}"].t())
    return x


def state_of(layers: int = LAYERS) -> Any:
    generator = torch.Generator().manual_seed(0)
    params = {f"w{at}": torch.randn(WIDTH, WIDTH, generator=generator) / 24 for at in range(layers)}
    return {"params": params, "m": pytree.map_leaves(torch.zeros_like, params)}


def train(state: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    loss, grads = fdp.value_and_grad(lambda p: (layers(p, x) - x).square().mean())(state["params"])
    moved = pytree.map_leaves(lambda m, g: 0.9 * m + g, state["m"], grads)
    return {"params": pytree.map_leaves(lambda p, m: p - 0.1 * m, state["params"], moved), "m": moved}, fdp.pmean(loss)


def batch_of() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(int(fdp.axis_index())))


def run(compile: bool, limit_mb: float | None, **options: Any) -> tuple[Any, fdp.Step]:
    step = fdp.data_parallel(train, donate_argnums=0, compile=compile, memory_limit_mb=limit_mb, **options)
    state = fdp.shard(state_of())
    for _ in range(3):
        state, _ = step(state, batch_of())
    return fdp.unshard(state), step


def gathered_again(compile: bool) -> list[Any]:
    plain, step = run(compile, None)
    most = step.plan(fdp.shard(state_of()), batch_of()).memory().peak_bytes / 2**20
    within, step = run(compile, 0.8 * most)
    assert step.traces == 1
    plan = step.plan(fdp.shard(state_of()), batch_of())
    assert LAYERS < sum(link.kind == "gathered" for link in plan.trace.links) < 2 * LAYERS
    assert plan.memory().peak_bytes / 2**20 <= 0.8 * most
    same = [torch.equal(a, b) for a, b in zip(pytree.leaves_of(plain), pytree.leaves_of(within), strict=True)]
    return [all(same), [type(item).__name__ for item in plan.schedule].count("Start") == len(plan.buckets)]


def planned(x: torch.Tensor, again: bool = False, limit_mb: float | None = None) -> fdp.Plan:
    """A plan of eight layers."""
    with pytest.MonkeyPatch.context() as patch:
        if again:
            gather_again(patch)
        step = fdp.data_parallel(train, donate_argnums=0, bucket_cap_mb=1, memory_limit_mb=limit_mb)
        return step.plan(fdp.shard(state_of(8)), x)


def peak_mb(plan: fdp.Plan) -> float:
    return plan.memory().peak_bytes / 2**20


def limit_for(x: torch.Tensor) -> float:
    """A limit for which some values have to be gathered again, and not all."""
    return (peak_mb(planned(x)) + 2 * peak_mb(planned(x, again=True))) / 3


def as_few_as_fit() -> list[tuple[int, bool]]:
    """For limits from what the step takes down to the least: how many values are gathered, and whether it fits."""
    most, least, found = peak_mb(planned(batch_of())), peak_mb(planned(batch_of(), again=True)), []
    for share in (1.0, 0.5, 0.3, 0.0):
        limit_mb = least + share * (most - least)
        plan = planned(batch_of(), limit_mb=limit_mb)
        found.append((sum(link.kind == "gathered" for link in plan.trace.links), peak_mb(plan) <= limit_mb))
    return found


def test_no_more_is_gathered_again_than_the_limit_asks_for() -> None:
    for found in ranks.run(2, as_few_as_fit):
        counts = [count for count, _ in found]
        assert all(fits for _, fits in found) and counts == sorted(counts), found
        assert counts[0] == 8 and counts[-1] == 15 and len(set(counts)) == 4, found


def of_unequal_batches(chooses: bool) -> list[Any]:
    """Only the batch of rank 1 makes the step too large: both gather as much again."""
    long = torch.cat([batch_of()] * 160)
    limit_mb = limit_for(long)
    x = batch_of() if fdp.axis_index() == 0 else long
    assert (peak_mb(planned(x)) < limit_mb) == (fdp.axis_index() == 0)
    options: dict[str, Any] = {} if chooses else {"bucket_cap_mb": 1}
    step = fdp.data_parallel(train, donate_argnums=0, memory_limit_mb=limit_mb, **options)
    plain = fdp.data_parallel(train, donate_argnums=0, **options)
    state, other = fdp.shard(state_of(8)), fdp.shard(state_of(8))
    # Then a shorter batch, on one rank alone and on both: there is nothing to agree on again.
    for length in (len(x), len(x) - fdp.axis_index(), len(x) - 2, len(x)):
        state, _ = step(state, x[:length])
        other, _ = plain(other, x[:length])
    return [
        sum(link.kind == "gathered" for link in step.plan(state, x).trace.links),
        same_bits(fdp.unshard(state), fdp.unshard(other)),
    ]


@pytest.mark.parametrize("chooses", [False, True], ids=["caps", "chosen by cost"])
def test_ranks_with_unequal_batches_gather_alike(chooses: bool) -> None:
    one, two = ranks.run(2, of_unequal_batches, chooses)
    assert one == two and 8 < one[0] < 15 and one[1], (one, two)


def of_batches_that_change(chooses: bool) -> bool:
    """Short batches, then long ones, then one of each, on either rank: what was prepared for short ones is outdated."""
    short, long = batch_of(), torch.cat([batch_of()] * 160)
    limit_mb = limit_for(long)
    options: dict[str, Any] = {} if chooses else {"bucket_cap_mb": 1}
    step = fdp.data_parallel(train, memory_limit_mb=limit_mb, donate_argnums=0, **options)
    plain = fdp.data_parallel(train, donate_argnums=0, **options)
    state, other, rank = fdp.shard(state_of(8)), fdp.shard(state_of(8)), int(fdp.axis_index())
    for x in (short, long, (short, long)[rank], (long, short)[rank], short):
        state, _ = step(state, x)
        other, _ = plain(other, x)
    return same_bits(fdp.unshard(state), fdp.unshard(other))


@pytest.mark.parametrize("chooses", [False, True], ids=["caps", "chosen by cost"])
def test_ranks_may_have_any_mix_of_batches_that_they_have_prepared_for(chooses: bool) -> None:
    assert ranks.run(2, of_batches_that_change, chooses) == [True, True]


def buckets_of_batches_that_change(order: str) -> list[int]:
    """How many buckets whole state takes, for batches as `order` says: of both ranks, short or long."""
    lengths = {"s": 8, "l": 1600}
    generator = torch.Generator().manual_seed(0)
    params = {f"w{at}": torch.randn(256, 256, generator=generator) / 16 for at in range(16)}
    state = fdp.replicate({"params": params, "m": pytree.map_leaves(torch.zeros_like, params)})
    long = torch.randn(lengths["l"], 256, generator=generator)

    def peak_of(cap: float) -> float:
        return peak_mb(fdp.data_parallel(train, donate_argnums=0, bucket_cap_mb=cap).plan(state, long))

    limit_mb = (peak_of(1) + peak_of(25)) / 2
    # Messages that take long to start: by cost there is one.
    step = fdp.data_parallel(
        train,
        donate_argnums=0,
        memory_limit_mb=limit_mb,
        network=fdp.Network(latency_s=0.05, bandwidth_bytes_per_s=1e9),
    )
    found = []
    for both in order.split():
        x = long[: lengths[both[fdp.axis_index()]]]
        state, _ = step(state, x)
        found.append(len(step.plan(state, x).buckets))
    fdp.assert_replicated(state)
    return found


@pytest.mark.parametrize("order", ["ss ll sl ls ss", "sl ls ss ll"])
def test_ranks_keep_to_the_buckets_that_fit_on_all(order: str) -> None:
    one, two = ranks.run(2, buckets_of_batches_that_change, order)
    small = one[-1]
    expected = [1 if both == "ss" and not at else small for at, both in enumerate(order.split())]
    assert one == two == expected and small > 1


def of_two_groups() -> list[int]:
    """How many values are gathered, in the group where ranks have agreed on more, and in another one."""
    long = torch.cat([batch_of()] * 160)
    limit_mb = limit_for(long)
    step = fdp.data_parallel(train, memory_limit_mb=limit_mb, donate_argnums=0, bucket_cap_mb=1)
    x, found = (batch_of(), long)[int(fdp.axis_index())], []
    groups = None, dist.new_group([0, 1])
    states = [fdp.shard(state_of(8), group=among) for among in groups]
    step(fdp.shard(state_of(8)), x)
    for among, state in zip(groups, states, strict=True):
        flat, roles, _ = step._resolve((state, x), {})
        trace = step._preparation._trace_alone(flat, roles, resolve_group(among))
        found.append(sum(link.kind == "gathered" for link in trace.links))
    return found


def test_what_ranks_agree_on_belongs_to_their_group() -> None:
    """A group that is made anew may have ranks that know nothing of it."""
    one, two = ranks.run(2, of_two_groups)
    assert one == [two[0], 8] and two[0] == two[1] > 8


def one_rank_alone_cannot() -> list[str]:
    x = batch_of() if fdp.axis_index() == 0 else torch.cat([batch_of()] * 1000)
    step = fdp.data_parallel(train, memory_limit_mb=15, bucket_cap_mb=1)
    state, found = fdp.shard(state_of()), []
    for batch in (x, x, x[:4], x[:4]):
        try:
            step(state, batch)
            found.append("right")
        except fdp.FdpError as error:
            found.append(type(error).__name__)
    return found


def test_a_limit_that_one_rank_alone_cannot_meet_is_an_error_on_all_and_others_go_on() -> None:
    one, two = ranks.run(2, one_rank_alone_cannot)
    assert one == ["AgreementError"] * 2 + ["right"] * 2 and two == ["ArgumentError"] * 2 + ["right"] * 2


def tied_layers(p: Any, batch: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """A table that both passes read first and last."""

    def loss_fn(p: Any) -> torch.Tensor:
        ids = (batch.abs() * 10).long()[:, :4] % 512
        x = torch.tanh(F.embedding(ids, p["table"]).mean(1) @ p["w"])
        return F.cross_entropy(torch.tanh(x @ p["w"].t()) @ p["table"].t(), ids[:, 0])

    loss, grads = fdp.value_and_grad(loss_fn)(p)
    return pytree.map_leaves(lambda p, g: p - 0.1 * g, p, grads), fdp.pmean(loss)


def least_is_in_between() -> list[float]:
    """The peak for each number of values that are gathered again, and for the limit of the smallest of them."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"table": (512, 256), "w": (256, 256)}
    state = fdp.shard({name: torch.randn(shape, generator=generator) / 16 for name, shape in shapes.items()})
    x, peaks = torch.randn(8, 256, generator=generator), []
    for count in range(3):
        with pytest.MonkeyPatch.context() as patch:
            gather_again(patch, first=count)
            peaks.append(peak_mb(fdp.data_parallel(tied_layers, bucket_cap_mb=1).plan(state, x)))
    step = fdp.data_parallel(tied_layers, bucket_cap_mb=1, memory_limit_mb=min(peaks))
    return [*peaks, peak_mb(step.plan(state, x))]


def test_the_least_need_not_be_to_gather_all_again() -> None:
    *peaks, found = ranks.run(2, least_is_in_between)[0]
    assert min(peaks) < peaks[-1] and found == min(peaks), (peaks, found)


def buckets_of_unequal_batches() -> tuple[int, int]:
    """How many buckets each rank takes, where large ones are too much for rank 1 alone; and how many small ones are."""
    state, group = fdp.replicate(state_of()), resolve_group(None)
    x = torch.cat([batch_of()] * (1 if group.rank == 0 else 160))
    plan = fdp.data_parallel(train, bucket_cap_mb=25).plan(state, x)
    peaks = fdp.all_gather(torch.tensor([plan.memory().peak_bytes]))
    limit = MemoryLimit(int(peaks.max()) - 1, None)
    assert (plan.memory().peak_bytes > limit._limit_bytes) == (group.rank == 1)  # type: ignore[operator]
    return len(limit.within_on_all(plan, group).buckets), len(limit.smallest(plan.trace).buckets)


def test_ranks_with_unequal_batches_take_the_same_buckets() -> None:
    (one, small), (two, _) = ranks.run(2, buckets_of_unequal_batches)
    assert one == two == small > 1


def test_a_step_that_would_take_more_gathers_again_and_computes_the_same() -> None:
    assert ranks.run(2, gathered_again, False) == [[True, True]] * 2


@exhaustive
def test_a_compiled_step_does() -> None:
    assert ranks.run(2, gathered_again, True) == [[True, True]] * 2


def no_differences_where_it_is_gathered_again(names: list[str], some: bool) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        gather_again(patch, some)
        return all_differences(names, False)


@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.parametrize(
    "name", [name if name == "checkpointed" else pytest.param(name, marks=exhaustive) for name in STEPS]
)
def test_steps_of_all_kinds_may_gather_again(name: str, some: bool) -> None:
    assert ranks.run(2, no_differences_where_it_is_gathered_again, [name], some) == [[], []]


def test_few_values_are_whole_at_once() -> None:
    """Each message begins when the one before is there: of all matrices no more than two are whole at any time."""
    assert ranks.run(2, whole_at_once) == [2, 2]


def whole_at_once() -> int:
    with pytest.MonkeyPatch.context() as patch:
        gather_again(patch)
        _, step = run(False, 3.0 * LAYERS, bucket_cap_mb=1)
        plan = step.plan(fdp.shard(state_of()), batch_of())
    gathers = {b.index for b in plan.buckets if b.op == "all_gather"}
    found = plan.emit().memory.pieces
    pieces = [piece for piece in found if piece.bucket in gathers and piece.name.startswith("result")]
    assert len(pieces) == 2 * LAYERS - 1
    return max(sum(one.first <= at <= one.last for one in pieces) for at in range(max(p.last for p in pieces) + 1))


def too_much() -> list[str]:
    found = []
    for limit, state in ((1.0, fdp.shard(state_of())), (1.0, fdp.replicate(state_of()))):
        step = fdp.data_parallel(train, memory_limit_mb=limit)
        with pytest.raises(fdp.ArgumentError, match=r"'train' does not fit in memory_limit_mb=1\.") as caught:
            step(state, batch_of())
        found.append(str(caught.value).split("Remedy: ")[1])
        least = float(found[-1].split("=")[1].split(" ")[0])
        fdp.data_parallel(train, memory_limit_mb=least)(state, batch_of())
        with pytest.raises(fdp.ArgumentError, match="does not fit"):
            fdp.data_parallel(train, memory_limit_mb=least - 0.02)(state, batch_of())
    return found


def test_a_limit_that_cannot_be_met_names_the_least_that_can() -> None:
    for sharded, whole in ranks.run(2, too_much):
        assert "is the least that can be kept" in sharded and "shard state" not in sharded
        assert "shard state with fdp.shard" in whole


@pytest.mark.parametrize("limit", [0, -1, True, "2 GB", float("nan")])
def test_a_limit_is_a_positive_number(limit: Any) -> None:
    with pytest.raises(fdp.ArgumentError, match="memory_limit_mb="):
        fdp.data_parallel(train, memory_limit_mb=limit)


def test_a_copy_of_a_step_keeps_its_limit() -> None:
    import copy

    with pytest.raises(fdp.ArgumentError, match="does not fit in memory_limit_mb=1"):
        copy.copy(fdp.data_parallel(train, memory_limit_mb=1))(state_of(), batch_of())


def embedded(state: Any, ids: torch.Tensor) -> Any:
    """A table that is read forwards and backwards, and by a tied layer; and a norm that reads what was gathered."""

    def loss(p: Any) -> torch.Tensor:
        x = F.embedding(ids, p["table"])
        x = F.layer_norm(x @ p["w"], (64,))
        return F.cross_entropy(x @ p["table"].t(), ids) + torch.linalg.matrix_norm(p["w"], 2) * 1e-3

    grads = fdp.grad(loss)(state)
    return pytree.map_leaves(lambda p, g: p - 0.1 * g, state, grads), torch.linalg.matrix_norm(state["w"], 2)


def tied(again: bool, some: bool = False) -> list[Any]:
    torch.manual_seed(0)
    state = fdp.shard({"table": torch.randn(128, 64) / 8, "w": torch.randn(64, 64) / 8})
    with pytest.MonkeyPatch.context() as patch:
        if again:
            gather_again(patch, some)
        step = fdp.data_parallel(embedded)
        for _ in range(3):
            state, norm = step(state, torch.arange(10) * 7 % 128)
    return [*pytree.leaves_of(fdp.unshard(state)), norm]


def test_what_is_read_in_many_places_is_the_same() -> None:
    once = ranks.run(2, tied, False)[0]
    for some in (False, True):
        again = ranks.run(2, tied, True, some)[0]
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_a_world_of_one_takes_a_limit() -> None:
    module = nn.Linear(64, 64)
    apply, params, buffers = fdp.from_module(module)
    step = fdp.data_parallel(
        lambda p, x: pytree.map_leaves(
            lambda p, g: p - g, p, fdp.grad(lambda p: apply(p, buffers, x)[0].square().mean())(p)
        ),
        memory_limit_mb=1,
    )
    assert step(params, torch.ones(4, 64))["weight"].shape == (64, 64)
