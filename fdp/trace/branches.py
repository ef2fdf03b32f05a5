"""What torch.cond does when a program runs."""

from __future__ import annotations

from typing import Any

import torch


def choose(condition: torch.Tensor, first: Any, second: Any, operands: Any) -> Any:
    """Call one of two functions. (Called by itself, the operator leaves Dynamo unable to compile another.)"""
    return first(*operands) if condition else second(*operands)
