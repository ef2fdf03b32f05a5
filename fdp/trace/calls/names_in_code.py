"""Which names the code of a function reads: globals, and attributes of whatever object."""

from __future__ import annotations

import dis
import functools
import os
import sysconfig
import types
from collections.abc import Iterable

import optree
import torch

_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"})
_IMPORTS = frozenset({"IMPORT_NAME"})
_MATCHES = frozenset({"MATCH_CLASS"})
"""Instructions, as `dis` names them in Python 3.10 to 3.14."""

_BY_STRING = frozenset({"getattr", "hasattr", "attrgetter", "itemgetter"})
"""Functions that take the name of an attribute as a string."""

ALL = "*"
"""Among the attributes that code reads: any attribute."""

_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        *(os.path.dirname(os.path.abspath(str(library.__file__))) for library in (torch, optree)),
    )
)
_INSTALLED = tuple(os.path.join("", folder, "") for folder in ("site-packages", "dist-packages"))


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> frozenset[str]:
    """The globals that a function reads, and the functions that are defined in it."""
    return _names(code, _GLOBALS)


@functools.lru_cache(maxsize=4096)
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """The attributes that a function reads, of any object, and the functions that are defined in it."""
    names, known = _names(code, _ATTRIBUTES), _names(code, _GLOBALS)
    if "vars" in known or "__dict__" in names:
        names |= {ALL}
    by_string = not _BY_STRING.isdisjoint(names | known) or _has(code, _MATCHES)
    return names | _strings(code.co_consts) if by_string else names


@functools.lru_cache(maxsize=4096)
def imported_names(code: types.CodeType, package: str) -> frozenset[str]:
    """The modules that a function may import when it runs.

    Args:
        code: of the function.
        package: the package that it belongs to, for relative imports, of whatever level.
    """
    around = [package.rsplit(".", levels)[0] for levels in range(package.count(".") + 1)] if package else []
    found = _names(code, _IMPORTS)
    return found.union(f"{outer}.{name}" if name else outer for name in found for outer in around) - {""}


@functools.lru_cache(maxsize=4096)
def names_read_by(kind: type, method: str, until: type) -> frozenset[str]:
    """The attributes that a method of a class reads, and the methods that it calls; of its own object or of others.

    Args:
        kind: the class.
        method: the name of the method.
        until: a base class, whose methods are not followed.
    """
    found: set[str] = set()
    pending, followed = [method], set()
    while pending:
        name = pending.pop()
        followed.add(name)
        function = getattr(kind, name, None)
        if isinstance(function, types.FunctionType) and function is not getattr(until, name, None):
            names = attribute_names(function.__code__)
            found |= names
            pending += names - followed
    return frozenset(found)


def _strings(constants: Iterable[object]) -> frozenset[str]:
    found: set[str] = set()
    for constant in constants:
        if isinstance(constant, str) and constant.isidentifier():
            found.add(constant)
        elif isinstance(constant, tuple):
            found |= _strings(constant)
        elif isinstance(constant, types.CodeType):
            found |= _strings(constant.co_consts)
    return frozenset(found)


def _has(code: types.CodeType, instructions: frozenset[str]) -> bool:
    return any(step.opname in instructions for step in dis.get_instructions(code)) or any(
        _has(constant, instructions) for constant in code.co_consts if isinstance(constant, types.CodeType)
    )


def _names(code: types.CodeType, instructions: frozenset[str]) -> frozenset[str]:
    own = {step.argval for step in dis.get_instructions(code) if step.opname in instructions}
    inner = (_names(constant, instructions) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(own.union(*inner))


@functools.lru_cache(maxsize=4096)
def is_of_library(path: str) -> bool:
    """Whether a file belongs to Python itself, to what is installed, or to fdp: no code of the user's.

    Args:
        path: the file of a function's code, or of a module; "" for one that is built in.
    """
    if not path or path.startswith("<frozen"):
        return True
    return path.startswith((_STANDARD, *_LIBRARIES)) or any(folder in path for folder in _INSTALLED)
