"""The state of an optimizer that wraps another: the entries of the one inside, and its own beside them.

So `opt_state["lr"]`, `opt_state["scale"]` and `opt_state["average"]` are where they are in whatever order the
wrappers nest.
"""

from __future__ import annotations

from collections.abc import Iterable

from fdp.optim.argument_checks import optimizer_error, value_text
from fdp.optim.optimizer import Optimizer
from fdp.pytree import Tree


def check_optimizer(who: str, optimizer: object) -> None:
    """Refuse to wrap what is not an `Optimizer`.

    Args:
        who: the function that wraps.
        optimizer: what it was given.

    Raises:
        ArgumentError: with the way to make one.
    """
    if not isinstance(optimizer, Optimizer):
        remedy = "pass what fdp.optim.from_torch returns, or Optimizer(init, update) of two functions."
        raise optimizer_error(f"{who} wraps an Optimizer, not {value_text(optimizer)}.", remedy)


def added(who: str, inner: object, own: dict[str, Tree]) -> dict[str, Tree]:
    """Put the entries of a wrapper beside those of the state that it wraps.

    Args:
        who: the wrapper.
        inner: what `init` of the optimizer inside returned.
        own: the entries of the wrapper.

    Returns:
        The state of both.

    Raises:
        ArgumentError: the state inside is not a dict, or has an entry of that name.
    """
    if type(inner) is not dict:
        what = f"{who} adds {sorted(own)} to the state of the optimizer inside, which is {value_text(inner)}."
        raise optimizer_error(what, "let init return a dict.")
    taken = sorted(inner.keys() & own.keys())
    if taken:
        what = f"{who} keeps {taken} in the state, but an optimizer inside it has entries of that name already."
        raise optimizer_error(what, "wrap once; averaged takes another name=.")
    return {**inner, **own}


def parted(who: str, opt_state: object, keys: Iterable[str]) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """Take the entries of a wrapper out of a state.

    Args:
        who: the wrapper.
        opt_state: what `update` was given.
        keys: the entries of the wrapper.

    Returns:
        The state of the optimizer inside, and the entries of the wrapper.

    Raises:
        ArgumentError: the state lacks an entry.
    """
    keys = sorted(keys)
    found = sorted(map(str, opt_state)) if isinstance(opt_state, dict) else value_text(opt_state)
    if not isinstance(opt_state, dict) or not opt_state.keys() >= set(keys):
        what = f"opt_state of {who} must have the keys {keys} beside those of the optimizer inside, but is {found}."
        raise optimizer_error(what, f"make opt_state with init(params) of this {who}, and keep its structure.")
    inner = {key: value for key, value in opt_state.items() if key not in keys}
    return inner, {key: opt_state[key] for key in keys}
