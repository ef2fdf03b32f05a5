"""The checks of `update`'s arguments, and the errors of fdp.optim."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fdp import pytree
from fdp.errors import ArgumentError, build_message
from fdp.pytree import Tree


def mismatch(grads: Tree, params: Tree) -> ArgumentError:
    """The error for gradients and parameters of different structures, with the key paths that differ."""
    remedy = "pass the gradients that fdp.value_and_grad gives for these params; None where there is none."
    return other_structure("grads", "gradient", grads, params, remedy)


def other_structure(root: str, each: str, tree: Tree, params: Tree, remedy: str) -> ArgumentError:
    """The error for a tree that does not have the structure of the parameters, with the key paths that differ.

    Args:
        root: what the tree is called in messages.
        each: what it holds for a parameter.
        tree: it.
        params: the parameters.
        remedy: what to do.

    Returns:
        The error.
    """
    have, want = names(tree, ""), names(params, "")
    offenders = [f"params{name} has no {each}" for name in want if name not in have]
    offenders += [f"{root}{name} has no parameter" for name in have if name not in want]
    if not offenders:  # the same paths, through containers of other types
        specs = (pytree.structure_of(one, none_is_leaf=True) for one in (tree, params))
        offenders = [f"{name}: {spec}" for name, spec in zip((root, "params"), specs, strict=True)]
    return optimizer_error(f"The trees {root} and params do not match.", remedy, offenders)


def checked_hyperparameters(
    cls: type, held: dict[str, Tree], opt_state: Tree, kernel_device: torch.device | None = None
) -> dict[str, Tree]:
    """Take the hyperparameters out of an optimizer's state.

    Args:
        cls: the class that the state is for.
        held: the hyperparameters that live in the state, with their first values.
        opt_state: what `update` was given.
        kernel_device: the device on which kernels read them there; None if some code reads them as numbers.

    Returns:
        The value of each hyperparameter of `held`, a tree of 0-dim tensors on the CPU or that device.

    Raises:
        ArgumentError: keys, structures or tensors are not those that `init` makes.
    """
    expected = {*held, "state"}
    if not isinstance(opt_state, dict) or set(opt_state) != expected:
        found = sorted(map(str, opt_state)) if isinstance(opt_state, dict) else value_text(opt_state)
        raise optimizer_error(f"opt_state must have the keys {sorted(expected)}, but is {found}.", remake(cls))
    for name, first in held.items():
        root, value = f"opt_state[{name!r}]", opt_state[name]
        if pytree.structure_of(first) != pytree.structure_of(value):
            what = f"{root} no longer has the structure of {first!r}, which it was made from."
            raise optimizer_error(what, remake(cls))
        for where, t in zip(names(value, root), pytree.leaves_of(value), strict=True):
            if not isinstance(t, Tensor):
                # A number would be frozen into the graph, and every new value would trace again.
                what = f"{where} is {value_text(t)}, not a tensor: every new value would need a new trace."
                number = t if isinstance(t, (int, float)) else "value"
                raise optimizer_error(what, f"{where} = torch.tensor({number}, dtype=torch.float64)")
            if t.dim() or not t.is_floating_point() or (t.device.type != "cpu" and t.device != kernel_device):
                # Read as a number, from a device, it would make each update wait for all that the device has to do.
                what = f"{where} must be a 0-dim floating point tensor on the CPU, but is {value_text(t)}."
                raise optimizer_error(what, f"{where} = value.reshape(()).double().cpu()")
    return {name: opt_state[name] for name in held}


def check_gradient(i: int, params: Tree, p: Any, g: Any) -> None:
    """Refuse a gradient that is not like its parameter: torch would take some silently, and name others badly.

    Args:
        i: which leaf of `params` this is.
        params: the whole tree, for the name of the leaf.
        p: the parameter.
        g: its gradient, not None.

    Raises:
        ArgumentError: with the key path of the gradient.
    """
    if not isinstance(g, Tensor) or not trains(p):
        what = f"{names(params, 'grads')[i]} is {value_text(g)} for a parameter that is {value_text(p)}."
        raise optimizer_error(what, "use None for a parameter that is not trained.")
    if g.layout != torch.strided or (g.shape, g.dtype, g.device) != (p.shape, p.dtype, p.device):
        what = f"{names(params, 'grads')[i]} is {value_text(g)}, but the parameter is {value_text(p)}."
        raise optimizer_error(what, "pass the gradients of these params, dense and of their dtype.")


def check_state(cls: type, i: int, params: Tree, p: Tensor, state: Any, dampened: bool, fused: bool) -> None:
    """Refuse a parameter's state that its class did not make: the kernels do not look.

    Args:
        cls: the class.
        i: which leaf of `params` this is.
        params: the whole tree, for the name of the leaf.
        p: the parameter.
        state: its state.
        dampened: whether the state says if the first gradient has been seen.
        fused: whether a fused kernel will read the state.

    Raises:
        ArgumentError: with the key path of the state.
    """
    where = "opt_state['state']"
    ours = isinstance(state, dict) and all(isinstance(v, Tensor) for v in state.values())
    if not ours or (dampened and "started" not in state):
        what = f"{names(params, where)[i]} is {value_text(state)}, not what {cls.__name__} made."
        raise optimizer_error(what, remake(cls))
    for key, value in state.items() if ships_with_torch(cls) else ():
        # The fused kernels read as many elements as the parameter has, of its type, and look at neither.
        if value.dim() and (value.shape != _shape(cls, key, p) or (fused and value.dtype != p.dtype)):
            what = f"{names(params, where)[i]}[{key!r}] is {value_text(value)}, not like {value_text(p)}."
            raise optimizer_error(what, remake(cls))


def _shape(cls: type, key: str, p: Tensor) -> tuple[int, ...]:
    """The shape of an entry of a parameter's state: the parameter's own, but for what Adafactor factors."""
    shape = tuple(p.shape)
    if issubclass(cls, torch.optim.Adafactor) and len(shape) > 1:
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}.get(key, shape)
    return shape


def alike(a: Any, b: Any) -> bool:
    """Whether both are tensors of the same shape and dtype on the same device."""
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return tensors and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def trains(p: object) -> bool:
    """Whether a leaf can be trained: a tensor of real or complex floating point numbers."""
    return isinstance(p, Tensor) and (p.is_floating_point() or p.is_complex())


def ships_with_torch(cls: type) -> bool:
    """Whether a class is torch's own, so that what is known of its code and state holds."""
    return cls.__module__.startswith("torch.optim")


def optimizer_error(what: str, remedy: str, offenders: Iterable[str] = ()) -> ArgumentError:
    """The error for `what` is wrong, with what to do instead, and where it is wrong."""
    return ArgumentError(build_message(what, offenders, remedy))


def remake(cls: type) -> str:
    """The remedy for a state that `init` did not make."""
    return f"make opt_state with init(params) of this {cls.__name__}, and keep its structure."


def names(tree: Tree, root: str) -> list[str]:
    """Name each leaf by its key path; None is a leaf here, unlike in `fdp.pytree.leaf_names`."""
    return pytree.leaf_names(tree, root, none_is_leaf=True)


def value_text(value: object) -> str:
    """A value in words: the dtype, shape and device of a tensor, else the type and the value."""
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f", {value.layout}"
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}{layout}"
    return f"the {'class' if isinstance(value, type) else type(value).__name__} {value!r:.60}"
