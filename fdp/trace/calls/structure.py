"""Flatten arguments that have the same tree structure as earlier ones, without computing their structure.

Taking a tree apart along a structure that is known is ten times cheaper than finding the structure. optree does it, but
is lenient: it takes an `OrderedDict` for a dict, in any order. And when a container is of the wrong type it writes the
whole of it, tensors and all, into an error message. So containers are compared first, their types and lengths; only
the keys are left to optree. Of some containers of state, such as labels, the type says all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from optree import PyTreeKind

from fdp import pytree
from fdp.state.containers import container_of_type

_PLAIN = (PyTreeKind.TUPLE, PyTreeKind.LIST, PyTreeKind.DICT, PyTreeKind.ORDEREDDICT, PyTreeKind.NAMEDTUPLE)
"""Containers whose type, length and keys decide on the structure. Others are taken apart in full."""

_Getter = Callable[[Any], tuple[Any, ...]]


@dataclass(frozen=True)
class _Container:
    """A container of the known structure.

    Attributes:
        nothing: gets the children that are None; None itself if there are none.
        inner: gets the children that are containers; likewise.
        types: their types.
        lengths: their lengths.
        around: gets the children that are containers of state around one leaf; likewise.
        kinds: their types.
        deeper: for those that hold containers of their own or have an order, their position in `inner`.
        order: the keys of an `OrderedDict`, else None.
    """

    nothing: _Getter | None
    inner: _Getter | None
    types: list[type]
    lengths: list[int]
    around: _Getter | None
    kinds: list[type]
    deeper: tuple[tuple[int, _Container], ...]
    order: list[Any] | None

    def holds(self, tree: Any) -> bool:
        """Whether the children of a container that has the right type and length have the known structure, too."""
        if self.order is not None and list(tree) != self.order:
            return False
        if self.nothing is not None and any(child is not None for child in self.nothing(tree)):
            return False
        if self.around is not None and list(map(type, self.around(tree))) != self.kinds:
            return False
        if self.inner is None:
            return True
        children = self.inner(tree)
        if list(map(type, children)) != self.types or list(map(len, children)) != self.lengths:
            return False
        return all(known.holds(children[position]) for position, known in self.deeper)


class Structure:
    """The tree structure of the arguments of an earlier call.

    Attributes:
        spec: the structure, a tuple.
    """

    def __init__(self, spec: pytree.Spec) -> None:
        self.spec = spec
        self._known = _container(spec) if _is_plain(spec) else None
        self._length = spec.num_children
        # Each argument by itself: a batch that has to be taken apart in full does not make the state as slow.
        alone = self._known is not None or self._length < 2
        self._each = () if alone else tuple(Structure(pytree.tuple_of([child])) for child in spec.children())

    def flatten(self, args: tuple[Any, ...]) -> list[Any] | None:
        """The leaves of arguments; None if they have another structure.

        Args:
            args: a tuple of trees.

        Returns:
            The leaves in a row, each in the place of a leaf of this structure. One may still be what is no leaf: a
            container where a leaf was. Whoever looks at the leaves one by one finds it.
        """
        if self._each:
            return self._flatten_each(args)
        if self._known is None:
            leaves, spec = pytree.flatten(args, apart=True)
            return leaves if spec == self.spec else None
        try:
            if len(args) == self._length and self._known.holds(args):
                result: list[Any] = self.spec.flatten_up_to(args)
                return result
        except (ValueError, KeyError):
            pass  # other keys
        return None

    def _flatten_each(self, args: tuple[Any, ...]) -> list[Any] | None:
        leaves: list[Any] = []
        if len(args) != self._length:
            return None
        for known, arg in zip(self._each, args, strict=True):
            found = known.flatten((arg,))
            if found is None:
                return None
            leaves += found
        return leaves


def _is_plain(spec: pytree.Spec) -> bool:
    if spec.kind in (PyTreeKind.LEAF, PyTreeKind.NONE) or _is_around_leaf(spec):
        return True
    return spec.kind in _PLAIN and all(map(_is_plain, spec.children()))


def _is_around_leaf(spec: pytree.Spec) -> bool:
    """Whether a tree is one leaf in a container of state, of which the type says all."""
    return (
        spec.kind == PyTreeKind.CUSTOM
        and container_of_type(spec.type).told_by_type
        and spec.child(0).kind == PyTreeKind.LEAF
    )


def _container(spec: pytree.Spec) -> _Container:
    children = spec.children()
    # A named tuple, too, is asked by number.
    with_keys = spec.kind in (PyTreeKind.DICT, PyTreeKind.ORDEREDDICT)
    keys = spec.entries() if with_keys else list(range(len(children)))
    inner = [(key, child) for key, child in zip(keys, children, strict=True) if child.kind in _PLAIN]
    found = [_container(child) for _, child in inner]
    around = [(key, child.type) for key, child in zip(keys, children, strict=True) if _is_around_leaf(child)]
    return _Container(
        nothing=_getter([key for key, child in zip(keys, children, strict=True) if child.kind == PyTreeKind.NONE]),
        inner=_getter([key for key, _ in inner]),
        types=[child.type for _, child in inner],
        lengths=[child.num_children for _, child in inner],
        around=_getter([key for key, _ in around]),
        kinds=[kind for _, kind in around],
        deeper=tuple(
            (position, known)
            for position, known in enumerate(found)
            if (known.inner, known.nothing, known.around, known.order) != (None, None, None, None)
        ),
        order=list(keys) if spec.kind == PyTreeKind.ORDEREDDICT else None,
    )


def _getter(keys: list[Any]) -> _Getter | None:
    if not keys:
        return None
    if len(keys) == 1:  # for one key an itemgetter does not make a tuple
        (key,) = keys
        return lambda tree: (tree[key],)
    return operator.itemgetter(*keys)
