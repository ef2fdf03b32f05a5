"""Worlds of several ranks without any other rank."""

from __future__ import annotations

import math

from fdp.distributed.group import Group
from fdp.distributed.mesh import MeshDimension


def fake_group(size: int, rank: int = 0) -> Group:
    """Ranks to trace and plan for: there are no processes, and nothing can be sent."""
    return Group(None, size, rank)


def fake_mesh(*sizes: int, rank: int = 0) -> Group:
    """Ranks of a mesh, likewise; its dimensions are "hosts" and "local"."""
    places, left = [], rank
    for size in reversed(sizes):
        left, place = divmod(left, size)
        places.append(place)
    found = zip(("hosts", "local"), sizes, reversed(places), strict=True)
    return Group(None, math.prod(sizes), rank, tuple(MeshDimension(*each) for each in found))
