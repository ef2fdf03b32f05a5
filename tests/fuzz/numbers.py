"""Numbers that programs begin with, and the generators that they draw from."""

from __future__ import annotations

from typing import Any

import torch


def numbers(shape: Any, seed: int, exact: bool) -> torch.Tensor:
    """Small whole numbers, or numbers between -1 and 1, without disturbing the generator; the same on any device."""
    generator = torch.Generator().manual_seed(seed)
    if exact:
        found = torch.randint(-3, 4, shape, generator=generator, device="cpu").to(torch.float32)
    else:
        found = torch.rand(shape, generator=generator, device="cpu") * 2 - 1
    return found.to(torch.get_default_device())


def random_state() -> list[torch.Tensor]:
    """Where the generators are: that of the CPU, and that of the card if programs run on one."""
    on_card = torch.get_default_device().type == "cuda"
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_card else [])]


def set_random_state(state: list[torch.Tensor]) -> None:
    """Go back there."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1])
