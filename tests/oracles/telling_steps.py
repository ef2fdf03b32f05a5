"""Steps whose results tell what their arguments were like: containers, constants, layout, options."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import optree
import torch

import fdp

Tree = Any


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(unsafe_hash=True)
class Options:
    scale: float


def kinds(tree: Tree) -> str:
    """Everything about containers and constants that a step can see."""
    if isinstance(tree, torch.Tensor):
        return "x"
    if isinstance(tree, collections.OrderedDict):
        return "od(" + ",".join(f"{k}={kinds(v)}" for k, v in tree.items()) + ")"
    if isinstance(tree, dict):  # of a dict's keys the order is none
        return f"{type(tree).__name__}(" + ",".join(f"{k}={kinds(tree[k])}" for k in sorted(tree)) + ")"
    if isinstance(tree, (list, tuple)):
        return f"{type(tree).__name__}(" + ",".join(map(kinds, tree)) + ")"
    return repr(tree)


def telling(state: Tree, options: Options, batch: Tree) -> Tree:
    """A step whose result tells what its arguments were like: containers, constants, layout, options."""
    mean = fdp.pmean(batch["x"].mean()) * options.scale
    tensors = [leaf for leaf in optree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]

    def new(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        return (leaf * 2 + mean).to(leaf.dtype)

    first = [leaf.detach().as_strided((min(1, leaf.numel()),), (1,)).real * 1.0 for leaf in tensors]
    layout = repr([(leaf.dtype, leaf.shape, leaf.stride()) for leaf in tensors])
    return optree.tree_map(new, state), first, kinds(state), layout, batch["x"].shape[0]


def plain_telling(state: Tree, options: Options, batch: Tree) -> Tree:
    """Likewise, without an operator that has an offset in it."""
    new, _, kind, layout, size = telling(state, options, batch)
    return new, kind, layout, size


def a_state() -> Tree:
    return {
        "w": torch.arange(9.0).view(3, 3).clone(),
        "v": collections.OrderedDict(a=torch.ones(2, 3), b=torch.arange(4.0)),
        "l": [torch.full((3, 3), 2.0), (torch.zeros(()), None), Pair(torch.ones(4), 1)],
        "c": {"n": 2, "f": 0.5},
    }


def apart(tree: Tree) -> Tree:
    """A copy whose tensors share nothing, in the same layouts."""

    def copy(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        return y.copy_(x.detach())

    return optree.tree_map(copy, tree)
