"""The table by which operators are taken apart before inductor sees them, in plain PyTorch: no compiler.

Every sample that torch ships for an operator, of each dtype, with and without the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from operator_samples import DTYPES, ROUNDS_ELSEWHERE, agree, calls
from samples import ALL_SAMPLES, some
from torch.utils._python_dispatch import TorchDispatchMode

from fdp.emit.compiled.inductor import decompositions

pytestmark = pytest.mark.filterwarnings("ignore")

HERE_AS_WELL = ("nn_functional_instance_norm", "nn_functional_interpolate")
HERE_AS_WELL += ("nn_functional_nll_loss", "nn_functional_soft_margin_loss")
"""Likewise, of operators whose parts plain PyTorch rounds one by one; inductor computes them in float32."""


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
        try:
            with TakenApart(table):
                results = call.of([x.clone() for x in call.tensors])
            if not agree(call, results, dtype, (*ROUNDS_ELSEWHERE, *HERE_AS_WELL)):
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
