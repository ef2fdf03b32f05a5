"""Seeing every operator that is called, from whatever language: the base class of torch for that, and what is at work.

Private to torch: a subclass has its `__torch_dispatch__(func, types, args, kwargs)` called in place of each operator
while it is entered. Called inside of that method, operators run as they are.
"""

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

__all__ = ["TorchDispatchMode", "_get_current_dispatch_mode", "_pop_mode_temporarily"]
