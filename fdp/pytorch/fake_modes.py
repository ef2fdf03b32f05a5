"""Which mode for tensors without values is at work, and telling inductor of one.

Private to torch: `torch._guards.detect_fake_mode(values)` is the mode that a trace, the stack of modes or some of these
values have; inductor asks it, and `torch._guards.tracing(TracingContext(mode))` is how it is told.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def fake_mode_at_work(values: object = None) -> Any:
    """The mode for tensors without values that is entered here, or that some values belong to; None if there is none.

    Args:
        values: nested as they like, or None.
    """
    return torch._guards.detect_fake_mode(values)


def traced_with(mode: Any) -> AbstractContextManager[Any]:
    """A context in which compilers find a mode for tensors without values.

    Raises:
        AttributeError: they are not told in this way on this torch.
    """
    return torch._guards.tracing(torch._guards.TracingContext(mode))
