"""The number of a part of a tensor: it changes with each bit, and not with where elements lie in memory."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdp.distributed import checksum as module
from fdp.distributed.checksum import _elements, checksum
from fdp.distributed.fingerprint import mixed_sum

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
WAYS = ("on the CPU", "on a device")


def number(way: str, tensor: torch.Tensor, start: int, stop: int) -> int:
    """Its number; that of a device by what would run there."""
    if way == "on the CPU":
        found = checksum(tensor, start, stop)
        assert isinstance(found, int) and 0 <= found < 2**32
        return found
    wide = int(mixed_sum(_elements(tensor, start, stop)))
    return (wide ^ wide >> 32) & (2**32 - 1)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits; of booleans those that there are."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 60_000), st.integers(0, 2**30))
def test_each_bit_counts(way: str, dtype: torch.dtype, numel: int, seed: int) -> None:
    generator = random.Random(seed)
    x = drawn((numel,), dtype, seed)
    start = generator.randrange(numel)
    stop = generator.randrange(start + 1, numel + 1)
    before = number(way, x, start, stop)
    at = generator.randrange(start * dtype.itemsize, stop * dtype.itemsize)
    as_bytes(x)[at] ^= 1 if dtype == torch.bool else 1 << generator.randrange(8)
    assert number(way, x, start, stop) != before
    # What is outside does not count.
    as_bytes(x)[at] ^= 1
    outside = number(way, x, start, stop)
    as_bytes(x)[: start * dtype.itemsize] = 0
    as_bytes(x)[stop * dtype.itemsize :] = 0
    assert number(way, x, start, stop) == outside


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None)
@given(st.integers(2, 40_000), st.integers(0, 2**30))
def test_elements_that_change_places_count(way: str, numel: int, seed: int) -> None:
    generator = random.Random(seed)
    x = torch.arange(numel, dtype=torch.int32)
    before = number(way, x, 0, numel)
    one = generator.randrange(numel)
    # Often the same place in another row, or another place in the same row.
    other = generator.choice([one ^ 1, one + 128, one + 1, generator.randrange(numel)]) % numel
    if one != other:
        x[one], x[other] = other, one
        assert number(way, x, 0, numel) != before


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(DTYPES), st.permutations(range(4)),
    st.integers(0, 2**30),
)  # fmt: skip
def test_strides_do_not_count(way: str, shape: list[int], dtype: torch.dtype, places: list[int], seed: int) -> None:
    x = drawn((*shape,), dtype, seed)
    order = [place for place in places if place < len(shape)]
    strided = x.permute(order).contiguous().permute([order.index(at) for at in range(len(shape))])
    behind = torch.cat((torch.zeros(1, dtype=torch.uint8).expand(dtype.itemsize).clone().view(dtype), x.view(-1)))[1:]
    sparse = torch.stack((x, x), -1)[..., 0]
    generator = random.Random(seed)
    start = generator.randrange(x.numel())
    stop = generator.randrange(start + 1, x.numel() + 1)
    expected = number(way, x, start, stop)
    for other in (strided, sparse, behind.view(shape)):
        assert number(way, other, start, stop) == expected
    assert number(way, x[..., :1].expand(shape), start, stop) == number(
        way, x[..., :1].expand(shape).contiguous(), start, stop
    )


def test_bits_count_and_not_values() -> None:
    minus = torch.tensor([0.0, -0.0])
    assert checksum(minus, 0, 1) != checksum(minus, 1, 2)
    nans = torch.tensor([0x7FC00001, 0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    assert checksum(nans, 0, 1) == checksum(nans, 1, 2) != checksum(nans, 2, 3)
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert checksum(z.conj(), 0, 2) == checksum(z.conj().resolve_conj(), 0, 2) != checksum(z, 0, 2)
    assert checksum(z.conj().imag, 0, 2) == checksum(torch.tensor([-2.0, 1.0]), 0, 2)
    assert checksum(torch.tensor(7), 0, 1) == checksum(torch.tensor([[7]]), 0, 1)


@pytest.mark.parametrize("size_bytes", [module._LARGE_BYTES - 4, module._LARGE_BYTES, module._LARGE_BYTES + 4])
def test_large_memory_that_does_not_begin_at_a_word(size_bytes: int) -> None:
    x = torch.randn(size_bytes // 4 + 1)
    assert checksum(x[1:], 0, size_bytes // 4) == checksum(x[1:].clone(), 0, size_bytes // 4)
    # Each byte counts, also of what is left behind the last whole row.
    before = checksum(x, 0, size_bytes // 4)
    for at in (*range(600), *range(size_bytes - 600, size_bytes)):
        as_bytes(x)[at] ^= 1
        assert checksum(x, 0, size_bytes // 4) != before, at
        as_bytes(x)[at] ^= 1
