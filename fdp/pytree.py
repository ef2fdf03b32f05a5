"""Trees of tensors: flattening, and the key path by which a person knows a leaf."""

from __future__ import annotations

from typing import Any

import optree

Tree = Any
"""Any nesting of the containers that optree knows (dict, list, tuple, namedtuple, registered classes)."""


def leaf_names(tree: Tree, root: str) -> list[str]:
    """Name each leaf by the expression that would fetch it.

    Args:
        tree: any pytree.
        root: the name of the tree itself.

    Returns:
        One name a leaf, in flattening order.

    Example:
        >>> leaf_names({"params": {"w": 1, "b": 2}, "n": (3,)}, "state")
        ["state['n'][0]", "state['params']['b']", "state['params']['w']"]
    """
    return [accessor.codify(root) for accessor in optree.tree_accessors(tree)]
