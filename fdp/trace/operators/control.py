"""What conditions and loops do when a program runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def choose(condition: torch.Tensor, first: Any, second: Any, operands: Any) -> Any:
    """What torch.cond does. (Called by itself, the operator leaves Dynamo unable to compile another.)"""
    return first(*operands) if condition else second(*operands)


@dataclass(frozen=True)
class Repeated:
    """What runs the program of a loop's body.

    Attributes:
        function: the program: takes a list of the number of the time and the operands, and two functions that start
            messages and wait for them; it has none.
        numbers: the number of each time.
    """

    function: Callable[..., Any]
    numbers: tuple[torch.Tensor, ...]

    def __call__(self, operands: Sequence[torch.Tensor]) -> None:
        function = self.function
        for number in self.numbers:
            function([number, *operands], None, None)
