"""Seeing every operator that is called, from whatever language: the base class of torch for that.

Private to torch: a subclass has its `__torch_dispatch__(func, types, args, kwargs)` called in place of each operator
while it is entered. Called inside of that method, operators run as they are.
"""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
