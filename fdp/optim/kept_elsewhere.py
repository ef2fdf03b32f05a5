"""What an optimizer keeps outside of the state of its parameters: on itself, or in its groups.

Each update is made by a new instance, so that it is a function of its arguments alone. What a step leaves on the
instance, such as a count in a group, would be lost, and the next step would begin with it as the first one did.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, optim

from fdp.pytorch.tensors import version_of

_OF_TORCH = frozenset({"param_groups", "state", "_warned_capturable_if_run_uncaptured"})
"""Attributes of an instance that are looked at elsewhere, or that a step may change without a meaning."""


def kept_elsewhere(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Look at what an instance holds beside its parameters and their state.

    Args:
        optimizer: it.

    Returns:
        By a name for messages, something that compares equal as long as what is held stays as it is.
    """
    found: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                found[f"group[{key!r}]" + (f" of group {number}" if number else "")] = _content(value)
    state: dict[Any, Any] = optimizer.state
    for key, value in state.items():
        if not isinstance(key, Tensor):  # what belongs to no parameter
            found[f"state[{key!r}]"] = _content(value)
    classes = [each for each in type(optimizer).__mro__ if not each.__module__.startswith(("torch.", "builtins"))]
    for name, value in [*vars(optimizer).items(), *(pair for each in classes for pair in vars(each).items())]:
        if name not in _OF_TORCH and not name.startswith("__"):
            found[f"self.{name}"] = _content(value)
    return found


def changed_since(before: dict[str, Any], optimizer: optim.Optimizer) -> list[str]:
    """Name what an instance holds otherwise than before.

    Args:
        before: of `kept_elsewhere`.
        optimizer: the instance.

    Returns:
        The names, sorted.
    """
    after = kept_elsewhere(optimizer)
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _content(value: object) -> Any:
    """Numbers and texts by what they are, containers by what they hold, everything else by which object it is."""
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return type(value), value
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, dict):
        return dict, [(_content(key), _content(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), [_content(each) for each in value]
    return id(value)
