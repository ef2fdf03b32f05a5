"""Optimizers in the form of Optax: a transformation turns gradients into updates, and updates are added to parameters.

Whatever has `init(params)` and `update(grads, state, params) -> (updates, state)` and computes with torch is one:
functions of one's own, and those of a library such as TorchOpt.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp import pytree
from fdp.optim.argument_checks import alike, mismatch, names, optimizer_error, other_structure, trains, value_text
from fdp.optim.optimizer import Optimizer
from fdp.pytorch.tensors import storage_id
from fdp.pytree import Tree
from fdp.state.containers import container_of
from fdp.tracebacks import hiding_frames

_STATE = "transformation"

UpdateFunction = Callable[[Tree, Tree, Tree], Any]


class GradientTransformation(NamedTuple):
    """A pair of pure functions that turns gradients into updates, in the form of Optax.

    Attributes:
        init: `init(params) -> state`, a pytree of tensors. A count is a tensor, too: a number would be part of the
            graph of a step.
        update: `update(grads, state, params) -> (updates, state)`. Updates have the structure of the parameters, and
            are what is added to them: for gradient descent, `-lr * grad`.

    References:
        `optax.GradientTransformation`.
    """

    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]


@hiding_frames
def from_transform(transform: object) -> Optimizer:
    """Make an optimizer of a gradient transformation in the form of Optax, written in torch.

    Args:
        transform: a `GradientTransformation`, or any object or pair with `init(params) -> state` and
            `update(grads, state, params) -> (updates, state)`. `params` may be left out, or a keyword.

    Returns:
        An `Optimizer`, whose `update` returns new parameters. `opt_state["transformation"]` is the state of the
        transformation. Each parameter becomes `parameter + update`, in the dtype of the parameter.

    Raises:
        ArgumentError: there are no two such functions; later: a gradient is None, updates do not mirror the parameters,
            or the state changes its structure, or holds a number.

    Example:
        >>> import optree
        >>> def momentum(lr, decay):
        ...     def init(params):
        ...         return optree.tree_map(torch.zeros_like, params)
        ...
        ...     def update(grads, state, params):
        ...         state = optree.tree_map(lambda m, g: decay * m + g, state, grads)
        ...         return optree.tree_map(lambda m: -lr * m, state), state
        ...
        ...     return GradientTransformation(init, update)
        >>> optimizer = from_transform(momentum(lr=0.5, decay=0.5))
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> opt_state = optimizer.init(params)
        >>> for _ in range(2):
        ...     params, opt_state = optimizer.update({"w": torch.tensor([1.0, 1.0])}, opt_state, params)
        >>> params["w"], opt_state["transformation"]["w"]
        (tensor([-0.2500,  0.7500]), tensor([1.5000, 1.5000]))

    References:
        DeepMind et al., The DeepMind JAX Ecosystem, 2020 (Optax).
    """
    transform = _transformation("from_transform", transform)
    call = _caller(transform.update)

    def init(params: Tree) -> Tree:
        state = transform.init(params)
        _refuse_numbers(state)
        return {_STATE: _of_its_own(state, params)}

    @torch.no_grad()
    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        if not isinstance(opt_state, dict) or set(opt_state) != {_STATE}:
            found = sorted(map(str, opt_state)) if isinstance(opt_state, dict) else value_text(opt_state)
            what = f"opt_state must have the key {_STATE!r} alone, but is {found}."
            raise optimizer_error(what, "make opt_state with init(params) of this optimizer, and keep its structure.")
        _check_gradients(grads, params)
        updates, state = _pair(call(grads, opt_state[_STATE], params))
        _check_state(opt_state[_STATE], state)
        return apply_updates(params, updates), {_STATE: state}

    return Optimizer(init, update, f"from_transform({_name(transform)})")


@hiding_frames
def chain(*transforms: Any) -> GradientTransformation:
    """Apply several gradient transformations, one after another.

    Args:
        transforms: each gets the updates of the one before it; the first gets the gradients.

    Returns:
        A `GradientTransformation`, whose state is a tuple of theirs. Of none it changes nothing.

    Raises:
        ArgumentError: something is no transformation.

    Example:
        >>> scaled = lambda factor: GradientTransformation(lambda p: (), lambda g, s, p: (factor * g, s))
        >>> optimizer = from_transform(chain(scaled(2.0), scaled(-0.5)))
        >>> w = torch.tensor(1.0)
        >>> optimizer.update(torch.tensor(3.0), optimizer.init(w), w)[0]
        tensor(-2.)

    References:
        `optax.chain`.
    """
    parts = [_transformation("chain", each) for each in transforms]
    calls = [_caller(each.update) for each in parts]

    def init(params: Tree) -> Tree:
        return tuple(each.init(params) for each in parts)

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        if not isinstance(state, tuple) or len(state) != len(parts):
            what = f"the state of chain is a tuple of {len(parts)}, not {value_text(state)}."
            raise optimizer_error(what, "make it with init(params) of this chain, and keep its structure.")
        states = []
        for call, own in zip(calls, state, strict=True):
            grads, own = _pair(call(grads, own, params))
            states.append(own)
        return grads, tuple(states)

    return GradientTransformation(init, update)


@torch.no_grad()
@hiding_frames
def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Add updates to parameters.

    Args:
        params: a pytree of tensors.
        updates: a pytree of the same structure, with tensors of the same shapes. A leaf that is None leaves its
            parameter as it is.

    Returns:
        The new parameters, each with the dtype of the old one; without a graph of autograd.

    Raises:
        ArgumentError: the trees do not match, named by key path.

    Example:
        >>> apply_updates({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, -0.5])})
        {'w': tensor([1.5000, 1.5000])}

    References:
        `optax.apply_updates`.
    """
    leaves, spec = pytree.flatten(params, none_is_leaf=True)
    added, added_spec = pytree.flatten(updates, none_is_leaf=True)
    if added_spec != spec:
        raise other_structure("updates", "update", updates, params, _MIRROR)
    bad, new = [], []
    for where, p, u in zip(names(params, "updates"), leaves, added, strict=True):
        if u is None:
            new.append(p)
        elif not trains(p) or not trains(u) or (u.shape, u.device) != (p.shape, p.device):
            bad.append(f"{where} is {value_text(u)} for a parameter that is {value_text(p)}")
        else:
            new.append((p.detach() + u.detach()).to(p.dtype))
    if bad:
        raise optimizer_error("Updates do not fit their parameters.", _MIRROR, bad)
    return spec.unflatten(new)


_MIRROR = "return one update for each parameter, of its shape: what is to be added to it."


def _transformation(who: str, transform: object) -> GradientTransformation:
    if isinstance(transform, Optimizer):
        what = f"{who} takes transformations, which turn gradients into updates, but {transform!r} makes parameters."
        raise optimizer_error(what, "use it as it is; fdp.optim.clipped, scheduled and averaged wrap it.")
    if isinstance(transform, torch.optim.Optimizer) or (
        isinstance(transform, type) and issubclass(transform, torch.optim.Optimizer)
    ):
        what = f"{who} takes transformations, not {value_text(transform)}."
        raise optimizer_error(what, "pass the class to fdp.optim.from_torch.")
    found: tuple[Any, Any] = (getattr(transform, "init", None), getattr(transform, "update", None))
    if found == (None, None) and isinstance(transform, tuple) and len(transform) == 2:
        found = transform
    if not all(map(callable, found)):
        what = f"{who} takes an object with the functions init and update, not {value_text(transform)}."
        raise optimizer_error(what, "fdp.optim.GradientTransformation(init, update).")
    if str(getattr(found[1], "__module__", "")).startswith("optax"):
        what = f"{who} takes transformations that compute with torch, and those of Optax compute with JAX."
        raise optimizer_error(what, "use fdp.optim.from_torch, or write the transformation in torch.")
    return GradientTransformation(*found)


def _caller(update: Callable[..., Any]) -> UpdateFunction:
    """Call an `update` as it is declared: with parameters by place or by name, or without."""
    try:
        declared = inspect.signature(update).parameters
    except (TypeError, ValueError):
        return update
    kinds = [each.kind for each in declared.values()]
    places = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    by_place = places > 2 or inspect.Parameter.VAR_POSITIONAL in kinds
    by_name = "params" in declared and declared["params"].kind is inspect.Parameter.KEYWORD_ONLY
    # TorchOpt's functions change their arguments unless they are told not to.
    keywords = {"inplace": False} if "inplace" in declared else {}

    def call(grads: Tree, state: Tree, params: Tree) -> Any:
        if by_name:
            return update(grads, state, params=params, **keywords)
        return update(grads, state, params, **keywords) if by_place else update(grads, state, **keywords)

    return call


def _pair(made: object) -> tuple[Tree, Tree]:
    if not isinstance(made, tuple) or len(made) != 2:
        what = f"update of a transformation returned {value_text(made)}, not a pair."
        raise optimizer_error(what, "return updates, state.")
    updates, state = made
    return updates, state


def _check_gradients(grads: Tree, params: Tree) -> None:
    """Each parameter has a gradient. Where `fdp.optim.partition` left one out, both are None."""
    found, spec = pytree.flatten(grads, none_is_leaf=True)
    leaves, wanted = pytree.flatten(params, none_is_leaf=True)
    if spec != wanted:
        raise mismatch(grads, params)
    pairs = zip(names(grads, "grads"), found, leaves, strict=True)
    absent = [name for name, grad, p in pairs if grad is None and p is not None]
    if absent:
        what = "A transformation takes a gradient for each parameter, but some are None."
        remedy = "leave what is not trained out of params, or give it another optimizer (fdp.optim.partition)."
        raise optimizer_error(what, remedy, [f"{name} is None" for name in absent])


def _refuse_numbers(state: Tree) -> None:
    numbers = [
        f"{name} is {value_text(leaf)}"
        for name, leaf in zip(pytree.leaf_names(state, "state"), pytree.leaves_of(state), strict=True)
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
    ]
    if numbers:
        what = "The state of a transformation holds numbers, and every new value would need a new trace."
        raise optimizer_error(what, "keep them as tensors: torch.zeros((), dtype=torch.int64).", numbers)


def _check_state(old: Tree, new: Tree) -> None:
    """Refuse a state that changes its structure, shapes or dtypes, which would be traced anew at each call."""
    leaves, spec = pytree.flatten(old, none_is_leaf=True)
    made, made_spec = pytree.flatten(new, none_is_leaf=True)
    what = "update of a transformation returned a state unlike the one that it was given."
    remedy = "let init make a state of the structure, shapes and dtypes that update returns."
    if made_spec != spec:
        raise optimizer_error(what, remedy, [f"it was: {spec}", f"it is: {made_spec}"])
    bad = [
        f"{name} was {value_text(one)}, and is {value_text(two)}"
        for name, one, two in zip(names(old, "state"), leaves, made, strict=True)
        if isinstance(one, Tensor) and not alike(one, two)
    ]
    if bad:
        raise optimizer_error(what, remedy, bad)


def _of_its_own(state: Tree, params: Tree) -> Tree:
    """A state that shares no memory with the parameters, as an average does that begins with them."""
    taken = {_memory(p) for p in pytree.leaves_of(params) if isinstance(p, Tensor)}

    def own(leaf: object) -> Any:
        return leaf.detach().clone() if isinstance(leaf, Tensor) and _memory(leaf) in taken else leaf

    return pytree.map_leaves(own, state)


def _memory(leaf: Tensor) -> int:
    tensor = container_of(leaf).tensor(leaf)
    return storage_id(tensor.untyped_storage()) if tensor.layout is torch.strided else id(tensor)


def _name(transform: GradientTransformation) -> str:
    """What made it, for a function in a function."""
    return str(getattr(transform.update, "__qualname__", transform.update)).split(".<locals>")[0]
