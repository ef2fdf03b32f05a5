"""Whose code something is: the user's, or that of Python, of an installed package or of fdp."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types

import optree
import torch

_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        *(os.path.dirname(os.path.abspath(str(library.__file__))) for library in (torch, optree)),
    )
)
_INSTALLED = tuple(os.path.join("", folder, "") for folder in ("site-packages", "dist-packages"))

_NO_FILE = "<no file>"
"""In place of a file, for what was defined at a prompt, in a notebook, or in a module that was made while running."""


@functools.lru_cache(maxsize=4096)
def is_of_library(path: str) -> bool:
    """Whether a file belongs to Python itself, to what is installed, or to fdp: no code of the user's.

    Args:
        path: the file of a function's code, or of a module; "" for one that is built in.
    """
    if not path or path.startswith("<frozen"):
        return True
    return path.startswith((_STANDARD, *_LIBRARIES)) or any(folder in path for folder in _INSTALLED)


def module_is_of_library(module: types.ModuleType) -> bool:
    """Whether a module belongs to a library."""
    return is_of_library(_file_of(module))


def class_is_of_library(kind: type) -> bool:
    """Whether a class belongs to a library."""
    module = sys.modules.get(kind.__module__)
    return is_of_library(_NO_FILE if kind.__module__ == "__main__" or module is None else _file_of(module))


def _file_of(module: types.ModuleType) -> str:
    found = getattr(module, "__file__", None)
    # Of a package without an __init__.py, the folder.
    if found := found or next(iter(getattr(module, "__path__", ())), ""):
        return str(found)
    # What is built in has a specification, or lies in a package. A module that a program has made has neither.
    outer = sys.modules.get(module.__name__.split(".")[0])
    is_made = type(module) is types.ModuleType and module.__spec__ is None and outer in (None, module)
    return _NO_FILE if is_made else ""
