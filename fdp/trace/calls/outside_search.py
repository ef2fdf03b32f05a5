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
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fdp.nn.meta_copy import MetaCopy
from fdp.nn.modules import module_read_by
from fdp.pytorch.registries import GLOBAL_HOOKS, HOOKS, REGISTRIES, SUBMODULES, TENSOR_REGISTRIES
from fdp.trace.calls.expressions import PLAIN, contents_of, is_odd, key_text, length_of
from fdp.trace.calls.finite_flags import ReturnsFiniteFlags
from fdp.trace.calls.libraries import class_is_of_library, is_of_library, module_is_of_library
from fdp.trace.calls.names_in_code import (
    ALL,
    attribute_names,
    global_names,
    imported_names,
    names_looked_up_by,
    names_read_by,
)
from fdp.trace.calls.watched_places import ValuePlace, WatchedPlaces

_MOST_KEYS, _MOST_ITEMS = 4096, 512
"""Larger dicts, and larger containers of other kinds, hold data, and are left out."""

_MOST_LEAVES = 10_000
_MOST_DEPTH = 100

_SETTINGS = (*PLAIN, tuple, types.FunctionType, types.BuiltinFunctionType, functools.partial)
"""What an attribute of a module is that is a setting: also of an activation function."""

_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_CALLED_BY_TORCH = frozenset({"forward", "backward", "setup_context"})


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
        self._seen: dict[int, str] = {}
        self._places: dict[tuple[Any, ...], bool] = {}
        self._classes: set[type] = set()
        self._labels: collections.Counter[str] = collections.Counter()
        self._alive: list[Any] = []  # or another object may come to be where one was that was seen
        for label, root in (*roots, ("hooks of all modules", GLOBAL_HOOKS)):
            self._visit(label, root, None, _MOST_DEPTH)
        self.watched.freeze()

    def _visit(self, label: str, value: object, place: ValuePlace | None, depth: int) -> bool:
        """Search a value; returns whether anything in it counts."""
        where = None if place is None else (place[0], id(place[1]), place[2])
        if where is not None and where in self._places:
            return self._places[where]
        self._labels[label] += 1
        if (same := self._labels[label]) > 1:  # such as the variable of another function
            label = f"{label} ({same})"
        if label in self._without:
            return False
        try:
            counts = self._look(label, value, depth)
        except Exception:  # of a class whose attributes cannot be looked at: a proxy of something, say
            counts = self._leaf(label, value)
        if place is not None and where is not None:
            self._places[where] = counts
            if counts:
                self.watched.add(place, value)
        return counts

    def _leaf(self, label: str, value: object) -> bool:
        self.leaves.append((label, value))
        return True

    def _look(self, label: str, value: Any, depth: int) -> bool:
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            return self._tensor(label, value, depth)
        if issubclass(kind, enum.Enum):
            inside = self._visit(f"{label}.value", value.value, None, depth - 1) if depth else False
            return self._leaf(label, value) | self._object_around(label, value, kind, depth) | inside
        if kind in PLAIN:
            return self._leaf(label, value)
        if issubclass(kind, PLAIN):
            return self._leaf(label, value) | self._object_around(label, value, kind, depth)
        if (first := self._seen.get(id(value))) is not None:
            return self._leaf(label, f"the same as {first}")
        if depth == 0 or len(self.leaves) > _MOST_LEAVES:
            return self._leaf(label, value)
        self._seen[id(value)] = label
        self._alive.append(value)
        return self._inside(label, value, kind, depth - 1)

    def _inside(self, label: str, value: Any, kind: type, depth: int) -> bool:
        if issubclass(kind, (ReturnsFiniteFlags, functools.partial, types.MethodType, types.FunctionType)):
            return self._function(label, value, depth)
        if issubclass(kind, (dict, list, tuple, set, frozenset, collections.deque)):
            return self._container(label, value, depth) | self._object_around(label, value, kind, depth)
        if issubclass(kind, types.MappingProxyType):
            return self._view(label, value, depth)
        if issubclass(kind, torch.nn.Module):
            return self._module(label, value, depth)
        if issubclass(kind, types.ModuleType):
            inner = not module_is_of_library(value) and self._some(label, vars(value), depth)
            return self._leaf(label, value) | inner
        if issubclass(kind, type):
            return self._leaf(label, value) | self._class(value, depth)
        if issubclass(kind, (types.BuiltinFunctionType, types.MethodWrapperType)):  # `get = settings.get`, say
            return self._leaf(label, value) | self._visit(f"{label}.__self__", value.__self__, None, depth)
        if issubclass(kind, _VIEWS):
            return self._view(label, value.mapping, depth)
        if issubclass(kind, weakref.ref):
            return self._leaf(label, value) | self._visit(f"{label}()", value(), None, depth)
        return self._object(label, value, kind, depth)

    def _tensor(self, label: str, value: torch.Tensor, depth: int) -> bool:
        """Which tensor it is; and attributes that the user has given it."""
        held, around = vars(value), False
        if held or not isinstance(value, torch.nn.Parameter):
            around = self._some(label, held, depth)
        if self._reads("requires_grad"):
            place: ValuePlace = ("attribute", value, "requires_grad")
            around |= self._visit(f"{label}.requires_grad", value.requires_grad, place, depth)
        return ((self._tensors is None or label in self._tensors) and self._leaf(label, value)) | around

    def _any(self, found: Iterable[bool]) -> bool:
        return any(list(found))  # all of them, since each leaves what it finds

    def _function(self, label: str, value: Any, depth: int) -> bool:
        if isinstance(value, ReturnsFiniteFlags):
            return self._visit(label, value.step, None, depth)
        if isinstance(value, functools.partial):
            found = [self._visit(f"{label}: argument {i}", x, None, depth) for i, x in enumerate(value.args)]
            named = value.keywords
            found += [self._visit(key, x, ("item", named, key), depth) for key, x in named.items()]
            self.watched.add_length(named)
            return self._visit(label, value.func, None, depth) | any(found)
        if isinstance(value, types.MethodType):
            return self._visit("self", value.__self__, None, depth) | self._visit(label, value.__func__, None, depth)
        if (module := module_read_by(value)) is not None:
            return self._taken_apart(f"the module of {label}", module, depth)
        return self._code(label, value, depth)

    def _code(self, label: str, function: types.FunctionType, depth: int) -> bool:
        code = function.__code__
        # Of a function of a library only what it closes over is the step's: a function to differentiate, say.
        is_own = not is_of_library(code.co_filename)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                self._visit(name, cell.cell_contents, ("cell", cell, None) if is_own else None, depth)
            except ValueError:  # a variable that has not been assigned yet
                continue
        if not is_own:
            return self._leaf(label, code)
        self.names |= attribute_names(code)
        held = function.__globals__
        for name in sorted(global_names(code).intersection(held)):
            self._visit(name, held[name], ("item", held, name), depth)
        for name in sorted(imported_names(code, held.get("__package__") or "")):
            if name in sys.modules:
                self._visit(name, sys.modules[name], None, depth)
        defaults = zip(code.co_varnames[: code.co_argcount][::-1], (function.__defaults__ or ())[::-1], strict=False)
        if function.__defaults__:
            self.watched.add(("attribute", function, "__defaults__"), function.__defaults__)
        for name, value in defaults:
            self._visit(f"{label}: default of {name}", value, None, depth)
        keywords = function.__kwdefaults__ or {}
        if keywords:
            self.watched.add(("attribute", function, "__kwdefaults__"), keywords)
        for name, value in keywords.items():
            self._visit(f"{label}: default of {name}", value, ("item", keywords, name), depth)
        own = {name: value for name, value in vars(function).items() if name != "__wrapped__"}
        self._any(self._visit(f"{label}.{n}", x, ("item", vars(function), n), depth) for n, x in own.items())
        self.watched.add_length(vars(function))
        if "IPython" in sys.modules:  # whose autoreload gives functions other code
            self.watched.add(("attribute", function, "__code__"), code)
        return self._leaf(label, code)

    def _container(self, label: str, value: Any, depth: int) -> bool:
        if len(value) > (_MOST_KEYS if isinstance(value, dict) else _MOST_ITEMS):
            return False
        first = len(self.leaves)
        found = [not value]
        if isinstance(value, dict):
            keys = list(value)
            found += [self._visit(f"key {k} of {label}", x, None, depth) for k, x in enumerate(keys) if is_odd(x)]
            items = [(key_text(key), key, dict.__getitem__(value, key)) for key in keys]
            found += [self._visit(f"{label}[{text}]", x, ("item", value, key), depth) for text, key, x in items]
            contents = contents_of(label), ", ".join(text for text, *_ in items)
        elif isinstance(value, (set, frozenset)):
            contents = contents_of(label), ", ".join(sorted(map(key_text, value)))
            odd = sorted(filter(is_odd, value), key=id)
            found += [True, *(self._visit(f"item {i} of {label}", x, None, depth) for i, x in enumerate(odd))]
        else:
            found += [self._visit(f"{label}[{i}]", x, None, depth) for i, x in enumerate(value)]
            contents = length_of(label), f"{len(value)} items"
        if not isinstance(value, (tuple, frozenset)):
            self.watched.add_length(value)
        if any(found):
            if contents[0] not in self._without:
                self.leaves.insert(first, contents)
            if value and not isinstance(value, (tuple, frozenset)):
                self.watched.add_order(value)
        return any(found)

    def _view(self, label: str, value: Mapping[Any, Any], depth: int) -> bool:
        """A view of a dict that cannot be reached."""
        if len(value) > _MOST_KEYS:
            return self._leaf(label, value)
        self.watched.add_length(value)
        self.watched.add_order(value)
        self.watched.add_order(value.values())
        return self._any(self._visit(f"{label}[{key_text(k)}]", x, None, depth) for k, x in list(value.items()))

    def _object_around(self, label: str, value: object, kind: type, depth: int) -> bool:
        """What a container or a value of a class of the user's has besides."""
        if class_is_of_library(kind):
            return False
        held = getattr(value, "__dict__", None)
        return self._class(kind, depth) | (isinstance(held, dict) and self._some(label, held, depth))

    def _module(self, label: str, module: torch.nn.Module, depth: int) -> bool:
        for path, part in module.named_modules():
            here, attributes = f"{label}.{path}" if path else label, vars(part)
            self._seen.setdefault(id(part), here)
            self._alive.append(part)
            for held in (attributes, *(attributes[registry] for registry in REGISTRIES)):
                self.watched.add_length(held)
            self.watched.add_type(part)
            for registry in TENSOR_REGISTRIES:
                held = attributes[registry]
                self._any(self._visit(f"{here}.{n}", x, ("item", held, n), depth) for n, x in held.items())
            for name, inner in attributes[SUBMODULES].items():
                self.watched.add(("item", attributes[SUBMODULES], name), inner)
            for name in HOOKS:
                self._visit(f"{here}.{name}", attributes[name], None, depth)
            self._attributes_of_part(here, type(part), attributes, lambda d, n: ("item", d, n), depth)
        return True

    def _taken_apart(self, label: str, module: MetaCopy, depth: int) -> bool:
        """A module that `from_module` has taken apart: only attributes count, which it follows while it lives."""
        if not module.parts:
            return self._module(label, module.follow(), depth)
        for part in module.parts:
            here = f"{label}.{part.name}" if part.name else label
            lives = part.original() is not None

            def place(_: object, name: str, part: object = part, lives: bool = lives) -> ValuePlace | None:
                return ("part", part, name) if lives else None

            # When it is dead, its attributes are those of the stand-in, but for what changed last.
            attributes = part.attributes if lives else {**vars(part.stand_in), **part.attributes}
            self._attributes_of_part(here, type(part.stand_in), attributes, place, depth)
            self._leaf(f"the parts of {here}", module.has_its_parts(part))  # if it has others, a new trace is refused
            if lives:
                self.watched.add_part(part)
            for name in HOOKS:
                hooks = list(attributes[name].values())
                self._leaf(contents_of(f"{here}.{name}"), len(hooks))
                self._any(self._visit(f"{here}.{name}", hook, None, depth) for hook in hooks)
        return True

    def _attributes_of_part(
        self,
        label: str,
        kind: type,
        attributes: Mapping[str, Any],
        place: Callable[[Any, str], ValuePlace | None],
        depth: int,
    ) -> None:
        self._leaf(f"type({label})", kind)
        # A class of torch or of another library has many attributes that say how it was made. A hook may read all.
        is_hooked = any(attributes.get(name) for name in HOOKS)
        is_known = class_is_of_library(kind) and not is_hooked
        read = names_read_by(kind, "forward", torch.nn.Module) if is_known else None
        for name, value in list(attributes.items()):
            is_setting = issubclass(type(value), _SETTINGS)
            counts = is_setting and (name in read if read is not None else not name.startswith("_"))
            if name not in REGISTRIES and name not in HOOKS and (counts or self._reads(name) or name == "forward"):
                self._visit(f"{label}.{name}", value, place(attributes, name), depth)
        self._class(kind, depth)

    def _object(self, label: str, value: Any, kind: type, depth: int) -> bool:
        if class_is_of_library(kind) and not issubclass(kind, _NAMESPACES):
            self._leaf(label, value)  # which may be anything
        else:
            self._leaf(f"type({label})", kind)
            self._class(kind, depth)
        if isinstance(held := getattr(value, "__dict__", None), dict):
            if value.__class__ is kind:  # not of a proxy
                self.watched.add_type(value)
                self.watched.add(("attribute", value, "__dict__"), held)
            if "__wrapped__" in held:  # such as another step
                self._visit(label, held["__wrapped__"], ("item", held, "__wrapped__"), depth)
            self._some(label, held, depth)
            self._settings_of_library(label, held, kind, depth)
        if issubclass(kind, (collections.UserDict, collections.UserList, collections.ChainMap)):
            self._visit(label, value.maps if issubclass(kind, collections.ChainMap) else value.data, None, depth)
        if kind in (operator.attrgetter, operator.itemgetter):
            self.names.update(part for name in value.__reduce__()[1] for part in str(name).split("."))
        for name in sorted(self._follows):
            if isinstance(getattr(kind, name, None), types.MemberDescriptorType) and hasattr(value, name):
                self._visit(f"{label}.{name}", getattr(value, name), ("attribute", value, name), depth)
        return True

    def _settings_of_library(self, label: str, held: dict[str, Any], kind: type, depth: int) -> None:
        """What the methods of a library's class read that code calls, as `scheduler.get_last_lr()`: plain values."""
        if getattr(vars(kind).get("__dataclass_params__"), "frozen", False):
            return  # as an optimizer of fdp is: its attributes do not change
        bases = [base for base in kind.__mro__ if base is not object and class_is_of_library(base)]
        called = {name for base in bases for name in vars(base) if self._reads(name)}
        read = {name for method in called for name in names_looked_up_by(kind, method)}
        for name in sorted(read.intersection(held)):
            if not self._reads(name) and _is_setting(held[name]):
                self._visit(f"{label}.{name}", held[name], ("item", held, name), depth)

    def _reads(self, name: str) -> bool:
        return name in self._follows or (ALL in self._follows and not name.startswith("__"))

    def _some(self, label: str, held: dict[str, Any], depth: int) -> bool:
        """The attributes that code reads of some object. It may get others, which hide those of its class."""
        names = [name for name in list(held) if self._reads(name)]
        self.watched.add_length(held)
        return self._any(self._visit(f"{label}.{n}", held[n], ("item", held, n), depth) for n in names)

    def _class(self, kind: type, depth: int) -> bool:
        """The code of a class, and its attributes: those that are read, and those that Python or torch calls."""
        if kind in self._classes or class_is_of_library(kind):
            return False
        self._classes.add(kind)
        self._class(type(kind), depth)  # whose properties are attributes of the class
        held: collections.defaultdict[str, list[tuple[type, type, Any]]] = collections.defaultdict(list)
        for base in kind.__mro__:
            if base is not object and not class_is_of_library(base):
                for name, value in vars(base).items():
                    if self._reads(name) or _is_called(name, value):
                        # What one class hides, its code may call through `super()`.
                        held[name].append((base if held[name] else kind, base, value))
        for name, found in sorted(held.items()):
            for owner, base, value in found:
                self._attribute_of_class(owner, base, name, value, depth)
        return True

    def _attribute_of_class(self, owner: type, base: type, name: str, value: object, depth: int) -> None:
        inner: Any
        if isinstance(value, (classmethod, staticmethod)):
            inner = value.__func__
        elif isinstance(value, (property, functools.cached_property)):
            inner = value.fget if isinstance(value, property) else value.func
        elif isinstance(value, functools.partialmethod):
            inner = functools.partial(value.func, *value.args, **value.keywords)
        else:
            inner = value  # also a descriptor of the user's own: an object with code and attributes
        counts = self._visit(f"{owner.__name__}.{name}", inner, None, depth)
        if counts and (self._reads(name) or _is_called(name, value)):
            # One that is looked up as it is may come to be hidden by another one.
            is_plain = isinstance(value, (types.FunctionType, property)) or not hasattr(type(value), "__get__")
            by_lookup = is_plain and value is getattr(owner, name, None)
            self.watched.add(("attribute", owner, name) if by_lookup else ("class", base, name), value)


def _is_setting(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) in (list, tuple) and all(type(each) in PLAIN for each in value))


def _is_called(name: str, value: object) -> bool:
    value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    return isinstance(value, types.FunctionType) and (name.startswith("__") or name in _CALLED_BY_TORCH)
