"""Which names the code of a function reads: globals, and attributes of whatever object."""

from __future__ import annotations

import dis
import functools
import os
import sysconfig
import types

import numpy as np
import optree
import torch

_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"})
_IMPORTS = frozenset({"IMPORT_NAME"})
"""Instructions, as `dis` names them in Python 3.10 to 3.14."""

_BY_STRING = frozenset({"getattr", "hasattr", "attrgetter", "itemgetter"})
"""Functions that take the name of an attribute as a string."""

_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        *(os.path.dirname(os.path.abspath(str(library.__file__))) for library in (torch, np, optree)),
    )
)
_INSTALLED = tuple(os.path.join("", folder, "") for folder in ("site-packages", "dist-packages"))
"""Below the standard library, and no part of it."""


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> frozenset[str]:
    """The globals that a function reads, and the functions that are defined in it."""
    return _names(code, _GLOBALS)


@functools.lru_cache(maxsize=4096)
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """The attributes that a function reads, of any object, and the functions that are defined in it."""
    names = _names(code, _ATTRIBUTES)
    return names if _BY_STRING.isdisjoint(names | global_names(code)) else names | _strings(code)


@functools.lru_cache(maxsize=4096)
def imported_names(code: types.CodeType) -> frozenset[str]:
    """The modules that a function imports when it runs."""
    return _names(code, _IMPORTS)


def _strings(code: types.CodeType) -> frozenset[str]:
    own = {constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier()}
    return frozenset(own.union(*(_strings(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))))


def _names(code: types.CodeType, instructions: frozenset[str]) -> frozenset[str]:
    own = {step.argval for step in dis.get_instructions(code) if step.opname in instructions}
    inner = (_names(constant, instructions) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(own.union(*inner))


@functools.lru_cache(maxsize=4096)
def is_of_library(path: str) -> bool:
    """Whether a file belongs to Python itself, torch, NumPy, optree or fdp, whose settings are not the step's.

    Args:
        path: the file of a function's code, or of a module; "" for one that is built in.
    """
    if not path or path.startswith("<frozen"):
        return True
    if path.startswith(_LIBRARIES):
        return True
    return path.startswith(_STANDARD) and not any(folder in path for folder in _INSTALLED)
