"""Random numbers by key: pure, equal where keys are, everywhere the same, and as random as hashes can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import ranks
import torch
import torch.distributed as dist

import fdp
from fdp import random
from fdp.random.hashing import mixed

MASK = 2**64 - 1

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda k: random.normal(k, (5, 3)),
    "normal of doubles": lambda k: random.normal(k, (4,), torch.float64),
    "normal of halves": lambda k: random.normal(k, (4,), torch.bfloat16),
    "uniform": lambda k: random.uniform(k, (3, 2), minval=-1.0, maxval=3.0),
    "one number": lambda k: random.uniform(k),
    "randint": lambda k: random.randint(k, (7,), -3, 4, torch.int32),
    "bernoulli": lambda k: random.bernoulli(k, 0.5, 9),
    "bernoulli of tensors": lambda k: random.bernoulli(k, torch.tensor([0.0, 0.5, 1.0])),
    "permutation": lambda k: random.permutation(k, 6),
    "permutation of a tensor": lambda k: random.permutation(k, torch.arange(8.0).reshape(4, 2)),
    "split": lambda k: random.split(k, 3),
    "fold_in": lambda k: random.fold_in(k, -7),
    "nothing": lambda k: random.normal(k, (0, 2)),
}


def slow_mix(z: int) -> int:
    """SplitMix64's mixing function as its paper prints it, in Python's unbounded integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def slow_hash(key: int, data: int, purpose: int) -> int:
    return slow_mix(slow_mix((data * 0x9E3779B97F4A7C15 + purpose) & MASK) ^ (key & MASK))


def test_the_hash_is_that_of_the_paper() -> None:
    keys = torch.tensor([0, 1, -1, 2**62, -(2**63), 123456789])
    data = torch.tensor([[0], [1], [-1], [2**40], [-(2**63)]])
    for purpose in (0, 5, -(2**61)):
        found = mixed(keys, data, purpose)
        for i, d in enumerate(data.flatten().tolist()):
            for j, k in enumerate(keys.tolist()):
                assert int(found[i, j]) & MASK == slow_hash(k, d & MASK, purpose & MASK)


def test_words_come_in_one_sequence_however_many_are_drawn() -> None:
    """Pieces, as they are worked through on a CPU, leave no seam; a longer draw begins like a shorter one."""
    k = random.key(3)
    for dtype in (torch.float32, torch.float64):
        many = random.uniform(k, 50_001, dtype)
        for few in (1, 2, 7, 16_384, 16_385, 40_000):
            assert torch.equal(random.uniform(k, few, dtype), many[:few])
    own = int(random.key(3)) & MASK
    words = [slow_hash(own, i, 0x6A09E667F3BCC908) for i in (0, 1, 16_384, 50_000)]
    drawn = random.uniform(k, 50_001, torch.float64)[[0, 1, 16_384, 50_000]]
    assert drawn.tolist() == [(word >> 11) * 2.0**-53 for word in words]


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_functions_of_the_key_alone(name: str) -> None:
    draw, k = DRAWS[name], random.key(1)
    state = torch.get_rng_state()
    first = draw(k)
    torch.manual_seed(99)
    assert torch.equal(draw(k), first)
    torch.set_rng_state(state)
    draw(k)
    assert torch.equal(torch.get_rng_state(), state), "a generator of torch was used"
    assert name == "nothing" or any(not torch.equal(draw(random.key(n)), first) for n in range(2, 8))


@pytest.mark.parametrize("name", DRAWS)
def test_draws_under_vmap_are_those_of_each_key(name: str) -> None:
    keys = random.split(random.key(4), 6).reshape(2, 3)
    found = torch.vmap(torch.vmap(DRAWS[name]))(keys)
    assert torch.equal(found, torch.stack([torch.stack([DRAWS[name](k) for k in row]) for row in keys]))


def test_fold_in_under_vmap_over_either() -> None:
    k, numbers = random.key(0), torch.arange(4)
    one_by_one = torch.stack([random.fold_in(k, int(n)) for n in numbers])
    assert torch.equal(torch.vmap(random.fold_in, in_dims=(None, 0))(k, numbers), one_by_one)
    both = torch.vmap(random.fold_in)(one_by_one, numbers)
    assert torch.equal(both, torch.stack([random.fold_in(a, int(n)) for a, n in zip(one_by_one, numbers, strict=True)]))


# torch's own decompositions for forward mode, at their first use.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_draws_can_be_scaled_and_differentiated_forward_and_back() -> None:
    def loss(scale: torch.Tensor) -> torch.Tensor:
        return (scale * random.normal(random.key(0), (4,))).square().sum()

    noise = random.normal(random.key(0), (4,))
    for grad in (torch.func.grad(loss), fdp.grad(loss)):
        torch.testing.assert_close(grad(torch.tensor(2.0)), (2 * 2.0 * noise.square()).sum())
    _, tangent = torch.func.jvp(loss, (torch.tensor(2.0),), (torch.tensor(1.0),))
    torch.testing.assert_close(tangent, (2 * 2.0 * noise.square()).sum())


# --- on ranks, in steps --------------------------------------------------------------------------------------------


def all_draws(k: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: draw(k) for name, draw in DRAWS.items()}


def noisy_step(state: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
    following, here = random.split(state["key"])
    own = random.fold_in(here, fdp.axis_index())
    return {"key": following, "drawn": all_draws(here)}, fdp.per_rank({"drawn": all_draws(own), "batch": batch})


def drawn_in_steps() -> Any:
    torch.manual_seed(dist.get_rank())  # what torch's own generators hold must not matter
    state: dict[str, Any] = {"key": random.key(11)}
    step = fdp.data_parallel(noisy_step)
    for _ in range(2):
        expected_next, here = random.split(state["key"])
        state, own = step({"key": state["key"]}, torch.ones(1))
        assert torch.equal(state["key"], expected_next)
        assert_equal(state["drawn"], all_draws(here))
        assert_equal(own["drawn"], all_draws(random.fold_in(here, dist.get_rank())))
    fdp.assert_replicated(state)
    return own["drawn"]


def assert_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_ranks_draw_the_same_with_one_key_and_others_with_their_own() -> None:
    one, two = ranks.run(2, drawn_in_steps)
    assert {name for name in one if torch.equal(one[name], two[name])} <= {"nothing"}


def test_noise_of_each_ranks_own_is_refused_where_it_is_not_declared() -> None:
    def step(state: Any, batch: Any) -> Any:
        return random.normal(random.fold_in(state, fdp.axis_index()), (2,))

    with pytest.raises(fdp.ReplicationError, match="may differ from rank to rank"):
        fdp.data_parallel(step)(random.key(0), torch.ones(1))


def test_draws_in_a_compiled_step() -> None:
    def step(k: torch.Tensor, batch: torch.Tensor) -> Any:
        _, here = random.split(k)
        return {"x": random.normal(here, (300,)) * 2, "i": random.randint(here, (300,), 0, 9)}

    found = fdp.data_parallel(step, compile=True)(random.key(0), torch.ones(1))
    expected = step(random.key(0), torch.ones(1))
    torch.testing.assert_close(found["x"], expected["x"])
    assert torch.equal(found["i"], expected["i"])


# --- quality -------------------------------------------------------------------------------------------------------


def test_keys_do_not_collide() -> None:
    k = random.key(0)
    families = [
        random.split(k, 200_000),
        random.split(random.split(k, 1)[0], 200_000),
        torch.vmap(random.fold_in, in_dims=(None, 0))(k, torch.arange(-100_000, 100_000)),
        torch.vmap(random.key)(torch.arange(200_000)),
    ]
    together = torch.cat(families)
    assert together.unique().numel() == together.numel()


def test_neighbouring_keys_have_no_number_in_common() -> None:
    """As hashes of key + index would: two keys were then two places of one sequence."""
    drawn = [random.uniform(torch.tensor(n), 20_000, torch.float64) for n in (0, 1, 2, 0x9E3779B97F4A7C15 - 2**64)]
    together = torch.cat(drawn)
    assert together.unique().numel() == together.numel()


def bits_of(words: torch.Tensor) -> torch.Tensor:
    return (words.unsqueeze(-1) >> torch.arange(64)) & 1


def test_every_bit_of_a_draw_depends_on_every_bit_of_key_and_index() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, data = (torch.randint(-(2**62), 2**62, (2000, 1), generator=generator) for _ in range(2))
    one_bit = torch.tensor([1 << i if i < 63 else -(2**63) for i in range(64)])
    # Small numbers too: an index is one.
    for numbers in (data, torch.arange(2000).unsqueeze(-1)):
        before = mixed(keys, numbers, 0)
        for after in (mixed(keys ^ one_bit, numbers, 0), mixed(keys, numbers ^ one_bit, 0)):
            flipped = bits_of(before ^ after).double().mean(0)
            # 2000 tosses of a coin: a standard deviation of 0.011, and 4096 coins.
            assert flipped.min() > 0.44 and flipped.max() < 0.56


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_are_distributed_as_they_should(dtype: torch.dtype) -> None:
    n = 40_000
    first, second = random.split(random.key(7))
    x, u = random.normal(first, n, dtype), random.uniform(second, n, dtype)
    assert x.dtype == u.dtype == dtype and x.isfinite().all() and (x != 0).all()
    assert u.min() >= 0 and u.max() < 1
    x, u = x.double(), u.double()
    step = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11  # the narrowest numbers lie that far apart
    for drawn in (u, 0.5 * (1 + torch.erf(x / 2**0.5))):
        gap = (drawn.sort().values - (torch.arange(n) + 0.5) / n).abs().max()  # Kolmogorov-Smirnov
        assert gap < 1.95 / n**0.5 + step
    x = x - x.mean()
    for lag in (1, 2, 3, n // 2):
        assert (x[lag:] * x[:-lag]).mean().abs() < 5 / (n - lag) ** 0.5


def test_streams_of_related_keys_are_not_correlated() -> None:
    parent = random.key(5)
    keys = [parent, *random.split(parent, 3), *(random.fold_in(parent, n) for n in (0, 1, 2)), random.key(6)]
    drawn = torch.stack([random.normal(k, 20_000) for k in keys])
    correlations = torch.corrcoef(drawn) - torch.eye(len(keys))
    assert correlations.abs().max() < 5 / 20_000**0.5


def test_integers_and_truth_values_come_equally_often() -> None:
    k = random.key(8)
    counts = random.randint(k, 70_000, -3, 4).add(3).bincount()
    assert counts.numel() == 7 and ((counts - 10_000).square() / 10_000).sum() < 30  # chi-squared, 6 degrees
    for p in (0.0, 0.1, 0.9, 1.0):
        assert abs(random.bernoulli(k, p, 40_000).double().mean() - p) < 0.01
    assert random.bernoulli(k, torch.tensor([0.0, 1.0]).expand(50, 2)).double().mean(0).tolist() == [0.0, 1.0]
    firsts = torch.vmap(lambda k: random.permutation(k, 5))(random.split(k, 20_000))
    assert firsts.sort(dim=1).values.eq(torch.arange(5)).all()
    for place in range(5):
        assert ((firsts[:, place].bincount() - 4000).square() / 4000).sum() < 25


def test_whole_numbers_of_numpy_are_numbers() -> None:
    k, three = random.key(3), numpy.int64(3)
    assert torch.equal(random.key(three), k) and torch.equal(random.fold_in(k, three), random.fold_in(k, 3))
    assert torch.equal(random.normal(k, (three,)), random.normal(k, 3)) and random.uniform(k, three).shape == (3,)
    assert torch.equal(random.randint(k, 5, -three, three), random.randint(k, 5, -3, 3))
    assert torch.equal(random.permutation(k, three), random.permutation(k, 3)) and random.split(k, three).numel() == 3
    assert fdp.seed(three) == fdp.seed(3)


def test_ends_of_intervals() -> None:
    k = random.key(9)
    for low, high in ((0.0, 1.0), (-5.0, -4.0), (1e6, 1e6 + 0.25)):
        for dtype in (torch.float32, torch.float64):
            x = random.uniform(k, 100_000, dtype, low, high)
            assert x.min() >= low and x.max() < high
    assert random.randint(k, (4,), 5, 6).tolist() == [5] * 4
    assert random.randint(k, 1000, 0, 256, torch.uint8).max() > 250
    wide = random.randint(k, 1000, 0, 2**40)
    assert wide.min() >= 0 and 2**39 < wide.max() < 2**40
    assert random.permutation(k, torch.arange(6).reshape(2, 3), axis=-1).sort(dim=1).values.tolist() == [
        [0, 1, 2],
        [3, 4, 5],
    ]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda k: random.normal(0, (2,)), r"fdp.random.normal was given 0 for a key.\nRemedy: pass a 0-dim int64"),
        (lambda k: random.normal(random.split(k)), r"a torch.int64 tensor of shape \[2\] for a key"),
        (lambda k: random.uniform(torch.tensor(0.5), ()), "a torch.float32 tensor"),
        (lambda k: random.normal(k, (2, -1)), r"shape=\(2, -1\)"),
        (lambda k: random.normal(k, (2.0,)), "shape="),
        (lambda k: random.normal(k, None), "shape=None"),
        (lambda k: random.bernoulli(k, torch.ones(3), ()), r"p of shape \[3\] for draws of shape \[\]"),
        (lambda k: random.bernoulli(k, torch.ones(3), (3, 1)), r"p of shape \[3\] for draws of shape \[3, 1\]"),
        (lambda k: random.bernoulli(k, "half"), "p='half'"),
        (lambda k: random.uniform(k, (2,), minval=-3e38, maxval=3e38), "in torch.float32.\nRemedy: pass a wider dtype"),
        (lambda k: random.uniform(k, (2,), torch.float16, maxval=1e5), "maxval=100000.0 in torch.float16"),
        (lambda k: random.normal(k, (2,), torch.int64), "dtype=torch.int64"),
        (lambda k: random.uniform(k, (2,), minval=1.0, maxval=1.0), "minval=1.0 and maxval=1.0"),
        (lambda k: random.randint(k, (2,), 3, 3), "minval=3 and maxval=3"),
        (lambda k: random.randint(k, (2,), 0, 2**41), "at most 2\\*\\*40 apart"),
        (lambda k: random.randint(k, (2,), 0, 300, torch.uint8), "numbers from 0 to 299 in torch.uint8"),
        (lambda k: random.randint(k, (2,), 0, 3, torch.float32), "dtype=torch.float32"),
        (lambda k: random.permutation(k, -1), "x=-1"),
        (lambda k: random.permutation(k, torch.ones(3), axis=1), "axis=1"),
        (lambda k: random.split(k, 2.5), "num=2.5"),
        (lambda k: random.fold_in(k, 1.5), "1.5"),
        (lambda k: random.fold_in(k, torch.tensor(1.5)), "1.5"),
        (lambda k: random.key("a"), "'a'"),
        (lambda k: random.key(True), "True"),
    ],
)
def test_what_has_no_meaning_is_refused(call: Callable[[torch.Tensor], Any], text: str) -> None:
    with pytest.raises(fdp.ArgumentError, match=text):
        call(random.key(0))
