"""Places that hold a value, and a quick look at whether each still holds the same object.

The look goes through all places with a few calls from Python, since it is part of every call of a step.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from fdp.pytorch.registries import HOOKS, SUBMODULES

PlaceKind = Literal["cell", "item", "attribute", "class", "part"]
ValuePlace = tuple[PlaceKind, Any, Any]
"""Where a value was found: in a variable, under a key of a dict, in an attribute, in one of a class as it was defined,
in one of a module taken apart."""

_MISSING = object()

_Getter = Callable[[Mapping[str, Any]], tuple[Any, ...]]
_Select = Callable[[list[dict[str, Any]]], tuple[dict[str, Any], ...]]

_hooks, _submodules = operator.itemgetter(*HOOKS), operator.itemgetter(SUBMODULES)
_from_class = types.MappingProxyType.get
_contents = operator.attrgetter("cell_contents")


class WatchedPlaces:
    """Places, and what they held when they were found."""

    def __init__(self) -> None:
        self._cells: list[tuple[Any, Any]] = []
        self._items: list[tuple[Any, Any, Any]] = []
        self._in_objects: list[tuple[Any, Any, Any]] = []
        self._in_classes: list[tuple[Any, Any, Any]] = []
        self._typed: list[Any] = []
        self._in_parts: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._parts: dict[int, Any] = {}
        self._sized: dict[int, Any] = {}
        self._ordered: dict[int, Any] = {}

    def add(self, place: ValuePlace, value: object) -> None:
        """Watch a place that holds a value."""
        kind, holder, key = place
        if kind == "part":
            self._in_parts.setdefault(id(holder), (holder, {}))[1][key] = value
        elif kind == "cell":
            self._cells.append((holder, value))
        elif kind == "class":
            self._in_classes.append((vars(holder), key, value))
        else:
            (self._items if kind == "item" else self._in_objects).append((holder, key, value))

    def add_type(self, held: object) -> None:
        """Watch of which class an object is."""
        self._typed.append(held)

    def add_length(self, container: object) -> None:
        """Watch how many items a container has, and of a dict the last key: that is another one if a key is new."""
        self._sized[id(container)] = container

    def add_order(self, container: object) -> None:
        """Watch the items of a list or set, or the keys of a dict, and their order; its length has to be watched as
        well."""
        self._ordered[id(container)] = container

    def add_part(self, part: object) -> None:
        """Watch how many attributes and hooks a part of a module taken apart has, and which parts of its own."""
        self._parts[id(part)] = part

    def freeze(self) -> None:
        """Prepare the look, once everything was found."""
        cells, in_cells = [cell for cell, _ in self._cells], [value for _, value in self._cells]
        dicts, keys, in_dicts = _columns(self._items)
        objects, names, in_objects = _columns(self._in_objects)
        classes, defined, in_classes = _columns(self._in_classes)
        lists, in_parts = list(self._ordered.values()), self._groups_of_parts()
        self._containers = list(self._sized.values())
        tables = [each for each in self._containers if isinstance(each, dict) and each]
        # What reads a kind of places, and what they hold now.
        reads: list[tuple[Callable[[], Iterable[Any]], list[Any]]] = [
            (functools.partial(map, _contents, cells), in_cells),
            (functools.partial(map, dict.get, dicts, keys, itertools.repeat(_MISSING)), in_dicts),
            (functools.partial(map, getattr, objects, names), in_objects),
            (functools.partial(map, _from_class, classes, defined, itertools.repeat(_MISSING)), in_classes),
            (functools.partial(map, type, self._typed), list(map(type, self._typed))),
            (functools.partial(itertools.chain.from_iterable, lists), list(itertools.chain.from_iterable(lists))),
            (functools.partial(_last_keys, tables), list(_last_keys(tables))),
            *((functools.partial(_read, get, *_selected(parts)), held) for get, parts, held in in_parts),
        ]
        self._reads = [(read, values) for read, values in reads if values]
        self._lengths = list(map(len, self._containers))
        trees: dict[int, list[Any]] = {}
        for part in self._parts.values():
            trees.setdefault(id(part.live), []).append(part)
        self._trees = list(map(_selected, trees.values()))
        self._parts_as_found = self._look_at_parts()

    def _groups_of_parts(self) -> list[tuple[_Getter, list[Any], list[Any]]]:
        """Modules of one kind have attributes of the same names, which are read together: parts, and what they hold."""
        groups: dict[tuple[_Getter, int], tuple[list[Any], list[Any]]] = {}
        for part, values in self._in_parts.values():
            names = tuple(values)
            get = _getter_of(names if len(names) > 1 else names * 2)  # of one name, it would not make a tuple
            parts, held = groups.setdefault((get, id(part.live)), ([], []))
            parts.append(part)
            held += get(values)
        return [(getter, parts, held) for (getter, _), (parts, held) in groups.items()]

    def unchanged(self) -> bool:
        """Whether every place holds the object that it held."""
        try:
            for read, values in self._reads:
                if not all(map(operator.is_, read(), values)):
                    return False
            if self._containers and list(map(len, self._containers)) != self._lengths:
                return False
            return not self._trees or self._look_at_parts() == self._parts_as_found
        except Exception:  # a variable or an attribute that is gone
            return False

    def _look_at_parts(self) -> list[Any]:
        found: list[Any] = []
        for select, live in self._trees:
            parts = select(live)
            # The parts by number: a module that is watched is not kept. One that dies is noticed by its attributes.
            inner = filter(None, map(_submodules, parts))
            found += map(id, itertools.chain.from_iterable(map(dict.values, inner)))
            for tables in (parts, list(itertools.chain.from_iterable(map(_hooks, parts)))):
                found += map(len, tables)
                found += _last_keys(filter(None, tables))
        return found


def _selected(parts: list[Any]) -> tuple[_Select, list[dict[str, Any]]]:
    """What selects parts among those of a module taken apart, and all of those."""
    indices = [part.at for part in parts]
    if len(indices) == 1:
        return lambda live: (live[indices[0]],), parts[0].live
    return operator.itemgetter(*indices), parts[0].live


def _read(get: _Getter, select: _Select, live: list[dict[str, Any]]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(get, select(live)))


def _last_keys(tables: Iterable[dict[Any, Any]]) -> Iterator[Any]:
    """The key of each dict that was added last."""
    return map(next, map(dict.__reversed__, tables), itertools.repeat(_MISSING))


def _columns(rows: list[tuple[Any, Any, Any]]) -> tuple[list[Any], list[Any], list[Any]]:
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


@functools.lru_cache(maxsize=4096)
def _getter_of(names: tuple[str, ...]) -> _Getter:
    return operator.itemgetter(*names)
