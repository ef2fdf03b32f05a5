"""Training in float16: a loss scale that lives in the state, and updates that are skipped when gradients overflow."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fdp import pytree
from fdp.optim.argument_checks import names, optimizer_error, value_text
from fdp.optim.clipping import checked_gradients, multiplied
from fdp.optim.entries import added, check_optimizer, parted
from fdp.optim.optimizer import Optimizer
from fdp.optim.skipping import overflow, unless
from fdp.pytree import Tree
from fdp.tracebacks import hiding_frames

_SCALE, _TRACKER = "scale", "growth_tracker"


@hiding_frames
def loss_scaled(
    optimizer: Optimizer,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> Optimizer:
    """Let an optimizer take gradients of a scaled loss, and skip an update whose gradients are not finite.

    In the loss function the loss is multiplied by `opt_state["scale"]`, so that small gradients survive float16.
    `update` divides the averaged gradients by it, whether or not the loss was multiplied. If one of them is infinite or
    NaN, on any rank, parameters and state stay as they are to the bit, and the scale becomes `backoff_factor` as large;
    after `growth_interval` updates in a row it becomes `growth_factor` as large. Since the gradients are the mean over
    ranks, all ranks decide alike.

    Scale, decision and unscaled gradients are bit for bit those of `torch.amp.GradScaler`. Skipping costs memory: the
    old parameters and state are there until the new ones are chosen or not.

    Args:
        optimizer: what is updated with the unscaled gradients. `clipped` and `scheduled` belong inside: then the norm
            is that of unscaled gradients, and a skipped update does not count.
        init_scale: the first scale.
        growth_factor: more than 1.
        backoff_factor: between 0 and 1.
        growth_interval: a number of updates.

    Returns:
        An `Optimizer` whose state has the entries `scale` (0-dim, float32) and `growth_tracker` (0-dim, int32, updates
        since the scale changed) beside those of the one inside, on the device of the first parameter.

    Raises:
        ArgumentError: the numbers are out of range; later: gradients in float16, which lose when they are unscaled what
            the scale has saved, or a state of other making.

    Example:
        >>> optimizer = loss_scaled(Optimizer(lambda p: {}, lambda g, s, p: (p - g, s)), init_scale=4.0)
        >>> w = torch.tensor(1.0)
        >>> opt_state = optimizer.init(w)
        >>> for grad in (2.0, float("inf")):
        ...     w, opt_state = optimizer.update(torch.tensor(grad), opt_state, w)
        ...     print(w.item(), opt_state["scale"].item())
        0.5 4.0
        0.5 2.0

    References:
        Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.
    """
    check_optimizer("loss_scaled", optimizer)
    _check_numbers(init_scale, growth_factor, backoff_factor, growth_interval)

    def init(params: Tree) -> Tree:
        tensors = [leaf for leaf in pytree.leaves_of(params) if isinstance(leaf, Tensor)]
        device = tensors[0].device if tensors else None
        scale = torch.full((), init_scale, dtype=torch.float32, device=device)
        tracker = torch.zeros((), dtype=torch.int32, device=device)
        return added("loss_scaled", optimizer.init(params), {_SCALE: scale, _TRACKER: tracker})

    @torch.no_grad()
    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        inner, own = parted("loss_scaled", opt_state, (_SCALE, _TRACKER))
        scale, tracker = _check_own(own)
        leaves = checked_gradients("loss_scaled", "grads", grads)
        half = [
            f"{name} is {value_text(g)}"
            for name, g in zip(names(grads, "grads"), pytree.flatten(grads, none_is_leaf=True)[0], strict=True)
            if g is not None and g.dtype == torch.float16
        ]
        if half:
            what = "loss_scaled takes no gradients in float16, which lose small values when they are unscaled:"
            raise optimizer_error(
                what, "keep the parameters in float32, and cast them or use autocast in the loss.", half
            )
        skip = overflow(leaves).to(scale.device)
        # In float64, since GradScaler does it so: a scale need not be a power of two.
        unscaled = multiplied(grads, scale.double().reciprocal().float())
        new_params, new_inner = optimizer.update(unscaled, inner, params)
        params = unless(skip, "loss_scaled", "params", params, new_params)
        inner = unless(skip, "loss_scaled", "opt_state", inner, new_inner)
        scale, tracker = _next(scale, tracker, skip, growth_factor, backoff_factor, growth_interval)
        return params, {**inner, _SCALE: scale, _TRACKER: tracker}

    return Optimizer(init, update, f"loss_scaled({optimizer!r}, init_scale={init_scale:g})")


def _next(
    scale: Tensor, tracker: Tensor, skip: Tensor, growth: float, backoff: float, interval: int
) -> tuple[Tensor, Tensor]:
    """The arithmetic of `torch._amp_update_scale_`, which is not public: products in float64."""
    in_a_row = tracker + 1
    grows = in_a_row == interval
    grown = (scale.double() * growth).float()
    grown = torch.where(grows & grown.isfinite(), grown, scale)
    scale = torch.where(skip, (scale.double() * backoff).float(), grown)
    return scale, torch.where(skip | grows, torch.zeros_like(tracker), in_a_row)


def _check_own(own: dict[str, Any]) -> tuple[Tensor, Tensor]:
    for key, dtype in ((_SCALE, torch.float32), (_TRACKER, torch.int32)):
        value = own[key]
        if not isinstance(value, Tensor) or value.dim() or value.dtype != dtype:
            what = f"opt_state[{key!r}] must be a 0-dim {dtype} tensor, but is {value_text(value)}."
            raise optimizer_error(what, f"opt_state[{key!r}] = torch.tensor(value, dtype={dtype})")
    return own[_SCALE], own[_TRACKER]


def _check_numbers(init_scale: Any, growth: Any, backoff: Any, interval: Any) -> None:
    for name, value, good, range_ in (
        ("init_scale", init_scale, _number(init_scale) and 0 < init_scale < 3.4e38, "a positive number"),
        ("growth_factor", growth, _number(growth) and growth > 1, "a number above 1"),
        ("backoff_factor", backoff, _number(backoff) and 0 < backoff < 1, "a number between 0 and 1"),
        ("growth_interval", interval, type(interval) is int and interval > 0, "a positive int"),
    ):
        if not good:
            raise optimizer_error(f"loss_scaled takes {name} as {range_}, not {value_text(value)}.", "leave it out.")


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
