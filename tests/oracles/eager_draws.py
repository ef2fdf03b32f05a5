"""A function that draws, as a step and as plain PyTorch: the same numbers, and the generator where it would be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import pytest
import torch

import fdp
from fdp.emit.compiled.public import VARIABLE

Draws = Callable[[torch.Tensor], Any]


@contextmanager
def entry(how: str) -> Iterator[dict[str, Any]]:
    """Options of `data_parallel` for a way to run a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(int(how == "public")))
        yield {"compile": how != "plain", "check_replication": False}


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
    with entry(how) as options:
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
