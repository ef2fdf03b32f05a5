"""Worlds of several ranks without any other rank."""

from __future__ import annotations

from fdp.distributed.group import Group


def fake_group(size: int, rank: int = 0) -> Group:
    """Ranks to trace and plan for: there are no processes, and nothing can be sent."""
    return Group(None, size, rank)
