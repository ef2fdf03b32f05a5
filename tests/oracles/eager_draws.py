"""A function that draws, as a step and as plain PyTorch: the same numbers, and the generator where it would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch

import fdp

Draws = Callable[[torch.Tensor], Any]


def same(found: Any, expected: Any) -> list[str]:
    """The names of results that are not the same bits."""
    return [
        name
        for name in expected
        if not all(
            (one.shape, one.dtype) == (two.shape, two.dtype) and torch.equal(one.nan_to_num(), two.nan_to_num())
            for one, two in zip(optree.tree_leaves(found[name]), optree.tree_leaves(expected[name]), strict=True)
        )
    ]


def assert_draws_like_eager(function: Draws, x: torch.Tensor, how: str, check_trace: bool = False) -> None:
    w = torch.ones(3)
    options = {"compile": how == "compiled", "check_replication": False}
    step = fdp.data_parallel(lambda w, x: (w, {"": function(x)}), check_trace=check_trace, **options)
    for seed in range(2):
        torch.manual_seed(seed)
        found, after = step(w, x)[1][""], torch.rand(2)
        torch.manual_seed(seed)
        expected = function(x)
        if not isinstance(expected, dict):
            found, expected = {"": found}, {"": expected}
        assert not same(found, expected)
        assert torch.equal(after, torch.rand(2))
