"""A program for ranks of which one is there, and its comparison with the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fake_ranks import fake_group

import fdp
from fdp.compare import check_emitted
from fdp.plan import plan_trace
from fdp.runtime import Emitted


def made(step: Callable[..., Any], *args: Any, world: int = 2, **options: Any) -> tuple[Emitted, Any, Any]:
    """A program for two ranks of which one is there; the flattened arguments, and their roles."""
    transformed = fdp.data_parallel(step, group=fake_group(world), **options)
    flat, roles, (_, group, *_) = transformed._resolve(args, {})
    return Emitted(plan_trace(transformed._preparation.trace(flat, roles, group)), group), flat, roles


def check(step: Callable[..., Any], *args: Any, **options: Any) -> None:
    emitted, flat, roles = made(step, *args, **options)
    check_emitted(emitted, step, flat, roles)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
