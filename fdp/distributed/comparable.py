"""Texts that processes compare: equal values have equal texts in all of them.

Python's own `repr` does not promise that. It names objects by their address in memory, and the order of sets differs
from process to process. All texts that ranks compare are written here.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from typing import Any

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")

_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType)
"""What Python knows by a name."""


def comparable(value: Any) -> str:
    """The text of a value, the same in every process that holds an equal one.

    Containers are written entry by entry, sets in the order of their texts. Functions and classes are written by name,
    and an object that only its address in memory tells from others by its type.

    Example:
        >>> import torch
        >>> comparable(({"b", "a"}, 1.0)), comparable(torch.sym_float), comparable(object())
        ("({'a', 'b'}, 1.0)", 'sym_float', '<object>')
    """
    kind = type(value)
    if isinstance(value, (set, frozenset)):
        texts = ", ".join(sorted(map(comparable, value)))
        return f"{{{texts}}}" if kind is set else f"{kind.__qualname__}({{{texts}}})"
    if kind in (list, tuple):
        texts = ", ".join(map(comparable, value))
        return f"[{texts}]" if kind is list else f"({texts},)" if len(value) == 1 else f"({texts})"
    if kind is dict:
        return "{" + ", ".join(f"{comparable(key)}: {comparable(each)}" for key, each in value.items()) + "}"
    if isinstance(value, functools.partial):
        return f"{kind.__qualname__}({comparable(value.func)}, {comparable(value.args)}, {comparable(value.keywords)})"
    if isinstance(value, _NAMED):
        return str(getattr(value, "__qualname__", value))
    if dataclasses.is_dataclass(value) and hasattr(kind.__repr__, "__wrapped__"):  # not one that the user wrote
        shown = [field.name for field in dataclasses.fields(value) if field.repr]
        return f"{kind.__qualname__}({', '.join(f'{name}={comparable(getattr(value, name))}' for name in shown)})"
    text = repr(value)
    return f"<{kind.__qualname__}>" if _ADDRESS.search(text) else text


def without_addresses(text: str) -> str:
    """A text without addresses in memory.

    Example:
        >>> without_addresses("<function f at 0x7f3a6c0de280>")
        '<function f at ...>'
    """
    return _ADDRESS.sub("...", text)
