"""Every operator that torch ships samples for, of each dtype, compiled and one by one.

The comparison at the first call is off: it would refuse what the compiler gets wrong. Steps of forty samples; if one of
them cannot be compiled, each half is tried alone. An operator is right, or refused by an `FdpError`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from operator_samples import DTYPES, ROUNDS_ELSEWHERE, Call, agree, calls
from samples import exhaustive
from torch import Tensor

import fdp

pytestmark = [exhaustive, pytest.mark.filterwarnings("ignore")]

TOGETHER, OF_EACH = 40, 4


def wrong(part: list[Call], dtype: torch.dtype) -> list[str]:
    def step(state: Tensor, tensors: Any) -> Any:
        return state, [call.of(given) for call, given in zip(part, tensors, strict=True)]

    try:
        made = fdp.data_parallel(step, compile=True, check_replication=False, check_trace=False)
        found = made(torch.zeros(()), [[x.clone() for x in call.tensors] for call in part])[1]
    except fdp.FdpError:
        half = len(part) // 2
        return wrong(part[:half], dtype) + wrong(part[half:], dtype) if half else []
    rounds_elsewhere = ("addr", *ROUNDS_ELSEWHERE)
    return [
        call.name
        for call, results in zip(part, found, strict=True)
        if not agree(call, results, dtype, rounds_elsewhere)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_operators_compute_what_they_compute_alone(dtype: torch.dtype) -> None:
    every = calls(dtype, OF_EACH)
    assert len(every) > 500
    assert not [name for at in range(0, len(every), TOGETHER) for name in wrong(every[at : at + TOGETHER], dtype)]
