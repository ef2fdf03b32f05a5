"""Why a tree of tensors cannot be taken apart: it holds itself, or is nested too deep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optree

from fdp.errors import ArgumentError, build_message

_DEEPEST, _NO_CHILD = 2000, object()


def endless(tree: object, namespace: str) -> ArgumentError:
    """The error for a tree that cannot be taken apart.

    Args:
        tree: that is endless, or nested too deep.
        namespace: of optree, in which its containers are registered.
    """
    path: list[tuple[Any, Any, Iterator[tuple[Any, Any]]]] = [("", tree, _children_of(tree, namespace))]
    above, done = {id(tree)}, set[int]()
    text = "nested too deep: in hundreds of containers"
    while path and len(path) < _DEEPEST:
        _, node, children = path[-1]
        entry, child = next(children, (None, _NO_CHILD))
        if child is _NO_CHILD:
            path.pop()
            above.discard(id(node))
            done.add(id(node))
        elif id(child) in above:
            name = "".join(f"[{each!r}]" for each in (*(each for each, *_ in path[1:]), entry))
            text = f"endless: what {name} holds is a container around it"
            break
        elif id(child) not in done:
            path.append((entry, child, _children_of(child, namespace)))
            above.add(id(child))
    remedy = "leave out references to what is above; they belong outside of a tree of tensors."
    return ArgumentError(build_message(f"a tree of tensors is {text}.", remedy=remedy))


def _children_of(node: object, namespace: str) -> Iterator[tuple[Any, Any]]:
    try:
        children, _, entries, _ = optree.tree_flatten_one_level(node, namespace=namespace)
    except ValueError:  # a leaf
        return iter(())
    return zip(entries, children, strict=True)
