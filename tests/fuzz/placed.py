"""A step on the ranks that there are; its state may go in sharded, and come out whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.device_mesh

import fdp
import fdp.plan.buckets
import fdp.step.first_call
from fuzz.exchanges import MESHES
from fuzz.plain import Box  # fmt: skip


def mesh() -> Any:
    """The mesh of all ranks, if so many have one."""
    known = MESHES.get(torch.distributed.get_world_size()) if torch.distributed.is_initialized() else None
    if known is None:
        return None
    names, sizes = zip(*known, strict=True)
    if sizes not in _meshes:
        _meshes[sizes] = torch.distributed.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return _meshes[sizes]


_meshes: dict[Any, Any] = {}


def two_levels(always: bool) -> None:
    """Let sums over a mesh go in two levels, however small they are; or if they are large."""
    fdp.plan.buckets._TWO_LEVEL_BYTES = 0 if always else 2**18


def with_sharded_state(step: Any, again: int) -> Any:
    """The same step, of which each rank gets a part of each leaf that it can divide.

    Of the values that are gathered for a forward pass, one in `again` is gathered again for the backward pass; none if
    that is 0.
    """

    def chosen(trace: Any) -> Any:
        if not again:
            return trace(frozenset())
        gathered = [link.whole for link in trace(frozenset()).links if link.kind == "gathered"]
        return trace(frozenset(list(dict.fromkeys(gathered))[::again]))

    def call(state: Any, batch: Any) -> Any:
        usual = fdp.step.first_call.trace_step
        fdp.step.first_call.trace_step = lambda *args: usual(*args[:-1], chosen)
        try:
            new, results = step(placed(state), batch)
        finally:
            fdp.step.first_call.trace_step = usual
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
    return fdp.shard(tree, min_size=0, group=mesh()) if plain else tree
