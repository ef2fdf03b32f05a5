"""Meshes of the ranks of a test: one for each shape, since gloo has a thread for each process group of each."""

from __future__ import annotations

import functools

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

NAMES = ("hosts", "local", "third")


@functools.cache
def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    """The mesh of all ranks, whose dimensions have the first of these names."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[: len(sizes)])
