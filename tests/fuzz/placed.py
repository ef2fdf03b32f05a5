"""A step whose state goes in sharded, and comes out whole."""

from __future__ import annotations

from typing import Any

import torch

import fdp
from fuzz.plain import Box  # fmt: skip


def with_sharded_state(step: Any) -> Any:
    """The same step, of which each rank gets a part of each leaf that it can divide."""

    def call(state: Any, batch: Any) -> Any:
        new, results = step(placed(state), batch)
        return fdp.unshard(new), results

    return call


def placed(tree: Any) -> Any:
    """The tree with its leaves sharded, but for labelled ones, and those that do not lie row by row."""
    if isinstance(tree, dict):
        return {key: placed(item) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(placed(item) for item in tree)
    if isinstance(tree, Box):
        return Box(placed(tree.x), placed(tree.y))
    plain = type(tree) is torch.Tensor and tree.is_contiguous() and not tree.requires_grad
    return fdp.shard(tree, min_size=0) if plain else tree
