"""Uneven data on real ranks: one process with all samples is the oracle, and no lengths make a rank wait for ever."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import ALL_SAMPLES, exhaustive
from torch import Tensor
from uneven import DOUBLE, Batches, broken, data, loss_of, of_the_gradients, start

import fdp


def together(shards: list[Batches]) -> Batches:
    """The batches of one process: the samples that all ranks have in the same step."""
    zipped = itertools.zip_longest(*shards)
    return [{k: torch.cat([b[k] for b in step if b is not None]) for k in ("x", "y")} for step in zipped]


LENGTHS = [(), (1,), (2, 3), (1, 1, 1, 4), (0, 2)]


def go_through(cases: list[tuple[tuple[int, ...], ...]]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for sizes in cases:
        shards = data(sizes)
        got = list(fdp.join(iter(shards[rank])))
        assert len(got) == max(map(len, sizes)), sizes
        for at, (batch, weight) in enumerate(got):
            own = sizes[rank]
            assert weight.dtype == DOUBLE and weight.shape == ()
            assert weight.item() == (own[at] if at < len(own) else 0)
            first = next(r for r in range(world) if sizes[r])
            expected = shards[rank][min(at, len(own) - 1)] if own else shards[first][0]
            assert torch.equal(batch["x"], expected["x"]) and torch.equal(batch["y"], expected["y"])


def test_every_rank_goes_on_until_the_last_has_run_out() -> None:
    ranks.run(2, go_through, list(itertools.product(LENGTHS, LENGTHS)))


@exhaustive
def test_three_ranks_too() -> None:
    ranks.run(3, go_through, list(itertools.product(LENGTHS, repeat=3)))


def with_numbers() -> None:
    rank = dist.get_rank()
    scales = [torch.tensor(2.0), torch.tensor(3), torch.tensor(True), fdp.random.key(5)]
    batches = [{"x": torch.full((2, 3), float(rank)), "scale": scale} for scale in scales[: 4 - rank]]
    for at, (batch, weight) in enumerate(fdp.join(iter(batches))):
        assert weight.item() == (2 if at < len(batches) else 0)
        assert batch["scale"] is batches[min(at, len(batches) - 1)]["scale"]


def test_batches_may_hold_numbers() -> None:
    ranks.run(2, with_numbers)


# --- training ------------------------------------------------------------------------------------------------------


def in_the_loss(state: dict[str, Tensor], batch: Any) -> Any:
    def loss_fn(params: dict[str, Tensor]) -> Tensor:
        return fdp.pmean(loss_of(params, batch[0]), weight=batch[1])

    loss, grads = fdp.value_and_grad(loss_fn)(state)
    return {k: p - 0.5 * grads[k] for k, p in state.items()}, loss


def accumulated(state: dict[str, Tensor], batch: Any) -> Any:
    """Weights outside of what is averaged once, at the end."""
    share = batch[1] * fdp.axis_size() / fdp.psum(batch[1])
    grad_fn = fdp.accumulate(fdp.value_and_grad(lambda params, own: share * loss_of(params, own)), microbatches=2)
    loss, grads = grad_fn(state, batch[0])
    return {k: p - 0.5 * grads[k] for k, p in state.items()}, fdp.pmean(loss)


BOTH = in_the_loss, of_the_gradients


def train(shards: list[Batches], padding: str, step_fns: Sequence[Any] = BOTH) -> None:
    for step_fn in step_fns:
        step = fdp.data_parallel(step_fn, bucket_cap_mb=1)
        state, losses = start(), []
        for batch in fdp.join(shards[dist.get_rank()], padding=padding):
            state, loss = step(state, batch)
            losses.append(loss)
        fdp.assert_replicated((state, losses))

        expected, expected_losses = start(), []
        for whole in together(shards):
            grads, loss = torch.func.grad_and_value(loss_of)(expected, whole)
            expected = {k: p - 0.5 * grads[k] for k, p in expected.items()}
            expected_losses.append(loss)
        torch.testing.assert_close((state, losses), (expected, expected_losses), rtol=1e-12, atol=1e-12)


UNEVEN = [((4, 4, 1), (5,)), ((), (2, 3)), ((3, 3), (3, 3, 2)), ((2, 0), (1, 1, 1))]


def train_all() -> None:
    one, other = ([BOTH] * 2) if ALL_SAMPLES else (BOTH[:1], BOTH[1:])  # by turns
    for at, sizes in enumerate(UNEVEN):
        train(data(sizes), "last", other if at % 2 else one)
    train(data(((4, 4, 2), (6,))), "last", [accumulated])
    train(data(UNEVEN[0]), "empty", other)  # the mean of no samples is NaN, and weighs nothing
    train(data(UNEVEN[1]), "empty", one)


def test_training_is_that_of_one_process_with_all_samples() -> None:
    ranks.run(2, train_all)


def count_traces() -> int:
    traced = 0

    def step_fn(state: dict[str, Tensor], batch: Any) -> Any:
        nonlocal traced
        traced += 1
        return of_the_gradients(state, batch)

    step, state = fdp.data_parallel(step_fn, check_trace=False), start()
    for batch in fdp.join(data(((4, 4, 4, 4), (4, 4)))[dist.get_rank()]):
        state, _ = step(state, batch)
    return traced


def test_a_batch_that_is_repeated_is_not_traced_again() -> None:
    assert ranks.run(2, count_traces) == [1, 1]


def normalised() -> None:
    """Synchronised BatchNorm counts samples, not weights: `padding="empty"`, or `active=`, keeps it right."""
    shards = data(((4, 3), (2,)))
    module = torch.nn.SyncBatchNorm(3, affine=False, dtype=DOUBLE)
    apply, _, buffers = fdp.from_module(module)

    @fdp.data_parallel
    def by_the_module(state: Any, batch: Any) -> Any:
        return apply({}, state, batch[0]["x"])[1]

    @fdp.data_parallel
    def by_the_function(state: Any, batch: Any) -> Any:
        _, mean, var = fdp.sync_batch_norm(batch[0]["x"], state["running_mean"], state["running_var"], active=batch[1])
        return {"running_mean": mean, "running_var": var, "num_batches_tracked": state["num_batches_tracked"] + 1}

    for step, padding in ((by_the_module, "empty"), (by_the_function, "last"), (by_the_function, "empty")):
        state = buffers
        oracle = torch.nn.BatchNorm1d(3, affine=False, dtype=DOUBLE)
        for batch, whole in zip(fdp.join(shards[dist.get_rank()], padding=padding), together(shards), strict=True):
            state = step(state, batch)
            oracle(whole["x"])
            torch.testing.assert_close(state, dict(oracle.named_buffers()))


def test_synchronised_batch_norm_over_uneven_data() -> None:
    ranks.run(2, normalised)


def weights_of_zero() -> None:
    rank = dist.get_rank()
    for bad in (float("nan"), float("inf"), -float("inf")):
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            x = torch.tensor([bad, 7.0] if rank else [1.0, 2.0], dtype=dtype)
            for weight in (torch.tensor(3.0 * (1 - rank)), 3 * (1 - rank)):
                assert fdp.pmean(x, weight=weight).tolist() == [1.0, 2.0]
        value, w = torch.tensor([bad, 2.0][1 - rank], requires_grad=True), torch.tensor(1.0 - rank, requires_grad=True)
        fdp.pmean(value, weight=w).backward()
        assert value.grad.item() == (0.0 if rank else 2.0)  # both ranks send back one
        assert w.grad.isfinite()
    # The derivative with respect to a weight is there where the weight is zero, too: (x - mean) / sum of weights.
    value, w = torch.tensor(5.0 + rank), torch.tensor(1.0 - rank, requires_grad=True)
    fdp.pmean(value, weight=w).backward()
    assert w.grad.item() == 2 * (value.item() - 5.0)


def test_a_rank_without_weight_adds_nothing_whatever_it_holds() -> None:
    ranks.run(2, weights_of_zero)


# --- a world of one ------------------------------------------------------------------------------------------------


def test_in_a_world_of_one_each_batch_comes_with_its_count() -> None:
    batches = data(((3, 1, 0),))[0]
    got = list(fdp.join(batches))
    assert [weight.item() for _, weight in got] == [3, 1, 0] and all(
        a is b for (a, _), b in zip(got, batches, strict=True)
    )
    tokens = [weight.item() for _, weight in fdp.join(batches, count=lambda batch: batch["x"].sum())]
    assert tokens == [batch["x"].sum().item() for batch in batches]
    assert list(fdp.join([])) == []
    with pytest.raises(OSError):
        list(fdp.join(broken(batches, 1, OSError())))
    used = iter(batches)
    next(fdp.join(used))
    assert len(list(used)) == 2  # alone, nothing is fetched ahead


@pytest.mark.parametrize(
    ("batches", "options", "text"),
    [
        ([], {"padding": "zeros"}, r"padding='zeros'.\nRemedy: pass \"last\" or \"empty\"."),
        ([], {"count": 3}, "a count of type int"),
        ([torch.ones(())], {}, "a Tensor without a tensor of one dimension or more"),
        ([{"n": 3}], {}, "a dict without a tensor"),
        ([torch.ones(2)], {"count": lambda _: -1}, "returned -1.0"),
        ([torch.ones(2)], {"count": lambda _: float("nan")}, "returned nan"),
    ],
)
def test_what_has_no_meaning_is_refused(batches: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(fdp.ArgumentError, match=text):
        list(fdp.join(batches, **options))


def test_it_is_for_loops_outside_of_steps() -> None:
    def step(state: Any, batch: Any) -> Any:
        return [fdp.pmean(b) for b, _ in fdp.join([batch])]

    with pytest.raises(fdp.FdpError, match=r"fdp\.join was called inside a step"):
        fdp.data_parallel(step)(torch.ones(1), torch.ones(1))
