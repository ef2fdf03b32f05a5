"""Constants and positions: cast, multiplied and compared as tensors that hold them are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, arange, full

import fdp

BF16, U8, I8, I32 = torch.bfloat16, torch.uint8, torch.int8, torch.int32

POSITIONS: Mapping[str, Callable[[], Tensor]] = {
    "bfloat16": lambda: arange(600).to(BF16).float(),
    "bfloat16, whole again": lambda: arange(600).to(BF16).long(),
    "times in bfloat16": lambda: (arange(600).to(BF16) * 3).float(),
    "float16 of some": lambda: (arange(600) * 9).half().long(),
    "float32": lambda: (arange(600) + (1 << 24)).float().long() - (1 << 24),
    "uint8": lambda: arange(600).to(U8).long(),
    "minus in uint8": lambda: arange(200, dtype=U8) - 100,
    "negative in uint8": lambda: (-arange(200, dtype=U8)).float(),
    "times in uint8": lambda: (arange(200, dtype=U8) * 3).float(),
    "plus in int8": lambda: (arange(100, dtype=I8) + 100).float(),
    "int16": lambda: (arange(600) * 300).to(torch.int16).float(),
    "int32": lambda: (arange(600) * (1 << 28)).to(I32).float(),
    "times in int32": lambda: (arange(600, dtype=I32) * (1 << 28)).long(),
    "bool": lambda: arange(600).to(torch.bool).float(),
    "less in bfloat16": lambda: arange(600).to(BF16) < full((), 300.5).to(BF16),
    "larger than in uint8": lambda: torch.maximum(arange(600).to(U8).long(), torch.tensor(100)),
    "an index": lambda: (arange(600) ** 2)[arange(600).to(U8).long()],
    "an index below zero": lambda: (arange(256) ** 2)[(-1 - arange(60)).to(U8).long()],
    "an index that wraps to below zero": lambda: (arange(256) ** 2)[arange(130).to(I8).long().clamp(-60, 60)],
    "an index of int32": lambda: (arange(256) ** 2)[(arange(60, dtype=I32) * (1 << 28)).clamp(-9, 9).long()],
    "written by an index": lambda: arange(256).index_put((arange(126, 134).to(I8).long(),), torch.tensor(-7)),
    "beyond 64 bits": lambda: (arange(600) * (1 << 55)) >> 55,
    "far beyond 64 bits": lambda: (arange(600) * (1 << 60)) // 3,
    "as ever": lambda: (arange(600) * 3 - 7) // 5 % 11,
}

CONSTANTS: Mapping[str, Callable[[], Tensor]] = {
    "float32 to float64": lambda: full((8,), 0.1).double(),
    "sum in float32": lambda: (full((8,), 0.1) + 0.2).double(),
    "chain in float32": lambda: (full((8,), 0.1) * 0.3 + 0.7) * 1.1 - 0.77,
    "chain in bfloat16": lambda: (full((8,), 0.1, dtype=BF16) * 0.3 + 0.7) * 1.1 - 0.77,
    "product in bfloat16": lambda: full((8,), 0.1, dtype=BF16) * full((8,), 0.7, dtype=BF16),
    "product too large for float16": lambda: (full((8,), 6e4, dtype=torch.float16) * 2).float(),
    "too large for float16": lambda: full((8,), 70000.0).half().float(),
    "too large for float32": lambda: full((8,), 1e300, dtype=torch.float64).float().double(),
    "too large for uint8": lambda: full((8,), 300).to(U8).float(),
    "twice in int8": lambda: (full((8,), 100, dtype=I8) * 2).float(),
    "cut off": lambda: full((8,), 1.7).long().float(),
    "not zero": lambda: full((8,), 0.5).bool().float(),
}


def check(values: Mapping[str, Callable[[], Tensor]], size: int) -> None:
    # Something of the batch in each result: constants alone are not left to inductor.
    def step(state: Tensor, x: Tensor) -> Any:
        return state, [
            value() + zeros for value in values.values() for zeros in [x[: value().numel()].to(value().dtype)]
        ]

    x = torch.zeros(size)
    found = fdp.data_parallel(step, compile=True, check_replication=False, check_trace=False)(x, x)[1]
    wrong = [
        name
        for name, one, value in zip(values, found, values.values(), strict=True)
        if not torch.equal(one, value() + x[: value().numel()].to(value().dtype))
    ]
    assert not wrong, wrong


def test_positions_are_of_their_dtype() -> None:
    check(POSITIONS, 600)


def test_constants_are_of_their_dtype() -> None:
    check(CONSTANTS, 8)


BETWEEN = {
    "linspace": lambda n: [torch.linspace(0, 7, 50), torch.linspace(4.3, -3, 50, dtype=torch.float64)],
    "linspace of whole numbers": lambda n: [torch.linspace(4.3, -3, 50, dtype=torch.int64)],
    "linspace of a number that is read": lambda n: [torch.linspace(0, n, 50), torch.linspace(n, 9, 7).long()],
    "logspace": lambda n: [torch.logspace(0.1, 2.3, 40, base=2), torch.logspace(0, 2, 40, dtype=torch.int32)],
    "arange": lambda n: [torch.arange(0, 10, 0.3), torch.arange(1, -1, -0.07, dtype=torch.float64)],
    "places": lambda n: [(torch.arange(0, 10, 0.3) * 10).long(), torch.linspace(0, 99, 12).long()],
}


def test_numbers_between_two_others_are_those_of_their_kernels() -> None:
    def step(n: torch.Tensor) -> Any:
        return n, [between(n.item()) for between in BETWEEN.values()]

    n = torch.tensor(1.3, dtype=torch.float64)
    found = fdp.data_parallel(step, compile=True, check_replication=False, check_trace=False)(n)[1]
    for name, ours, due in zip(BETWEEN, found, step(n)[1], strict=True):
        for one, two in zip(ours, due, strict=True):
            assert one.dtype == two.dtype and torch.equal(one, two), name
