"""The number behind a message: every rank sees when another one sent a message of another call."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from samples import some

from fdp.distributed.collective import COLLECTIVES
from fdp.distributed.header import BITS, CALLS, NUMEL, Header, carries, is_unanimous, numbers, pairs

CPU = torch.device("cpu")


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)


def combined(rows: torch.Tensor, op: str) -> torch.Tensor:
    """What ranks get of [ranks, NUMEL] if a backend adds rank by rank, and rounds each time."""
    if op in ("max", "min"):
        return rows.amax(0) if op == "max" else rows.amin(0)
    if op == "divided before":
        rows = rows / len(rows)
    total = torch.zeros_like(rows[0])
    for row in rows:
        total += row
    return total / len(rows) if op == "divided after" else total


def worlds(dtype: torch.dtype, op: str) -> Iterator[int]:
    for size in (2, 3, 255, 256, 257, 1000, 4096):
        if carries(COLLECTIVES["sum" if "divided" in op else op], dtype, size):
            yield size


@pytest.mark.parametrize(
    ("dtype", "op"),
    some(
        [
            *itertools.product(FLOATS, ("sum", "divided before", "divided after", "max", "min")),
            *itertools.product(INTEGERS, ("sum", "max", "min")),
        ]
    ),
)
def test_every_rank_sees_every_difference(dtype: torch.dtype, op: str) -> None:
    """Of one bit or of many, between one rank and the rest or between halves, however many ranks there are."""
    generator = random.Random(0)
    sizes = list(worlds(dtype, op))
    assert sizes[-1] == (255 if dtype.itemsize == 1 else 4096)
    for size in sizes:
        for count in (0, 1, size // 2, size - 1):
            one = generator.getrandbits(BITS)
            other = one ^ (1 << generator.randrange(BITS)) if count % 2 else generator.getrandbits(BITS)
            rows = torch.tensor([pairs(one)], dtype=dtype).expand(size, NUMEL).clone()
            rows[:count] = torch.tensor(pairs(other), dtype=dtype)
            rows = rows[torch.randperm(size)]
            arrived = combined(rows, op)
            for number in (one, other):
                assert is_unanimous(arrived, number) == (number == one and count == 0), (size, count)
                elements = torch.tensor(pairs(number), dtype=dtype)
                assert is_unanimous(arrived, elements) == (number == one and count == 0), (size, count)


def test_integers_of_a_byte_wrap_around_and_do_not_carry() -> None:
    assert not carries(COLLECTIVES["sum"], torch.int8, 256) and carries(COLLECTIVES["sum"], torch.int32, 2**20)
    rows = torch.tensor([pairs(0)] * 2 + [pairs(1)] * 256, dtype=torch.uint8)
    assert is_unanimous(combined(rows, "sum"), 0)  # 256 ones are zero


def test_numbers_tell_agreements_and_calls_apart() -> None:
    of = {(n, d): numbers(n, d) for n, d in itertools.product((1, 2, 2**20 - 1), ("0a" + "0" * 62, "b1" + "0" * 62))}
    every = [number for each in of.values() for number in each]
    assert len(set(every)) == len(every) == 6 * CALLS and max(every) < 2**BITS


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_a_number_is_mixed_in_on_the_host_or_on_the_device(dtype: torch.dtype) -> None:
    generator = random.Random(1)
    of_calls = [generator.getrandbits(BITS) for _ in range(CALLS)]
    header = Header(of_calls, dtype, CPU)
    for mixed in (0, 1, 2**BITS - 1, *(generator.getrandbits(BITS) for _ in range(20))):
        for call in (0, 7, CALLS + 3):
            number = of_calls[call % CALLS] ^ mixed
            expected = torch.tensor(pairs(number), dtype=dtype)
            tail = torch.zeros(NUMEL, dtype=dtype)
            assert header.write(tail, call, mixed) == number and torch.equal(tail, expected)
            for above in (0, 2**40, -(2**50)):  # of a number of the device the lower bits count
                tail = torch.zeros(NUMEL, dtype=dtype)
                sent = header.write(tail, call, torch.tensor(mixed + above))
                assert isinstance(sent, torch.Tensor) and torch.equal(sent, expected) and torch.equal(tail, expected)
