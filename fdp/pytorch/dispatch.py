"""Seeing every operator that is called, from whatever language: the base class of torch for that, and what is at work.

Private to torch: a subclass has its `__torch_dispatch__(func, types, args, kwargs)` called in place of each operator
while it is entered. Called inside of that method, operators run as they are. Under `_AutoDispatchBelowAutograd`
operators go past autograd: it records nothing, and kernels that are registered for it do not run.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

__all__ = ["TorchDispatchMode", "innermost_mode", "without_autograd_kernels", "without_innermost_mode"]

without_autograd_kernels = torch._C._AutoDispatchBelowAutograd
"""A context in which operators are called below autograd."""

innermost_mode = _get_current_dispatch_mode
"""The mode that was entered last, of those that are at work; None if there is none."""

without_innermost_mode = _pop_mode_temporarily
"""A context in which that mode is not at work."""
