"""Ranks on CUDA devices, which talk by NCCL; without a device tests that want some are skipped.

On one card any number of ranks run: NCCL is told that they are on different hosts (see `ranks`). They share the card's
time, and their messages go through the host's sockets, which is slow and otherwise the same.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

BACKEND = "cpu:gloo,cuda:nccl"
"""What `fdp.initialize` chooses where there is a card."""

needs_a_card = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device and NCCL"
)

run = functools.partial(ranks.run, backend=BACKEND)
run_fresh = functools.partial(ranks.run_fresh, backend=BACKEND)


def on_card(tree: Any) -> Any:
    """The tree with its tensors on this rank's card."""
    from fdp import pytree

    return pytree.map_leaves(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, tree)
