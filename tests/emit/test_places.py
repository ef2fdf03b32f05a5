"""Values at fixed places: memory that steps share, and that no caller sees."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import optree
import pytest
import ranks
import torch
from bits import same_bits
from emitted_calls import poisoning
from fake_ranks import fake_group
from samples import ALL_SAMPLES, exhaustive

import fdp
from fdp.emit.memory import planning
from fdp.runtime import Emitted, arena

Tree = Any


def squares(state: Tree, batch: Tree) -> Any:
    loss, grads = fdp.value_and_grad(lambda p: ((batch @ p["a"]).relu() @ p["b"]).square().mean())(state)
    return optree.tree_map(lambda p, g: p - 0.1 * g, state, grads), fdp.pmean(loss)


def start(width: int = 8) -> Tree:
    generator = torch.Generator().manual_seed(width)
    return {"a": torch.randn(4, width, generator=generator), "b": torch.randn(width, 3, generator=generator)}


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the memory of a step with NaN before each call."""
    monkeypatch.setattr(arena.Arena, "fit", poisoning(arena.Arena.fit))


@pytest.mark.parametrize("donate", [(), 0])
def test_no_value_outlives_a_call_in_the_memory_of_a_step(donate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch)
    step = fdp.data_parallel(squares, donate_argnums=donate)
    state, other, losses = start(), start(), []
    for call in range(4):
        batch = torch.full((5, 4), float(call + 1))
        expected = squares(other, batch)
        state, loss = step(state, batch)
        losses.append((loss, expected[1]))
        other = expected[0]
        torch.testing.assert_close(state, other)
    for loss, wanted in losses:
        torch.testing.assert_close(loss, wanted)


def emitted_of(step: fdp.Step) -> list[Emitted]:
    return [known.emitted for known in step._known.values()]


def block_of(emitted: Emitted) -> torch.Tensor:
    (block,) = emitted.residence.blocks.values()
    return block


def test_what_is_returned_is_never_in_the_memory_of_the_step() -> None:
    def step(w: torch.Tensor, b: torch.Tensor) -> Any:
        y = (b @ w).relu()
        return y.sum(0), fdp.pmean(y)[:2], fdp.all_gather(b).mean(0), y.sum() * torch.ones(3)

    run = fdp.data_parallel(step, check_replication=False)
    outputs = run(torch.ones(4, 4), torch.ones(4, 4))
    inside = block_of(emitted_of(run)[0]).untyped_storage().data_ptr()
    assert all(output.untyped_storage().data_ptr() != inside for output in outputs)


def test_steps_share_memory_one_after_the_other() -> None:
    one, two = fdp.data_parallel(squares), fdp.data_parallel(squares)
    one(start(), torch.ones(5, 4))
    two(start(), torch.ones(5, 4))
    assert block_of(emitted_of(one)[0]) is block_of(emitted_of(two)[0])


def test_memory_grows_to_what_the_largest_step_needs_and_not_to_the_sum() -> None:
    step = fdp.data_parallel(squares)
    expected = {rows: squares(start(), torch.ones(rows, 4)) for rows in (3, 300, 30)}
    for rows in (3, 300, 30, 3, 300):
        torch.testing.assert_close(step(start(), torch.ones(rows, 4)), expected[rows])
    blocks = {id(block_of(emitted)) for emitted in emitted_of(step) if emitted.residence.blocks}
    assert len(blocks) == 1


def test_memory_goes_with_the_last_step_that_uses_it() -> None:
    import gc
    import weakref

    step = fdp.data_parallel(squares)
    step(start(77), torch.ones(5, 4))
    memory = weakref.ref(emitted_of(step)[0].residence.arena)
    assert memory() is not None
    shared = len(memory().tenants)  # type: ignore[union-attr]
    del step
    gc.collect()
    assert memory() is None or len(memory().tenants) < shared  # type: ignore[union-attr]


def test_threads_with_steps_of_their_own() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            step, state, other = fdp.data_parallel(squares, donate_argnums=0), start(seed + 3), start(seed + 3)
            for call in range(30):
                batch = torch.full((2 + (call * seed) % (7 if ALL_SAMPLES else 3), 4), 0.1 * (call % 5))
                other, wanted = squares(other, batch)
                state, loss = step(state, batch)
                torch.testing.assert_close((state, loss), (other, wanted))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_a_mean_is_divided_while_its_bucket_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    state, batch = start(), torch.ones(5, 4)
    step = fdp.data_parallel(squares, group=fake_group(2))
    plain = Emitted(step.plan(state, batch), fake_group(2))
    assert "alpha" not in plain.source
    monkeypatch.setattr(planning, "_SCALED_WHEN_PACKED_BYTES", 0)
    poisoned(monkeypatch)
    scaled = Emitted(step.plan(state, batch), fake_group(2))
    assert "beta=0, alpha=0.5" in scaled.source
    tensors = optree.tree_leaves((state, batch))
    assert same_bits(plain.dry_run(list(tensors)), scaled.dry_run(list(tensors)))


def test_of_several_results_the_one_that_is_averaged_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        out, mean, _ = torch.native_batch_norm(batch, state, None, None, None, True, 0.1, 1e-5)
        return fdp.pmean(mean), fdp.pmean(out.sum())

    monkeypatch.setattr(planning, "_SCALED_WHEN_PACKED_BYTES", 0)
    state, batch = torch.ones(8), torch.arange(32.0).view(4, 8)
    emitted = Emitted(fdp.data_parallel(step, group=fake_group(2)).plan(state, batch), fake_group(2))
    expected = torch.native_batch_norm(batch, state, None, None, None, True, 0.1, 1e-5)
    mean, total = emitted.dry_run([state, batch])
    assert same_bits((mean, total), (expected[1], expected[0].sum()))
    assert "native_batch_norm_result1, 0.5" in emitted.source


def test_gradients_are_computed_in_their_bucket() -> None:
    plan = fdp.data_parallel(squares, group=fake_group(2)).plan(start(), torch.ones(5, 4))
    source = Emitted(plan, fake_group(2)).source
    body = source[source.index("inputs.clear()") :]
    filling = body[: body.rindex("start(")].replace("aten_copy_(slot0_0, mean)", "")  # the loss: mean has no form
    assert "copy_" not in filling


def test_step_counts_are_counted_up_at_once() -> None:
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=0.1, fused=True)
    state, other = start(), start()
    opt, other_opt = optimizer.init(state), optimizer.init(other)
    step = fdp.data_parallel(lambda s, g: optimizer.update(g, s[1], s[0]), batch_argnums=(), donate_argnums=0)
    for _ in range(3):
        grads = optree.tree_map(torch.ones_like, other)
        other, other_opt = optimizer.update(grads, other_opt, other)
        state, opt = step((state, opt), grads)
        assert same_bits((state, opt), (other, other_opt))
    assert "_foreach_add__List" in emitted_of(step)[0].source


def both_ways(step: Any, state: Tree, batch: Tree, calls: int = 2, **options: Any) -> Emitted:
    """Calls a step on poisoned memory, compares it with the function that it was made from, and looks for leaks."""
    transform = fdp.data_parallel(step, check_trace=False, **options)
    with pytest.MonkeyPatch.context() as patch:
        poisoned(patch)
        kept = []
        for _ in range(calls):
            expected = step(state, batch)
            found = transform(state, batch)
            assert same_bits(found, expected), f"{found}\n{expected}"
            kept.append((found, expected))
        (emitted,) = emitted_of(transform)
        memory = {block.untyped_storage().data_ptr() for block in emitted.residence.blocks.values()}
        for found, expected in kept:
            assert same_bits(found, expected), "an earlier result was changed"
            for leaf in optree.tree_leaves(found):
                assert leaf.untyped_storage().data_ptr() not in memory, "a result is in the memory of the step"
    return emitted


def test_the_second_of_two_operators_with_several_results_is_returned() -> None:
    # The graph calls it by the name of the first and a number.
    def step(s: torch.Tensor, b: torch.Tensor) -> Any:
        first = torch.nn.functional.max_pool2d(s * 2, 2)
        second = torch.nn.functional.max_pool2d(s * 3, 2)
        return first.sum() * 2, second, fdp.pmean(b.sum())

    both_ways(step, torch.randn(2, 3, 4, 4), torch.ones(3))


def test_lists_of_conjugate_views_keep_the_memory_that_they_look_at() -> None:
    def step(s: torch.Tensor, b: torch.Tensor) -> Any:
        x = torch.view_as_complex(b * 2)
        u, v = x.conj().unbind(0)
        a = u.resolve_conj() * 1
        a2 = a * s
        return fdp.pmean((a2 + a).sum() + v @ s)

    both_ways(step, torch.randn(64, dtype=torch.complex64), torch.randn(2, 64, 2))


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), 2.5])
def test_large_tensors_full_of_a_number(value: float) -> None:
    def step(s: torch.Tensor, b: torch.Tensor) -> Any:
        mask = torch.full((300, 300), value).triu(1)
        return fdp.pmean((b @ s + mask).softmax(-1).nan_to_num()), (torch.full_like(s, value) + s).isfinite() * 1.0

    both_ways(step, torch.randn(300, 300), torch.randn(300, 300))


def test_operators_that_are_called_as_the_program_calls_its_own() -> None:
    with torch.library._scoped_library("fdp_test_names", "DEF") as library:
        for name in ("start", "wait", "inputs"):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: x + 1, "CompositeExplicitAutograd")
            torch.library.register_fake(f"fdp_test_names::{name}", torch.empty_like, lib=library)

        def step(s: torch.Tensor, b: torch.Tensor) -> Any:
            operators = torch.ops.fdp_test_names
            return fdp.pmean(operators.start(operators.wait(operators.inputs(b * s))) * 2)

        emitted = both_ways(step, torch.ones(3), torch.ones(3))
        assert "def step(inputs_, start_, wait_" in emitted.source


def test_a_default_device_around_the_first_call_changes_nothing() -> None:
    optimizer = fdp.optim.from_torch(torch.optim.Adam, lr=0.1)
    state = start()
    opt = optimizer.init(state)
    step = fdp.data_parallel(
        lambda s, g: (optimizer.update(g, s[1], s[0]), fdp.per_rank(fdp.axis_index())),
        batch_argnums=(),
        check_trace=False,
    )
    grads = optree.tree_map(torch.ones_like, state)
    with torch.device("meta"):
        found = step((state, opt), grads)
    assert same_bits(found[0], optimizer.update(grads, opt, state))
    assert found[1].item() == 0


# --- on real ranks -----------------------------------------------------------------------------------


def profiled() -> list[str]:
    step = fdp.data_parallel(squares, bucket_cap_mb=1e-6)
    step(start(), torch.ones(5, 4))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(start(), torch.ones(5, 4))
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("fdp: ")]


def test_a_profiler_shows_the_buckets_by_name() -> None:
    for names in ranks.run(2, profiled):
        assert sorted(names) == sorted(
            f"fdp: bucket {index} {what}: mean of {size} float32, {label}"
            for index, size, label in ((0, "4 B", "pmean"), (1, "96 B", "p['b']"), (2, "128 B", "p['a']"))
            for what in ("starts", "is waited for")
        )
        assert names.index(next(n for n in names if "bucket 2 starts" in n)) < names.index(
            next(n for n in names if "bucket 1 is waited for" in n)
        )


def test_a_large_complex_mean_is_divided_as_real_numbers() -> None:
    """As complex numbers 1/N times what is infinite would be NaN. The faster program passes its proof."""
    step = fdp.data_parallel(lambda s, x: s + fdp.pmean(x + x), group=fake_group(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        emitted = step.plan(*[torch.zeros(150_000, dtype=torch.complex64)] * 2).emit(fake_group(2))
    assert emitted.program.scaled
    value = torch.complex(torch.randn(150_000), torch.randn(150_000))
    assert torch.equal(emitted.dry_run([torch.zeros_like(value), value]), value * 2)


def large_means(seed: int) -> None:
    """Buckets of more than 1 MiB, with gradients from products, sums, embeddings and two of these together."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    params = {
        "e": torch.randn(600, 400, generator=generator, dtype=torch.float64),
        "w": torch.randn(400, 400, generator=generator, dtype=torch.float64) / 20,
        "b": torch.randn(400, generator=generator, dtype=torch.float64),
    }

    def loss_fn(p: Tree, ids: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.embedding(ids, p["e"])
        return torch.nn.functional.cross_entropy((x @ p["w"] + p["b"]).tanh() @ p["e"].T, ids)

    @fdp.data_parallel(donate_argnums=0)
    def step(p: Tree, ids: torch.Tensor) -> Any:
        loss, grads = fdp.value_and_grad(loss_fn)(p, ids)
        return optree.tree_map(lambda w, g: w - 0.5 * g, p, grads), fdp.pmean(loss)

    own = optree.tree_map(torch.clone, params)
    for call in range(3):
        shards = [torch.randint(600, (16,), generator=generator) for _ in range(world)]
        each = []
        for shard in shards:
            leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
            loss = loss_fn(leaves, shard)
            each.append(
                (loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)))
            )
        params = {k: v - 0.5 * sum(grads[k] for _, grads in each) / world for k, v in params.items()}
        own, mean = step(own, shards[rank])
        torch.testing.assert_close(own, params, rtol=1e-12, atol=1e-12, msg=lambda m, c=call: f"call {c}: {m}")
        torch.testing.assert_close(mean, sum(loss for loss, _ in each) / world)
    fdp.assert_replicated(own)
    (emitted,) = emitted_of(step)
    assert emitted.program.scaled, "no bucket was large enough"
    assert f"alpha={1 / world!r}" in emitted.source


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=exhaustive)])
def test_large_buckets_are_divided_as_they_are_filled(world: int) -> None:
    ranks.run(world, large_means, 5)
