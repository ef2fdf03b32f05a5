"""Ways to get a wrong number without an error that were found by trying; each is right now, or refused."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

import fdp

Tree = Any


@pytest.mark.parametrize(
    "slice_of",
    [
        lambda w, i: w.narrow(0, i, 1) * 1,
        lambda w, i: w.select(0, i) * 1,
        lambda w, i: w.as_strided((2,), (1,), i) * 1,
    ],
)
def test_a_slice_at_a_place_read_from_a_tensor_is_refused(slice_of: Any) -> None:
    step = fdp.data_parallel(lambda w, b: slice_of(w, b.sum().item()))
    with pytest.raises(fdp.TraceError):
        step(torch.arange(5.0), torch.tensor([1, 2]))


def test_an_anchor_in_the_memory_of_donated_state_is_refused() -> None:
    w0 = torch.ones(2)
    anchor = w0.detach()
    step = fdp.data_parallel(lambda st, b: {"w": st["w"] - 0.5 * (st["w"] - anchor + fdp.pmean(b))}, donate_argnums=0)
    with pytest.raises(fdp.PurityError, match=r"anchor lies in the memory of st\['w'\]"):
        step({"w": w0}, torch.ones(2))


def test_emitted_plans_look_at_shared_memory() -> None:
    step = fdp.data_parallel(
        lambda st, b: {"p": st["p"] + fdp.pmean(b), "t": st["t"] * 0.5 + st["p"]}, donate_argnums=0
    )
    emitted = step.plan({"p": torch.ones(2), "t": torch.ones(2)}, torch.ones(2)).emit()
    tied = torch.ones(2)
    with pytest.raises(fdp.ArgumentError, match="shares memory with another argument"):
        emitted({"p": tied, "t": tied}, torch.ones(2))
    out = step({"p": tied, "t": tied}, torch.ones(2))  # the Step itself traces anew
    assert out["p"].tolist() == [2, 2] and out["t"].tolist() == [1.5, 1.5]


@pytest.mark.parametrize("warm", [False, True])
def test_a_step_under_a_transform_is_refused(warm: bool) -> None:
    step = fdp.data_parallel(lambda w, b: (w**2).sum() + 0 * fdp.pmean(b.sum()))
    if warm:
        step(torch.ones(2), torch.ones(2))
    with pytest.raises(fdp.FdpError, match="was called inside"):
        torch.func.grad(lambda w: step(w, torch.ones(2)))(torch.ones(2))
    with pytest.raises(fdp.FdpError, match="was called inside"):
        torch.vmap(lambda w: step(w, torch.ones(2)))(torch.ones(3, 2))


def test_a_kept_leaf_that_was_resized_is_noticed() -> None:
    step = fdp.data_parallel(
        lambda st, b: ({"w": st["w"] + 1}, st["w"].sum() / st["w"].numel(), fdp.pmean(b)), donate_argnums=0
    )
    state = {"w": torch.ones(4)}
    for _ in range(2):
        state, _, _ = step(state, torch.ones(2))
    state["w"].resize_(2)
    assert step(state, torch.ones(2))[1].item() == 3.0


def test_a_generator_of_the_users_moves_on_by_one_draw() -> None:
    generator = torch.Generator().manual_seed(1)
    step = fdp.data_parallel(lambda w, b: fdp.pmean(w + torch.rand(2, generator=generator)))
    got = [step(torch.zeros(2), torch.ones(1)) for _ in range(3)]
    again = torch.Generator().manual_seed(1)
    assert all(torch.equal(g, torch.rand(2, generator=again)) for g in got)


def weighted_halves(dtype: torch.dtype) -> Tree:
    rank = dist.get_rank()
    x = torch.tensor(float(rank), dtype=dtype)
    big = fdp.pmean(torch.tensor(1.0, dtype=dtype), weight=100_000)
    return fdp.pmean(x, weight=[1.0, 100_000.0][rank]).item(), big.item(), fdp.pmean(x * 0 + 60000).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_exact_for_sixteen_bits(dtype: torch.dtype) -> None:
    expected = torch.tensor(100_000 / 100_001).to(dtype).item(), 1.0, torch.tensor(60000.0).to(dtype).item()
    assert ranks.run(2, weighted_halves, dtype) == [expected, expected]


def extremes(values: list[float]) -> Tree:
    x = torch.tensor(values[dist.get_rank()])
    step = fdp.data_parallel(lambda w, b: (fdp.pmax(b), fdp.pmin(b)))
    return [t.item() for t in (fdp.pmax(x), fdp.pmin(x), *step(torch.ones(1), x))]


def test_a_nan_of_any_rank_is_in_the_extremes() -> None:
    nan = float("nan")
    for values in ([nan, 1.0], [1.0, nan]):
        for result in ranks.run(2, extremes, values):
            assert all(x != x for x in result), result
    assert ranks.run(2, extremes, [-2.0, 3.0]) == [[3.0, -2.0, 3.0, -2.0]] * 2
    assert ranks.run(2, extremes, [-float("inf"), 3.0]) == [[3.0, -float("inf"), 3.0, -float("inf")]] * 2


def single_elements() -> Tree:
    """A tensor of one element is contiguous whatever its stride."""
    odd = (torch.arange(4.0) + dist.get_rank()).as_strided((1,), (4,), 3)
    assert odd.is_contiguous() and odd.stride() == (4,)
    fdp.assert_replicated(fdp.replicate(odd))
    return fdp.replicate(odd, root=1).item(), fdp.all_gather(odd).tolist(), fdp.broadcast(odd).item()


def test_a_single_element_with_any_stride_is_sent() -> None:
    assert ranks.run(2, single_elements) == [(4.0, [[3.0], [4.0]], 3.0)] * 2


def drifting(kind: str) -> Tree:
    rank = dist.get_rank()
    steps = {
        "number": lambda w, b: w * (1 + rank) + fdp.pmean(b),
        "branch": lambda w, b: (w + 1 if rank == 0 else w) + fdp.pmean(b),
        "made tensor": lambda w, b: w * torch.tensor([1.0 + rank, 2.0]) + fdp.pmean(b),
    }
    return refusal(lambda: fdp.data_parallel(steps[kind])(torch.ones(2), torch.ones(2)))


def refusal(call: Any) -> tuple[str, str]:
    try:
        call()
    except fdp.FdpError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("kind", ["number", "branch", "made tensor"])
def test_arithmetic_that_differs_between_ranks_is_refused(kind: str) -> None:
    for error, message in ranks.run(2, drifting, kind):
        assert error == "AgreementError"
        assert "test_attacks.py" in message


def two_closed_over() -> Tree:
    def scaled(value: float) -> Any:
        w = torch.full((3,), value)
        return lambda x: x * w

    f, g = scaled(1.0 + dist.get_rank()), scaled(2.0)
    step = fdp.data_parallel(lambda w, b: f(w) + g(w) + fdp.pmean(b))
    return refusal(lambda: step(torch.ones(3), torch.ones(3)))


def test_closed_over_tensors_of_one_name_are_all_compared() -> None:
    assert [error for error, _ in ranks.run(2, two_closed_over)] == ["ReplicationError"] * 2


def skips_a_bad_batch() -> Tree:
    @fdp.data_parallel
    def step(w: Tree, b: Tree) -> Tree:
        mean = fdp.pmean(b["x"].mean())
        h = torch.index_select(w, 0, b["i"]) * mean
        return w + fdp.pmean(h.sum()), fdp.psum(h.sum() * 2)

    w, bad, seen = torch.ones(2), 99, []
    for k in range(3):
        index = torch.tensor([bad if dist.get_rank() == 0 and k == 1 else 0])
        try:
            w, _ = step(w, {"x": torch.ones(2), "i": index})
        except IndexError:
            seen.append("IndexError")
        except fdp.PeerError as error:
            if dist.get_rank() == 0:
                expected = seen == ["IndexError"] and "was left in the middle by IndexError" in str(error)
                time.sleep(3)  # meanwhile the other rank learns of it
                os._exit(17 if expected else 18)
            return [*seen, str(error)]
    return seen


def test_a_rank_that_left_a_step_in_the_middle_stays_out() -> None:
    first, second = ranks.run_fresh(2, skips_a_bad_batch, deadline_s=60)
    assert first.exitcode == 17, first.describe()
    assert "rank 0 raised: IndexError" in str(second.value), second.describe()


def real_and_complex() -> Tree:
    x = torch.ones(3) * (1 + dist.get_rank())
    step = fdp.data_parallel(lambda w, b: fdp.pmean({"a": b.sum(), "c": b.sum() * (1 + 2j), "z": b * 1j}))
    out = step(torch.ones(1), x)
    return out["a"].item(), out["c"].item(), out["z"].tolist()


def test_complex_values_share_a_bucket_with_an_odd_number_of_real_ones() -> None:
    assert ranks.run(2, real_and_complex) == [(4.5, 4.5 + 9j, [1.5j, 1.5j, 1.5j])] * 2


def test_ranks_that_were_launched_and_not_joined_are_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="2 ranks were launched"):
        fdp.data_parallel(lambda w, b: w + fdp.pmean(b))(torch.ones(1), torch.ones(1))


def test_donated_state_that_autograd_goes_back_through_is_refused() -> None:
    leaf = torch.ones(2, requires_grad=True)
    step = fdp.data_parallel(lambda w, b: w + fdp.pmean(b), donate_argnums=0)
    with pytest.raises(fdp.TraceError, match="autograd may go back through it"):
        step(leaf * 2, torch.ones(2))
