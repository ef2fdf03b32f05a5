"""The search for the best cuts into buckets: against every way to cut a chain of gradients."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from samples import examples, some

import fdp
from fdp.plan.cost.ticks import Ticks
from fdp.plan.search.chain import Chain, Fixed
from fdp.plan.search.layers import Layers
from fdp.plan.search.optimum import best_cuts
from fdp.plan.simulate import SimulatedLanes


def drawn_chain(rng: random.Random, count: int, slowdown: float) -> tuple[Chain, Ticks]:
    """A chain with up to two buckets of other kinds, all in small whole numbers, in which everything happens."""
    most = rng.choice([10, 100, 1000, 10000])

    def time(nothing: float = 0.3) -> float:
        return 0.0 if rng.random() < nothing else float(rng.randint(0, most))

    after = sorted(rng.randint(0, count) for _ in range(rng.choice([0, 0, 1, 2])))
    ready, fixed, latest = list[float](), list[Fixed](), 0.0
    for link in range(count + 1):
        for _ in range(after.count(link)):
            latest, whole = latest + time(), time()
            fixed.append(Fixed(link, latest, time(), whole, float(rng.randint(0, int(whole))), rng.random() < 0.7))
        if link < count:
            latest += time()
            ready.append(latest)
    read = [rng.random() < 0.8 for _ in range(count)]
    tail = [[0.0] * (len(fixed) + 1) for _ in range(count + 1)]
    for link, event in itertools.product(range(count + 1), range(len(fixed) + 1)):
        if link + event and (not link or read[link - 1]) and (not event or fixed[event - 1].read):
            tail[link][event] = time() if not link or not event or rng.random() < 0.1 else 0.0
    for row in tail:
        row[:] = itertools.accumulate(row)
    for above, row in itertools.pairwise(tail):
        row[:] = [a + b for a, b in zip(above, row, strict=True)]
    rate = rng.choice([0.0, 0.3, 1.0, 3.0])
    on_link = tuple(float(round(rng.randint(1, most) * rate)) for _ in range(count))
    pack, floors = tuple(time(0.5) for _ in range(count)), (0,) * count
    chain = Chain(tuple(range(count)), "mean", tuple(ready), pack, on_link, tuple(read), floors, tuple(fixed),
                  latest + time(), tuple(tuple(row) for row in tail), True)  # fmt: skip
    start = time() // rng.choice([1, 10])
    return chain, Ticks((), start, (), (), {"mean": time()}, rng.choice([1, 1, 2, 4]), slowdown, False)


def end_of_chain(chain: Chain, ticks: Ticks, ends: tuple[int, ...]) -> float:
    """When a step ends that is cut so: both lanes, one thing after the other."""
    clock, work, sent = SimulatedLanes(ticks), 0.0, list[tuple[float, int, int, bool]]()
    begin, fixed = 0, 0
    for end in (*ends, None):
        while fixed < len(chain.fixed) and (end is None or chain.fixed[fixed].after < end):
            other = chain.fixed[fixed]
            clock.compute(other.ready - work)
            clock.compute(other.packing)
            work, start = other.ready, max(clock.now, clock.free)
            clock.free, clock.busy = start + other.occupied, max(clock.busy, start + other.whole)
            sent.append((start + other.whole, begin, fixed, other.read))
            fixed += 1
        if end is None:
            break
        clock.compute(chain.ready[end - 1] - work)
        clock.compute(ticks.start + sum(chain.pack[begin:end]))
        work, start = chain.ready[end - 1], max(clock.now, clock.free)
        whole, occupied = ticks.message("mean", sum(chain.on_link[begin:end]))
        clock.free, clock.busy = start + occupied, max(clock.busy, start + whole)
        sent.append((start + whole, begin, fixed, any(chain.read[begin:end])))
        begin = end
    clock.compute(chain.body - work)
    finished = 0.0
    for done, links, others, read in sent:
        if read:
            clock.compute(max(chain.tail[links][others] - finished, 0.0))
            finished = max(finished, chain.tail[links][others])
            clock.now = max(clock.now, done)
    clock.compute(chain.tail[-1][-1] - finished)
    return max(clock.now, *(done for done, _, _, _ in sent))


def ways_to_cut(count: int) -> list[tuple[int, ...]]:
    return [
        (*(k for k, cut in enumerate(cuts, 1) if cut), count)
        for cuts in itertools.product([False, True], repeat=count - 1)
    ]


@examples(1500, by_default=200)
@given(st.integers(0, 2**32), st.integers(1, 8))
def test_the_search_finds_the_earliest_end(seed: int, count: int) -> None:
    chain, ticks = drawn_chain(random.Random(seed), count, 0.0)
    best = min(end_of_chain(chain, ticks, ends) for ends in ways_to_cut(count))
    found = best_cuts(chain, ticks, math.inf)
    assert found.proven
    assert found.end == best == end_of_chain(chain, ticks, found.ends)
    # A bound keeps what is below it, and nothing else.
    assert best_cuts(chain, ticks, best + 1).end == best
    assert best_cuts(chain, ticks, best).ends == ()


@examples(1500, by_default=200)
@given(st.integers(0, 2**32), st.integers(1, 9))
def test_layer_by_layer_the_earliest_end_is_found(seed: int, count: int) -> None:
    chain, ticks = drawn_chain(random.Random(seed), count, 0.0)
    assume(not chain.fixed)
    best = min(end_of_chain(chain, ticks, ends) for ends in ways_to_cut(count))
    layers, bound = Layers(chain, ticks), math.inf
    while (found := layers.before(bound)) is not None:
        assert found[1] == end_of_chain(chain, ticks, found[0]) < bound
        bound = found[1]
    assert bound == best and not layers.gave_up


def test_a_search_that_gives_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, ticks = long_chain(300, random.Random(0), 4e6, 1.0, 1e5)
    assert best_cuts(chain, ticks, math.inf).proven
    monkeypatch.setattr(fdp.plan.search.layers, "_MOST_STEPS", 1000)
    found = best_cuts(chain, ticks, math.inf)
    assert not found.proven and found.end == end_of_chain(chain, ticks, found.ends)


@examples(100)
@given(st.integers(0, 2**32), st.integers(1, 7), st.sampled_from([0.1, 0.5]))
def test_the_search_knows_what_it_has_not_proven(seed: int, count: int, slowdown: float) -> None:
    chain, ticks = drawn_chain(random.Random(seed), count, slowdown)
    best = min(end_of_chain(chain, ticks, ends) for ends in ways_to_cut(count))
    found = best_cuts(chain, ticks, math.inf)
    assert found.end == pytest.approx(end_of_chain(chain, ticks, found.ends), rel=1e-9)
    assert found.end >= best - 1e-6
    if found.proven:
        assert found.end == pytest.approx(best, rel=1e-9)


def long_chain(count: int, rng: random.Random, work: float, rate: float, latency: float) -> tuple[Chain, Ticks]:
    """As many gradients as a large model has, with sizes like theirs."""
    sizes = [rng.choice([256, 1024, 65536, 2**20, 2**22]) for _ in range(count)]
    ready = itertools.accumulate([float(round(work * rng.random())) for _ in sizes])
    tail = itertools.accumulate([float(round(size / 1000)) for size in sizes], initial=0.0)
    body = tuple(ready)
    chain = Chain(tuple(range(count)), "mean", body, (0.0,) * count, tuple(float(round(s * rate)) for s in sizes),
                  (True,) * count, (0,) * count, (), body[-1], tuple((t,) for t in tail), True)  # fmt: skip
    return chain, Ticks((), 20_000.0, (), (), {"mean": latency}, 2, 0.0, False)


def capped(chain: Chain, cap: float) -> tuple[int, ...]:
    """Cuts by a fixed cap."""
    ends, size = list[int](), 0.0
    for link, on_link in enumerate(chain.on_link):
        if size and size + on_link > cap:
            ends.append(link)
            size = 0.0
        size += on_link
    return (*ends, len(chain.on_link))


@pytest.mark.parametrize("work", some([1e4, 1e6, 4e6]))
@pytest.mark.parametrize("latency", some([1e4, 1e6]))
def test_a_thousand_gradients_are_few_ways(work: float, latency: float) -> None:
    chain, ticks = long_chain(1000, random.Random(3), work, 1.0, latency)
    found = best_cuts(chain, ticks, math.inf)
    # Trying every end for every begin would be 500,000 buckets, for one way to come to each.
    assert found.tried < 100_000
    assert found.proven
    assert found.end == end_of_chain(chain, ticks, found.ends)
    for cap in (1e6, 5e6, 25e6, 1e8):
        assert found.end <= end_of_chain(chain, ticks, capped(chain, cap))
