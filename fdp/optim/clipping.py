"""Clipping by the global norm: all gradients are scaled by one factor, as one vector."""

from __future__ import annotations

import torch
from torch import Tensor

from fdp import pytree
from fdp.optim.argument_checks import names, optimizer_error, value_text
from fdp.optim.entries import check_optimizer
from fdp.optim.optimizer import Optimizer
from fdp.pytorch.tensors import is_transformed
from fdp.pytree import Tree
from fdp.tracebacks import hiding_frames

# Where torch has kernels for lists of tensors.
_LIST_KERNELS = ("cpu", "cuda", "xpu")


@hiding_frames
def global_norm(tree: Tree, norm_type: float = 2.0) -> Tensor:
    """Compute the norm of all tensors of a tree together, as if they were one vector.

    Args:
        tree: a pytree of tensors of real or complex floating point numbers; `None` counts for nothing.
        norm_type: which norm, 2 for the Euclidean one, `math.inf` for the largest absolute value.

    Returns:
        A 0-dim tensor, bit for bit what `torch.nn.utils.get_total_norm` makes of the leaves in flattening order (dicts
        by sorted keys). It is infinite or NaN if a leaf is, and 0 for a tree without leaves. It can be differentiated,
        and batched by `torch.vmap`.

    Raises:
        ArgumentError: a leaf is something else, named by key path; `norm_type` is no positive number.

    Example:
        >>> global_norm({"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0), "frozen": None})
        tensor(5.)
    """
    _check_norm_type("global_norm", norm_type)
    return norm_of(checked_gradients("global_norm", "tree", tree), norm_type)


@hiding_frames
def clip_by_global_norm(grads: Tree, max_norm: float | Tensor, norm_type: float = 2.0) -> tuple[Tree, Tensor]:
    """Scale all gradients by one factor, such that their global norm is at most `max_norm`.

    Bit for bit `torch.nn.utils.clip_grad_norm_` of the leaves in flattening order (dicts by sorted keys), out of place.
    As there, an infinite norm makes finite gradients zero and infinite ones NaN, and a norm that is NaN makes all
    of them NaN. There is no `error_if_nonfinite`, since a graph cannot raise: look at the norm that is returned,
    or let `skip_nonfinite` skip such updates. It can be differentiated, and under `torch.vmap` it clips the gradients
    of each sample by themselves.

    Args:
        grads: a pytree of gradients, averaged over ranks if all of them are meant; `None` stays `None`.
        max_norm: a positive number, or a 0-dim tensor, which may change from call to call.
        norm_type: which norm, 2 for the Euclidean one, `math.inf` for the largest absolute value.

    Returns:
        The gradients, in their own dtypes, and their norm before, a 0-dim tensor.

    Raises:
        ArgumentError: `max_norm` or `norm_type` is no such number, or a gradient is no dense tensor of floating point
            numbers.

    Example:
        >>> grads, norm = clip_by_global_norm({"w": torch.tensor([3.0, 4.0])}, max_norm=1.0)
        >>> grads["w"], norm
        (tensor([0.6000, 0.8000]), tensor(5.))
    """
    _check_max_norm("clip_by_global_norm", max_norm)
    _check_norm_type("clip_by_global_norm", norm_type)
    leaves = checked_gradients("clip_by_global_norm", "grads", grads)
    norm = norm_of(leaves, norm_type)
    if isinstance(max_norm, Tensor):
        max_norm = max_norm.to(norm)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return multiplied(grads, factor), norm


@hiding_frames
def clipped(optimizer: Optimizer, max_norm: float, norm_type: float = 2.0) -> Optimizer:
    """Let an optimizer clip its gradients by their global norm before each update.

    It adds nothing to the state. See `clip_by_global_norm` for what it does to gradients that are not finite, and for
    the norm itself, if you want to log it.

    Args:
        optimizer: what is updated with the clipped gradients. Around `partition` the norm is that of all parts.
        max_norm: a positive number.
        norm_type: which norm, 2 for the Euclidean one, `math.inf` for the largest absolute value.

    Returns:
        An `Optimizer` with the state of the one inside.

    Raises:
        ArgumentError: `optimizer` is no `Optimizer`, or `max_norm` no positive number; from `init`: it wraps
            `loss_scaled`, whose gradients are not unscaled yet.

    Example:
        >>> optimizer = clipped(Optimizer(lambda p: {}, lambda g, s, p: (p - g, s)), max_norm=1.0)
        >>> optimizer.update(torch.tensor([3.0, 4.0]), {}, torch.zeros(2))
        (tensor([-0.6000, -0.8000]), {})
    """
    check_optimizer("clipped", optimizer)
    if isinstance(max_norm, Tensor):
        what = "clipped takes max_norm as a number: a tensor would be a constant of every step's graph."
        raise optimizer_error(what, "call fdp.optim.clip_by_global_norm(grads, max_norm) in the step.")
    _check_max_norm("clipped", max_norm)
    _check_norm_type("clipped", norm_type)

    def init(params: Tree) -> Tree:
        state = optimizer.init(params)
        if isinstance(state, dict) and "growth_tracker" in state:
            what = "clipped wraps loss_scaled, so it would clip gradients that are still multiplied by the scale."
            raise optimizer_error(what, "write loss_scaled(clipped(optimizer, max_norm)).")
        return state

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        with torch.no_grad():
            grads, _ = clip_by_global_norm(grads, max_norm, norm_type)
        return optimizer.update(grads, opt_state, params)

    return Optimizer(init, update, f"clipped({optimizer!r}, max_norm={max_norm:g})")


def norm_of(leaves: list[Tensor], norm_type: float) -> Tensor:
    """The norm of tensors as one vector; 0 of none."""
    if not leaves:
        return torch.zeros((), device="cpu")
    if _take_lists(leaves):
        return torch.nn.utils.get_total_norm(leaves, norm_type, foreach=True)
    norms = [torch.linalg.vector_norm(leaf, norm_type) for leaf in leaves]
    result: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(leaves[0].device) for norm in norms]), norm_type)
    return result


def multiplied(grads: Tree, factor: Tensor) -> Tree:
    """Multiply every tensor of a tree by a 0-dim tensor, each in its own dtype and on its own device."""
    leaves, spec = pytree.flatten(grads)
    if not _take_lists([*leaves, factor]):
        products = [leaf * factor.to(leaf.device) for leaf in leaves]
    else:
        products = list(leaves)
        for device in dict.fromkeys(leaf.device for leaf in leaves):
            at = [i for i, leaf in enumerate(leaves) if leaf.device == device]
            # Private to torch, and what its optimizers call. Relied on: one tensor multiplies each of a list.
            there = torch._foreach_mul([leaves[i] for i in at], factor.to(device))
            for i, product in zip(at, there, strict=True):
                products[i] = product
    # A 0-dim leaf takes part in the promotion of types.
    return spec.unflatten([p.to(leaf.dtype) for p, leaf in zip(products, leaves, strict=True)])


def _take_lists(tensors: list[Tensor]) -> bool:
    """Whether one kernel may take all the tensors: nothing differentiates through it, and no `vmap` is around it.

    Not left to torch, which asks for the type of the tensors: the fake ones of a trace would take another way than
    real ones, with other bits.
    """
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return not differentiated and all(t.device.type in _LIST_KERNELS and not is_transformed(t) for t in tensors)


def checked_gradients(who: str, root: str, tree: Tree) -> list[Tensor]:
    """The leaves of a tree of gradients, `None` left out; refused if one is something else."""
    leaves = pytree.leaves_of(tree)
    bad = [
        f"{name} is {value_text(leaf)}"
        for name, leaf in zip(names(tree, root), pytree.flatten(tree, none_is_leaf=True)[0], strict=True)
        if leaf is not None and not _is_dense(leaf)
    ]
    if bad:
        raise optimizer_error(f"{who} takes dense tensors of floating point numbers.", "pass gradients, or None.", bad)
    return leaves


def _is_dense(leaf: object) -> bool:
    """Whether a leaf is a dense tensor of real or complex floating point numbers."""
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and (leaf.is_floating_point() or leaf.is_complex())


def _check_max_norm(who: str, max_norm: object) -> None:
    if isinstance(max_norm, Tensor):
        good = max_norm.dim() == 0 and max_norm.is_floating_point()
    else:
        good = _is_positive(max_norm)
    if not good:
        what = f"{who} takes max_norm as a positive number or a 0-dim tensor, not {value_text(max_norm)}."
        raise optimizer_error(what, "max_norm=1.0 is a usual first value.")


def _check_norm_type(who: str, norm_type: object) -> None:
    if not _is_positive(norm_type):
        what = f"{who} takes norm_type as a positive number or math.inf, not {value_text(norm_type)}."
        raise optimizer_error(what, "leave it out for the Euclidean norm.")


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0  # which NaN is not
