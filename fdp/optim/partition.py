"""Parameter groups: each part of the parameters has an optimizer of its own, chosen by name and leaf."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from fdp import pytree
from fdp.optim.argument_checks import check_gradient, mismatch, names, optimizer_error, trains, value_text
from fdp.optim.entries import check_optimizer
from fdp.optim.optimizer import Optimizer
from fdp.pytree import Tree
from fdp.state.containers import bare
from fdp.tracebacks import hiding_frames


@hiding_frames
def partition(label: Callable[[str, Any], str] | Tree, optimizers: Mapping[str, Optimizer]) -> Optimizer:
    """Give each part of the parameters an optimizer of its own, as `torch.optim` does with parameter groups.

    Bit for bit the class with groups of the same parameters, where the optimizers are of one class; they may be of any,
    such as Muon for matrices and AdamW for the rest. Each learning rate has its place in the state,
    `opt_state["parts"]["decay"]["lr"]`.

    Args:
        label: `label(path, leaf)` returns a key of `optimizers` for each parameter: `path` is the name of the leaf,
            the keys that lead to it joined by dots (for the parameters of `from_module` the module's own names,
            "layers.0.bias"), and `leaf` a tensor, of which shape, dtype and device may be asked, not values. Or a
            pytree of such keys, with the structure of the parameters.
        optimizers: by key. Wrappers may be inside or around: `clipped` around it takes the norm of all parts,
            `scheduled` belongs inside, `loss_scaled` around.

    Returns:
        An `Optimizer`; its state is `{"parts": {key: state}}`. Each optimizer sees the tree of parameters with `None`
        in place of those of other parts. Leaves that cannot be trained (integers) are returned as they are.

    Raises:
        ArgumentError: what was given is no optimizer; from `init` and `update`: a label that is no key, with every leaf
            that has one.

    Example:
        >>> import torch
        >>> from fdp.optim import from_torch
        >>> optimizer = partition(
        ...     lambda path, leaf: "rest" if path.endswith("bias") else "decay",
        ...     {
        ...         "decay": from_torch(torch.optim.SGD, lr=0.5, weight_decay=1.0),
        ...         "rest": from_torch(torch.optim.SGD, lr=0.5),
        ...     },
        ... )
        >>> params = {"0.weight": torch.ones(2), "0.bias": torch.ones(2)}
        >>> grads = {name: torch.zeros(2) for name in params}
        >>> optimizer.update(grads, optimizer.init(params), params)[0]
        {'0.weight': tensor([0.5000, 0.5000]), '0.bias': tensor([1., 1.])}

    References:
        `optax.partition` (formerly `multi_transform`).
    """
    if not isinstance(optimizers, Mapping) or not optimizers:
        what = f"partition takes a dict of optimizers, not {value_text(optimizers)}."
        raise optimizer_error(what, 'partition(label, {"decay": optimizer_a, "rest": optimizer_b}).')
    optimizers = dict(optimizers)
    for optimizer in optimizers.values():
        check_optimizer("partition", optimizer)

    def init(params: Tree) -> Tree:
        parts = _parts(label, optimizers, params)
        states = {}
        for key, optimizer in optimizers.items():
            states[key] = optimizer.init(parts.tree(key, params))
            if isinstance(states[key], dict) and "growth_tracker" in states[key]:
                what = f"partition wraps loss_scaled for {key!r}, so a part would have a loss scale of its own."
                raise optimizer_error(what, "write loss_scaled(partition(...)), with one scale for the loss.")
        return {"parts": states}

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        if pytree.structure_of(grads, none_is_leaf=True) != pytree.structure_of(params, none_is_leaf=True):
            raise mismatch(grads, params)
        given = opt_state["parts"] if isinstance(opt_state, dict) and set(opt_state) == {"parts"} else opt_state
        if given is opt_state or not isinstance(given, dict) or given.keys() != optimizers.keys():
            what = f"opt_state must be {{'parts': one state for each of {sorted(map(str, optimizers))}}}."
            raise optimizer_error(what, "make opt_state with init(params) of this partition, and keep its structure.")
        parts = _parts(label, optimizers, params)
        leaves, spec = pytree.flatten(params, none_is_leaf=True)
        grad_leaves = pytree.flatten(grads, none_is_leaf=True)[0]
        for i, (key, g) in enumerate(zip(parts.keys, grad_leaves, strict=True)):
            if key is None and g is not None:
                check_gradient(i, params, leaves[i], g)
        states = {}
        for key, optimizer in optimizers.items():
            mine = parts.tree(key, grads), given[key], parts.tree(key, params)
            new, states[key] = optimizer.update(*mine)
            made = pytree.flatten(new, none_is_leaf=True)[0]
            leaves = [n if k == key else old for k, n, old in zip(parts.keys, made, leaves, strict=True)]
        return spec.unflatten(leaves), {"parts": states}

    inside = ", ".join(f"{key!r}: {optimizer!r}" for key, optimizer in optimizers.items())
    return Optimizer(init, update, f"partition({{{inside}}})")


@dataclass(frozen=True)
class _Parts:
    """Which optimizer each leaf belongs to; None for leaves that cannot be trained."""

    keys: tuple[Any, ...]

    def tree(self, key: object, tree: Tree) -> Tree:
        """A tree with None in place of the leaves of other parts."""
        leaves, spec = pytree.flatten(tree, none_is_leaf=True)
        return spec.unflatten([leaf if k == key else None for k, leaf in zip(self.keys, leaves, strict=True)])


def _parts(label: object, optimizers: Mapping[Any, Optimizer], params: Tree) -> _Parts:
    params = bare(params)  # containers are no part of a path
    leaves, spec = pytree.flatten(params, none_is_leaf=True)
    if callable(label):
        found = [label(path, leaf) if trains(leaf) else None for path, leaf in zip(_paths(params), leaves, strict=True)]
    else:
        try:
            found = spec.flatten_up_to(label)
        except ValueError as error:
            what = f"the tree of labels does not have the structure of the parameters: {error}."
            raise optimizer_error(
                what, "pass a tree of keys that mirrors params, or a function of path and leaf."
            ) from error
    bad = [
        f"{where}: {value_text(key)}"
        for where, key, leaf in zip(names(params, "params"), found, leaves, strict=True)
        if trains(leaf) and not (isinstance(key, Hashable) and key in optimizers)
    ]
    if bad:
        what = f"partition has optimizers for {sorted(map(str, optimizers))}, and leaves with other labels:"
        raise optimizer_error(what, "return one of these keys for every leaf.", bad)
    return _Parts(tuple(key if trains(leaf) else None for key, leaf in zip(found, leaves, strict=True)))


def _paths(params: Tree) -> list[str]:
    """Name each leaf by the keys that lead to it, joined by dots."""
    return [
        ".".join(str(getattr(entry, "field", getattr(entry, "name", entry.entry))) for entry in accessor)
        for accessor in pytree.structure_of(params, none_is_leaf=True).accessors()
    ]
