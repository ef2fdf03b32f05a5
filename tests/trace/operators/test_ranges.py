"""Ranges of whole numbers whose step is a fraction: what plain PyTorch makes of them."""

from __future__ import annotations

import pytest
import torch
from samples import some

import fdp

BOUNDS = {"below one": (0, 4.8, 0.3), "down": (0, -5, -0.5), "from a fraction": (1.5, 4.8, 0.7), "none": (2, 2, 0.5)}
BOUNDS |= {"whole bounds": (1, 4, 0.5), "above one": (0, 9.6, 1.5), "down by more": (5, 0, -1.5)}


@pytest.mark.parametrize("compile", some([False, True]))
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64, torch.bfloat16], ids=str)
def test_a_range_is_that_of_plain_pytorch(dtype: torch.dtype, compile: bool) -> None:
    # Plain PyTorch refuses the others.
    taken = {name: bounds for name, bounds in BOUNDS.items() if dtype != torch.int64 or abs(bounds[2]) > 1}

    def ranges() -> dict[str, torch.Tensor]:
        return {name: torch.arange(*bounds, dtype=dtype) for name, bounds in taken.items()}

    step = fdp.data_parallel(lambda w, b: (w, ranges()), compile=compile)
    _, found = step(torch.ones(2), torch.ones(1))
    for name, expected in ranges().items():
        assert found[name].dtype == dtype and torch.equal(found[name], expected), name
