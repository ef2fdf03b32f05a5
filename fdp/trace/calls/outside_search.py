"""Find what a step can read besides its arguments, by the names in its code: numbers, flags, settings, tensors.

The search begins at the variables that the function closes over, at globals, defaults and the bound object. From there
it follows containers, the attributes that code of the step reads of any object, and functions. What is found is a list
of leaves, each with the expression for it; and a quick way to see that nothing of it was assigned anew.
"""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, Literal

import torch

from fdp.nn.meta_copy import MetaCopy
from fdp.nn.modules import module_read_by
from fdp.pytorch.registries import REGISTRIES, SUBMODULES, TENSOR_REGISTRIES
from fdp.trace.calls.arguments import PLAIN_TYPES
from fdp.trace.calls.finite_flags import ReturnsFiniteFlags
from fdp.trace.calls.names_in_code import attribute_names, global_names, imported_names, is_of_library

_MOST_ITEMS = 4096
"""Larger containers hold data, and are left out."""

_MOST_DEPTH = 30

_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)

_contents = operator.attrgetter("cell_contents")
_attributes = operator.attrgetter("attributes")

_Kind = Literal["cell", "item", "attribute", "part"]
_Place = tuple[_Kind, Any, Any]
"""Where a value was found: in a variable, under a key of a dict, in an attribute, in one of a module taken apart."""


class WatchedPlaces:
    """Places, and what they held when they were found."""

    def __init__(self) -> None:
        self._found: dict[_Kind, list[tuple[Any, Any, Any]]] = {"cell": [], "item": [], "attribute": [], "part": []}
        self._sized: list[Any] = []
        self._lists: list[list[Any]] = []
        self._looks: list[Callable[[], bool]] = []

    def add(self, place: _Place, value: Any) -> None:
        """Watch a place that holds a value."""
        kind, holder, key = place
        self._found[kind].append((holder, key, value))

    def add_length(self, container: Any) -> None:
        """Watch how many items a container has."""
        self._sized.append(container)

    def add_list(self, items: list[Any]) -> None:
        """Watch the items of a list."""
        self._lists.append(items)

    def freeze(self) -> None:
        """Make the quick looks, once everything was found: each goes through its places in C."""
        same = operator.is_
        looks: list[Callable[[], bool]] = []
        if self._found["cell"]:
            cells, _, in_cells = zip(*self._found["cell"], strict=True)
            looks.append(lambda: all(map(same, map(_contents, cells), in_cells)))
        if self._found["item"]:
            dicts, keys, in_dicts = zip(*self._found["item"], strict=True)
            looks.append(lambda: all(map(same, map(dict.get, dicts, keys), in_dicts)))
        if self._found["part"]:
            parts, attributes, in_parts = zip(*self._found["part"], strict=True)
            looks.append(lambda: all(map(same, map(dict.get, map(_attributes, parts), attributes), in_parts)))
        if self._found["attribute"]:
            objects, names, in_objects = zip(*self._found["attribute"], strict=True)
            looks.append(lambda: all(map(same, map(getattr, objects, names), in_objects)))
        if self._sized:
            sized, lengths = self._sized, list(map(len, self._sized))
            looks.append(lambda: list(map(len, sized)) == lengths)
        for items in self._lists:
            looks.append(functools.partial(_holds, items, list(items)))
        self._looks = looks

    def unchanged(self) -> bool:
        """Whether every place holds the object that it held."""
        try:
            for look in self._looks:
                if not look():
                    return False
        except (ValueError, AttributeError):
            return False  # a variable or an attribute that is gone
        return True


def length_of(label: str) -> str:
    """The expression for how many items there are in what an expression stands for."""
    return f"len({label})"


def of_length(expression: str) -> str | None:
    """Of what an expression is the length; None if it is no length."""
    return expression[4:-1] if expression.startswith("len(") else None


def _holds(now: list[Any], then: list[Any]) -> bool:
    return all(map(operator.is_, now, then))


class Search:
    """What was found.

    Args:
        roots: the step, and objects that are passed to it as they are; with the expression for each.
        names: attributes that are followed.
        without: expressions that are not: what the step itself assigns when it is traced.
        tensors: the expressions of tensors that count; None if all do.

    Attributes:
        leaves: expressions, each of them once, and values.
        names: attributes that the code reads, of all functions that were met.
        watched: where the leaves lie.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        names: frozenset[str],
        without: frozenset[str],
        tensors: frozenset[str] | None,
    ) -> None:
        self.leaves: list[tuple[str, Any]] = []
        self.names: set[str] = set()
        self.watched = WatchedPlaces()
        self._follows, self._without, self._tensors = names, without, tensors
        self._seen: dict[int, bool] = {}
        self._classes: set[type] = set()
        self._labels: collections.Counter[str] = collections.Counter()
        self._alive: list[Any] = []  # or another object may come to be where one was that was seen
        for label, root in roots:
            self._visit(label, root, None, _MOST_DEPTH)
        self.watched.freeze()

    def _visit(self, label: str, value: Any, place: _Place | None, depth: int) -> bool:
        """Search a value; returns whether anything in it counts."""
        self._labels[label] += 1
        if (same := self._labels[label]) > 1:  # such as the variable of another function
            label = f"{label} ({same})"
        if label in self._without or depth == 0:
            return False
        if isinstance(value, torch.Tensor):
            counts = self._tensors is None or label in self._tensors
            if counts:
                self.leaves.append((label, value))
        elif isinstance(value, (*PLAIN_TYPES, enum.Enum)):
            counts = self._leaf(label, value)
        elif id(value) in self._seen:
            counts = self._seen[id(value)]
        else:
            self._seen[id(value)] = False
            self._alive.append(value)
            try:
                counts = self._inside(label, value, depth - 1)
            except Exception:  # of a class whose attributes cannot be looked at: a proxy of something, say
                counts = self._leaf(label, value)
            self._seen[id(value)] = counts
        if counts and place is not None:
            self.watched.add(place, value)
        return counts

    def _leaf(self, label: str, value: Any) -> bool:
        self.leaves.append((label, value))
        return True

    def _inside(self, label: str, value: Any, depth: int) -> bool:
        if isinstance(value, (ReturnsFiniteFlags, functools.partial, types.MethodType, types.FunctionType)):
            return self._function(label, value, depth)
        if isinstance(value, (dict, list, tuple)):
            return self._container(label, value, depth)
        if isinstance(value, torch.nn.Module):
            return self._module(label, value, depth)
        if isinstance(value, types.ModuleType):
            return self._some(label, vars(value), depth) if not is_of_library(_file_of(value)) else False
        if isinstance(value, type):
            return False if is_of_library(_file_of_class(value)) else self._class(value, depth, self._follows)
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict) and "__wrapped__" in held:  # such as another step
            return self._visit(label, held["__wrapped__"], None, depth)
        return self._object(label, value, depth)

    def _any(self, found: Iterable[bool]) -> bool:
        return any(list(found))  # all of them, since each leaves what it finds

    def _function(self, label: str, value: Any, depth: int) -> bool:
        if isinstance(value, ReturnsFiniteFlags):
            return self._visit(label, value.step, None, depth)
        if isinstance(value, functools.partial):
            found = [self._visit(f"{label}: argument {i}", x, None, depth) for i, x in enumerate(value.args)]
            found += [self._visit(key, x, None, depth) for key, x in value.keywords.items()]
            return self._visit(label, value.func, None, depth) | any(found)
        if isinstance(value, types.MethodType):
            return self._visit("self", value.__self__, None, depth) | self._visit(label, value.__func__, None, depth)
        if (module := module_read_by(value)) is not None:
            return self._taken_apart(f"the module of {label}", module, depth)
        return self._code(label, value, depth)

    def _code(self, label: str, function: types.FunctionType, depth: int) -> bool:
        code, found = function.__code__, []
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                found.append(self._visit(name, cell.cell_contents, ("cell", cell, None), depth))
            except ValueError:  # a variable that has not been assigned yet
                continue
        if is_of_library(code.co_filename):
            # What it closes over may be the step's: a function to differentiate, say.
            return any(found) if found else self._leaf(label, function)
        self.names |= attribute_names(code)
        held = function.__globals__
        found += [self._visit(n, held[n], ("item", held, n), depth) for n in sorted(global_names(code)) if n in held]
        found += [self._visit(n, sys.modules[n], None, depth) for n in sorted(imported_names(code)) if n in sys.modules]
        defaults = zip(code.co_varnames[: code.co_argcount][::-1], (function.__defaults__ or ())[::-1], strict=False)
        found += [self._visit(f"{label}: default of {n}", x, None, depth) for n, x in defaults]
        keywords = function.__kwdefaults__ or {}
        found += [self._visit(f"{label}: default of {n}", x, ("item", keywords, n), depth) for n, x in keywords.items()]
        return self._leaf(label, code)

    def _container(self, label: str, value: Any, depth: int) -> bool:
        if len(value) > _MOST_ITEMS:
            return False
        first = len(self.leaves)
        if isinstance(value, dict):
            items = list(dict.items(value))
            found = [self._visit(f"{label}[{_key_text(k)}]", x, ("item", value, k), depth) for k, x in items]
        else:
            found = [self._visit(f"{label}[{i}]", x, None, depth) for i, x in enumerate(value)]
        if any(found) and not isinstance(value, tuple):
            if isinstance(value, list):
                self.watched.add_list(value)
            if (length := length_of(label)) not in self._without:
                self.leaves.insert(first, (length, len(value)))
                self.watched.add_length(value)
        return any(found)

    def _module(self, label: str, module: torch.nn.Module, depth: int) -> bool:
        found = []
        for path, part in module.named_modules():
            here, attributes = f"{label}.{path}" if path else label, vars(part)
            self._seen[id(part)] = True
            self._alive.append(part)
            for registry in TENSOR_REGISTRIES:
                held = attributes[registry]
                found += [self._visit(f"{here}.{n}", x, ("item", held, n), depth) for n, x in held.items()]
            for name, inner in attributes[SUBMODULES].items():
                self.watched.add(("item", attributes[SUBMODULES], name), inner)
            found += self._attributes_of_part(here, type(part), attributes, lambda d, n: ("item", d, n), depth)
        return self._any(found)

    def _taken_apart(self, label: str, module: MetaCopy, depth: int) -> bool:
        """A module that `from_module` has taken apart: only attributes count, which it follows while it lives."""
        if not module.parts:
            return self._module(label, module.follow(), depth)
        found = []
        for part in module.parts:
            here = f"{label}.{part.name}" if part.name else label
            lives = part.original() is not None

            def place(_: Any, name: str, part: Any = part, lives: bool = lives) -> _Place | None:
                return ("part", part, name) if lives else None

            attributes = {**vars(part.stand_in), **part.attributes}
            found += self._attributes_of_part(here, type(part.stand_in), attributes, place, depth)
        return self._any(found)

    def _attributes_of_part(
        self,
        label: str,
        kind: type,
        attributes: Mapping[str, Any],
        place: Callable[[Any, str], _Place | None],
        depth: int,
    ) -> list[bool]:
        found = []
        for name, value in list(attributes.items()):
            if name not in REGISTRIES and (isinstance(value, PLAIN_TYPES) or name in self._follows):
                found.append(self._visit(f"{label}.{name}", value, place(attributes, name), depth))
        for name in self._follows.difference(attributes):
            if hasattr(kind, name) and (here := place(attributes, name)) is not None:
                self.watched.add(here, None)  # it may come to hide the attribute of the class
        if not is_of_library(_file_of_class(kind)):
            found.append(self._class(kind, depth, self._follows | {"forward"}))
        return found

    def _object(self, label: str, value: Any, depth: int) -> bool:
        kind = type(value)
        if is_of_library(_file_of_class(kind)) and not isinstance(value, _NAMESPACES):
            found = [self._leaf(label, value)]  # which may be anything
        else:
            found = [self._leaf(f"type({label})", kind), self._class(kind, depth, self._follows)]
        if isinstance(held := getattr(value, "__dict__", None), dict):
            found.append(self._some(label, held, depth))
        for name in sorted(self._follows):
            if isinstance(getattr(type(value), name, None), types.MemberDescriptorType) and hasattr(value, name):
                inner = getattr(value, name)
                found.append(self._visit(f"{label}.{name}", inner, ("attribute", value, name), depth))
        return self._any(found)

    def _some(self, label: str, held: dict[str, Any], depth: int) -> bool:
        """The attributes that code reads of some object. It may get others, which hide those of its class."""
        names = [name for name in list(held) if name in self._follows]
        self.watched.add_length(held)
        return self._any(self._visit(f"{label}.{n}", held[n], ("item", held, n), depth) for n in names)

    def _class(self, kind: type, depth: int, names: Set[str]) -> bool:
        """The code of a class, and its attributes: those that are read, and those that Python calls by itself."""
        if kind in self._classes:
            return False
        self._classes.add(kind)
        found, held = [], {}
        for base in reversed(kind.__mro__):
            if base is not object and not is_of_library(_file_of_class(base)):
                held.update({n: x for n, x in vars(base).items() if n in names or _is_special(n, x)})
        for name, value in sorted(held.items()):
            if isinstance(value, types.MemberDescriptorType):
                continue
            here = f"{kind.__name__}.{name}"
            if isinstance(value, (classmethod, staticmethod)):
                found.append(self._visit(here, value.__func__, None, depth))
            elif isinstance(value, property):
                found.append(self._visit(here, value.fget, None, depth))
            elif not isinstance(value, types.FunctionType) and hasattr(type(value), "__get__"):
                continue  # which gives another object each time
            else:
                found.append(self._visit(here, value, None, depth))
            if found[-1] and not isinstance(value, classmethod):
                self.watched.add(("attribute", kind, name), getattr(kind, name))
        return self._any(found)


def _is_special(name: str, value: Any) -> bool:
    return name.startswith("__") and isinstance(value, types.FunctionType) and name != "__init__"


def _key_text(key: Any) -> str:
    return repr(key) if isinstance(key, (*PLAIN_TYPES, tuple)) else f"a {type(key).__name__}"


def _file_of(module: types.ModuleType | None) -> str:
    return getattr(module, "__file__", None) or ""


def _file_of_class(kind: type) -> str:
    module = sys.modules.get(kind.__module__)
    # What was defined at a prompt or in a notebook has no file.
    return "<prompt>" if kind.__module__ == "__main__" or module is None else _file_of(module)
