"""Tensors without values, their mode: which is at work, and telling inductor of one.

Private to torch: the classes of `torch._subclasses.fake_tensor`, and what they raise where a value would decide.
`torch._guards.detect_fake_mode(values)` is the mode that a trace, the stack of modes or some of these values have;
inductor asks it, and `torch._guards.tracing(TracingContext(mode))` is how it is told.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "fake_mode_at_work",
    "traced_with",
]


def fake_mode_at_work(values: object = None) -> FakeTensorMode | None:
    """The mode for tensors without values that is entered here, or that some values belong to; None if there is none.

    Args:
        values: nested as they like, or None.
    """
    return torch._guards.detect_fake_mode(values)


def traced_with(mode: FakeTensorMode | None) -> AbstractContextManager[object]:
    """A context in which compilers find a mode for tensors without values.

    Raises:
        AttributeError: they are not told in this way on this torch.
    """
    return torch._guards.tracing(torch._guards.TracingContext(mode))
