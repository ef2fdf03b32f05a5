"""Where a module holds its parameters, buffers, submodules and hooks.

Private to torch: dicts, which are attributes of each module by these names. The public ways give copies, and leave out
what is None or held twice; for hooks there is none. Whether a module still has them is looked at once, when this is
imported.
"""

from __future__ import annotations

from typing import Any

import torch

from fdp.pytorch.parts import unsupported_torch

TENSOR_REGISTRIES = ("_parameters", "_buffers")
"""The attributes that hold a module's tensors."""

SUBMODULES = "_modules"
"""The attribute that holds a module's submodules."""

REGISTRIES = (*TENSOR_REGISTRIES, SUBMODULES)

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes that hold what is called around the forward function of a module, and around its gradient."""

_GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
GLOBAL_HOOKS = tuple(getattr(torch.nn.modules.module, name, None) for name in _GLOBAL_HOOKS)
"""What is called around those of all modules: dicts, which stay the same objects."""


def tensor_registries(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """The parameters and the buffers of a module itself, by name; an entry may be None."""
    return tuple(getattr(module, name) for name in TENSOR_REGISTRIES)


_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether something is called when a tensor gets a gradient.

    (Private to torch: attributes of each tensor, None until the first hook is registered, then dicts.)
    """
    return any(getattr(tensor, name) for name in _GRADIENT_HOOKS)


def refuse_other_registries(module: torch.nn.Module) -> None:
    """Refuse a torch whose modules hold their tensors, submodules and hooks in another way.

    Args:
        module: any.

    Raises:
        FdpError: they do.
    """
    gone = [name for name in (*REGISTRIES, *HOOKS) if not isinstance(vars(module).get(name), dict)]
    gone = [f"a torch.nn.Module has no {name}" for name in gone]
    gone += [f"a tensor has no {name}" for name in _GRADIENT_HOOKS if not hasattr(torch.Tensor, name)]
    gone += [
        f"torch has no dict {n}" for n, x in zip(_GLOBAL_HOOKS, GLOBAL_HOOKS, strict=True) if not isinstance(x, dict)
    ]
    if gone:
        raise unsupported_torch("importing fdp", gone)


refuse_other_registries(torch.nn.Module())
