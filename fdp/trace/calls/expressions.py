"""The expressions that stand for what a step reads from outside, where a name and an index do not say it."""

from __future__ import annotations

import re

from fdp.trace.calls.arguments import PLAIN_TYPES

PLAIN = (*PLAIN_TYPES, type(None))
"""Types whose objects are values: numbers, strings and the like."""

_ITEMS, _LENGTH = "the items of ", "the length of "
"""How expressions begin that stand for the keys of a dict or the items of a set, and for how many items a list has."""


def contents_of(label: str) -> str:
    """The expression for which items there are in the dict or set that an expression stands for."""
    return f"{_ITEMS}{label}"


def length_of(label: str) -> str:
    """The expression for how many items there are in the list that an expression stands for."""
    return f"{_LENGTH}{label}"


def says_which_items(expression: str) -> bool:
    """Whether an expression is one of `contents_of`."""
    return expression.startswith(_ITEMS)


def of_contents(expression: str) -> str | None:
    """Of what an expression is the contents, or the length; None if it is that of a value."""
    starts = (start for start in (_ITEMS, _LENGTH) if expression.startswith(start))
    return next((expression.removeprefix(start) for start in starts), None)


def last_name_of(expression: str) -> str:
    """The attribute, variable or key (in brackets) that an expression ends with."""
    found = re.search(r"(\[[^\[]*\]|[^.\[\]]*)$", re.sub(r" \(\d+\)$", "", expression))
    return found.group() if found else expression


def is_odd(key: object) -> bool:
    """Whether a key of a dict, or an item of a set, is an object whose text need not say which one it is."""
    return not issubclass(type(key), (*PLAIN, tuple))


def key_text(key: object) -> str:
    """A key of a dict, or an item of a set, as text."""
    return f"a {type(key).__name__}" if is_odd(key) else repr(key)
