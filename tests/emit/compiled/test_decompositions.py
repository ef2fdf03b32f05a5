"""The table by which operators are taken apart before inductor sees them, in plain PyTorch: no compiler.

Every sample that torch ships for an operator, of each dtype, with and without the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from operator_samples import DTYPES, calls, same
from samples import ALL_SAMPLES, some
from torch.utils._python_dispatch import TorchDispatchMode

from fdp.emit.compiled.inductor import decompositions

pytestmark = pytest.mark.filterwarnings("ignore")


ROUNDS_ELSEWHERE = ("cross", "grid_sampler", "nn_functional_grid_sample", "nn_functional_instance_norm")
ROUNDS_ELSEWHERE += ("nn_functional_interpolate", "nn_functional_nll_loss", "nn_functional_soft_margin_loss")
"""Beginnings of the names of operators of sixteen bits whose kernels round between their operations."""


class TakenApart(TorchDispatchMode):
    """Calls what a table has for an operator in its place."""

    def __init__(self, table: Mapping[Any, Any]) -> None:
        super().__init__()
        self.table = table

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in self.table:
            with self:
                found = self.table[func](*args, **named)
            if found is not NotImplemented:
                return found
        return func(*args, **named)


def wrong(table: Mapping[Any, Any], dtype: torch.dtype, of_each: int | None) -> list[str]:
    found = []
    for call in calls(dtype, of_each):
        if dtype in (torch.float16, torch.bfloat16) and call.name.startswith(ROUNDS_ELSEWHERE):
            continue
        try:
            with TakenApart(table):
                results = call.of([x.clone() for x in call.tensors])
            if not all(same(one, two, dtype) for one, two in zip(results, call.due, strict=True)):
                found.append(f"{call.name}: other numbers")
        except Exception as error:
            found.append(f"{call.name}: {type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("dtype", some([torch.int32, *(each for each in DTYPES if each != torch.int32)], 10), ids=str)
def test_operators_taken_apart_compute_what_they_compute_whole(dtype: torch.dtype) -> None:
    assert wrong(decompositions({}), dtype, None if ALL_SAMPLES else 2) == []


def test_what_is_taken_apart_wrongly_is_found() -> None:
    aten = torch.ops.aten
    table = {**decompositions({}), aten.rsub.Scalar: lambda x, *others: x.clone()}
    assert any("other numbers" in each for each in wrong(table, torch.int32, 2))  # of operators that call it
