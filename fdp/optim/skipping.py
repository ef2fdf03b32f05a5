"""Updates that are skipped when a gradient is infinite or NaN: computed and discarded, on all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fdp import pytree
from fdp.optim.argument_checks import alike, names, optimizer_error, value_text
from fdp.optim.clipping import checked_gradients, norm_of
from fdp.optim.entries import added, check_optimizer, parted
from fdp.optim.optimizer import Optimizer
from fdp.pytree import Tree
from fdp.tracebacks import hiding_frames

_SKIPPED = "skipped"


@hiding_frames
def skip_nonfinite(optimizer: Optimizer) -> Optimizer:
    """Let an optimizer skip each update for which a gradient is infinite or NaN.

    Parameters and state stay as they are to the bit then. Since gradients are the mean over ranks, all ranks skip
    alike. It costs memory: the old parameters and state are there until the new ones are chosen or not. With a loss
    scale, take `loss_scaled`, which skips by itself.

    Args:
        optimizer: what is updated. Inside, `scheduled` does not count a skipped update and `clipped` never meets a
            gradient that is not finite.

    Returns:
        An `Optimizer` whose state has the entry `skipped`, how many updates were (a 0-dim int64 tensor on the CPU),
        beside those of the one inside.

    Raises:
        ArgumentError: `optimizer` is no `Optimizer`; later: a gradient is no dense tensor of floating point numbers, or
            the state is of other making.

    Example:
        >>> optimizer = skip_nonfinite(Optimizer(lambda p: {}, lambda g, s, p: (p - g, s)))
        >>> w = torch.tensor(1.0)
        >>> w, opt_state = optimizer.update(torch.tensor(float("nan")), optimizer.init(w), w)
        >>> w, opt_state
        (tensor(1.), {'skipped': tensor(1)})

    References:
        `optax.apply_if_finite`.
    """
    check_optimizer("skip_nonfinite", optimizer)

    def init(params: Tree) -> Tree:
        return added(
            "skip_nonfinite", optimizer.init(params), {_SKIPPED: torch.zeros((), dtype=torch.int64, device="cpu")}
        )

    @torch.no_grad()
    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        inner, own = parted("skip_nonfinite", opt_state, (_SKIPPED,))
        skip = overflow(checked_gradients("skip_nonfinite", "grads", grads))
        new_params, new_inner = optimizer.update(grads, inner, params)
        params = unless(skip, "skip_nonfinite", "params", params, new_params)
        inner = unless(skip, "skip_nonfinite", "opt_state", inner, new_inner)
        return params, {**inner, _SKIPPED: own[_SKIPPED] + skip.to(own[_SKIPPED])}

    return Optimizer(init, update, f"skip_nonfinite({optimizer!r})")


def overflow(leaves: list[Tensor]) -> Tensor:
    """Whether any number of the leaves is infinite or NaN: a 0-dim bool, on the device of the first."""
    # Not the absolute value of a complex number, which overflows sooner.
    parts = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves if leaf.numel()]
    if not parts:
        return torch.zeros((), dtype=torch.bool, device="cpu")
    return norm_of(parts, math.inf).isfinite().logical_not()


def unless(skip: Tensor, who: str, root: str, old: Tree, new: Tree) -> Tree:
    """The old tree if an update is to be skipped, else the new one.

    Args:
        skip: a 0-dim bool.
        who: the wrapper that skips.
        root: what the tree is called in messages.
        old: what came in.
        new: what the optimizer inside made of it.

    Returns:
        A tree; leaves that are the same object in both stay it.

    Raises:
        ArgumentError: the trees do not match.
    """
    leaves, spec = pytree.flatten(old, none_is_leaf=True)
    made, made_spec = pytree.flatten(new, none_is_leaf=True)
    if made_spec != spec:
        what = f"update of the optimizer inside {who} made of {root}, {spec}, a tree of another structure:"
        raise optimizer_error(what, "return trees of the structure that came in.", [str(made_spec)])
    at = everywhere(skip)
    bad, chosen = [], []
    for where, a, b in zip(names(old, root), leaves, made, strict=True):
        if a is b:
            chosen.append(a)
        elif alike(a, b):
            chosen.append(torch.where(at(a.device), a.detach(), b.detach()))
        elif isinstance(a, Tensor) or isinstance(b, Tensor) or a != b:
            bad.append(f"{where} was {value_text(a)}, and is {value_text(b)}")
        else:
            chosen.append(a)
    if bad:
        what = f"update of the optimizer inside {who} changed what cannot be chosen by a tensor:"
        raise optimizer_error(what, "return tensors of the shapes and dtypes that came in.", bad)
    return spec.unflatten(chosen)


def everywhere(flag: Tensor) -> Callable[[Any], Tensor]:
    """A function from a device to a tensor, which is copied once to each device."""
    copies = {flag.device: flag}

    def at(device: Any) -> Tensor:
        if device not in copies:
            copies[device] = flag.to(device)
        return copies[device]

    return at
