"""The comparison of an emitted step with the step itself: as strict in pieces as on the whole, with little memory."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from samples import some

import fdp
from fdp.compare import leaves
from fdp.errors import TraceError


def gap_of_the_whole(one: torch.Tensor, two: torch.Tensor) -> tuple[float, float]:
    """What `gap_of` computes, element by element."""
    pairs = list(zip(one.flatten().tolist(), two.flatten().tolist(), strict=True))
    if all(a == b or (a != a and b != b) for a, b in pairs):
        return 0.0, 1.0
    if not (two.is_floating_point() or two.is_complex()):
        return 1.0, 1.0
    for a, b in pairs:
        finite = [math.isfinite(abs(value)) for value in (a, b)]
        if finite[0] != finite[1] or (not finite[0] and not (a == b or (a != a and b != b))):
            return math.inf, 0.0
    known = [(abs(a - b), abs(b)) for a, b in pairs if math.isfinite(abs(b))]
    return max(d for d, _ in known), max(size for _, size in known)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool])
@pytest.mark.parametrize("numel", [0, 1, 3, 4, 11])
def test_pieces_are_compared_like_the_whole(monkeypatch: Any, dtype: torch.dtype, numel: int) -> None:
    monkeypatch.setattr(leaves, "_PIECE", 4)
    generator = torch.Generator().manual_seed(numel)
    special = [math.nan, math.inf, -math.inf]
    for trial in range(60):
        two = (torch.randn(numel, generator=generator, dtype=torch.float64) * 3).to(dtype)
        one = two.clone()
        for place in torch.randint(max(numel, 1), (trial % 4,), generator=generator).tolist()[: numel and None]:
            changed = [one, two, (one, two)][trial % 3]
            for tensor in changed if isinstance(changed, tuple) else (changed,):
                tensor[place] = special[(trial + place) % 3] if dtype.is_floating_point and trial % 2 else place + 1
        # The difference of two float32 numbers is taken as one, and is off by half a unit in its last place.
        rel = 2**-23 if dtype is torch.float32 else 1e-12
        assert leaves.gap_of(one, two) == pytest.approx(gap_of_the_whole(one, two), rel=rel)
        assert leaves.gap_of(one.view(1, -1).t(), two.view(1, -1).t()) == leaves.gap_of(one, two)


@pytest.mark.parametrize(("one", "two"), list(itertools.permutations([math.nan, math.inf, -math.inf, 2.0], 2)))
def test_what_is_not_finite_must_be_the_same(one: float, two: float) -> None:
    values = torch.tensor([1.0, one]), torch.tensor([1.5, two])
    assert leaves.gap_of(*values) == gap_of_the_whole(*values) == (math.inf, 0.0)


def test_a_difference_in_the_last_element_of_a_large_output_is_found() -> None:
    count = itertools.count()

    @fdp.data_parallel
    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        frozen = float(next(count))
        return torch.cat([state, state[-1:] + frozen]), fdp.pmean(batch.sum())

    with pytest.raises(TraceError, match=r"output\[0\]: \[2097155\] torch.float32 differs by 1, where the largest"):
        step(torch.ones(2**21 + 2), torch.ones(2))


_TURNS = [(1, 2), (1, 2, 2), (1, 1, 2), (1, 2, 1), (1, 2, 2, 1), (1, 2, 3), (1, 2, 2, 1, 2)]


@pytest.mark.parametrize(("values", "compile"), [*((values, False) for values in _TURNS), (_TURNS[0], True)])
def test_a_step_that_takes_turns_is_refused(values: tuple[int, ...], compile: bool) -> None:
    turns = itertools.cycle(values)

    @fdp.data_parallel(compile=compile)
    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        return state * next(turns) + fdp.pmean(batch.sum())

    with pytest.raises(TraceError, match=r"iterators that the step itself moves on"):
        for _ in range(2):
            step(torch.ones(3), torch.ones(2))


def test_a_user_sees_the_mistake_of_his_own_that_only_values_show() -> None:
    @fdp.data_parallel
    def step(table: torch.Tensor, batch: torch.Tensor) -> Any:
        return fdp.pmean(table[batch].sum())

    with pytest.raises(IndexError, match="index 5 is out of bounds"):
        step(torch.ones(3), torch.tensor([5]))


@pytest.mark.parametrize(("donated", "states"), some([(True, 2), (False, 3)]))
def test_the_check_holds_few_states_at_a_time(donated: bool, states: int) -> None:
    # 20 leaves of 1 MiB, one of which is at work at a time.
    state = {str(i): torch.ones(2**18) for i in range(20)}

    @fdp.data_parallel(donate_argnums=(0,) if donated else ())
    def step(state: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
        return {name: leaf * fdp.pmean(batch.mean()) for name, leaf in state.items()}

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(state, torch.full((2,), 3.0))
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert states - 0.5 < peak / (20 * 2**20) < states + 0.5
