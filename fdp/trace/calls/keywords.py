"""Arguments that are passed by name, put at their positions: roles are given by position."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fdp.errors import ArgumentError, CallError, build_message, first_line


def signature_of(step: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters of a function, None if it does not tell."""
    try:
        return inspect.signature(step)
    except (TypeError, ValueError):
        return None


def by_position(
    name: str, signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Put arguments that were passed by name at their positions.

    Args:
        name: the user's function, for messages.
        signature: its parameters, None if it does not tell.
        args: the arguments that were passed by position.
        kwargs: those that were passed by name.

    Returns:
        All of them by position; a parameter that was left out before one that was not has its default.

    Raises:
        ArgumentError: one can be passed by name only, or the function does not tell its parameters.
        CallError: the function does not take them.
    """
    if signature is None:
        raise ArgumentError(
            build_message(
                f"step {name!r} was called with keyword arguments {sorted(kwargs)}, and does not tell its parameter "
                "names.",
                remedy="pass them by position.",
            )
        )
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise not_taken(name, signature, error) from None
    keywords = sorted(key for key in bound.kwargs if not _is_positional(signature, key))
    if keywords:
        raise ArgumentError(
            build_message(
                f"step {name!r} takes {keywords} by keyword only.",
                remedy="make them positional: batch_argnums and the like count positions.",
            )
        )
    if bound.kwargs:
        # An argument before these was left out: its default takes its place, and none behind them.
        last = max(list(signature.parameters).index(key) for key in kwargs)
        for key, parameter in list(signature.parameters.items())[:last]:
            bound.arguments.setdefault(key, parameter.default)
        bound.arguments = {key: bound.arguments[key] for key in signature.parameters if key in bound.arguments}
    return bound.args


def not_taken(name: str, signature: inspect.Signature | None, error: TypeError) -> CallError:
    """The error for arguments that a function does not take, as Python says it.

    Args:
        name: the user's function.
        signature: its parameters, None if it does not tell.
        error: Python's own.
    """
    takes = f"{name}{signature}" if signature is not None else "what it takes"
    return CallError(
        build_message(f"step {name!r} does not take these arguments: {first_line(error)}.", remedy=f"call {takes}.")
    )


def _is_positional(signature: inspect.Signature, name: str) -> bool:
    parameter = signature.parameters.get(name)
    return parameter is not None and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
