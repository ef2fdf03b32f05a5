"""Labels: `PerRank` marks a tensor of a state as each rank's own, outside of steps.

A labelled leaf is a container of one tensor, known to optree and to torch's pytrees. So the structure of a tree says
which leaves are labelled, and whatever compares structures (signatures, remembered calls) sees labels without looking
at leaves. Inside of a step there are none: it sees the tensors, in the same tree without the containers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from optree.accessors import PyTreeEntry

from fdp import pytree
from fdp.errors import ArgumentError, build_message
from fdp.pytree import Spec, Tree


@dataclass(frozen=True, eq=False, repr=False)
class PerRank:
    """A leaf of a state that is each rank's own: made by `fdp.per_rank(tree)` outside of a step.

    Inside of a step its tensor is in its place, and varies. What a step returns in its place (under the same key path)
    comes out labelled again. `fdp.save` writes each rank's, `fdp.replicate` leaves it as it is. To optree and torch's
    pytrees it is a container of one tensor, so functions that map over trees keep the label; key paths do not show it.

    Args:
        value: a tensor of any shape and dtype; shape and dtype are the same on every rank.

    Attributes:
        value: likewise.

    Raises:
        ArgumentError: `value` is no tensor.

    Example:
        >>> leaf = PerRank(torch.tensor([1.0, 2.0]))
        >>> leaf
        PerRank(tensor([1., 2.]))
        >>> leaf.value.sum()
        tensor(3.)
        >>> leaf == PerRank(torch.tensor([1.0, 2.0]))
        True
    """

    value: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.value, torch.Tensor):
            raise ArgumentError(
                build_message(
                    f"fdp.PerRank labels one tensor, and was given {type(self.value).__name__}.",
                    remedy="label the tensors of a tree with fdp.per_rank(tree), outside of a step.",
                )
            )

    def __repr__(self) -> str:
        text = repr(self.value)
        if isinstance(self.value, torch.Tensor) and ("\n" in text or len(text) > 70):
            dtype = str(self.value.dtype).removeprefix("torch.")
            text = f"<{dtype} {list(self.value.shape)} on {self.value.device}>"
        return f"PerRank({text})"

    def __str__(self) -> str:
        return f"PerRank({self.value})"

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same values (as `torch.equal` has it) in the same dtype."""
        if not isinstance(other, PerRank):
            return NotImplemented
        one, two = self.value, other.value
        if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
            return one is two or (one.dtype == two.dtype and torch.equal(one, two))
        return bool(one == two)

    __hash__ = None  # type: ignore[assignment]  # its tensor may change in place


class _Value(PyTreeEntry):
    """The step of a key path into a labelled leaf. It adds nothing to the name of the leaf."""

    def __call__(self, obj: Any) -> Any:
        return obj.value

    def codify(self, /, node: str = "") -> str:
        """The expression for the leaf."""
        return node


def _parts(label: PerRank) -> tuple[tuple[Any], None, tuple[str]]:
    return (label.value,), None, ("value",)


def _whole(children: Iterable[Any], _: None = None) -> PerRank:
    # Not through the constructor: what is put into a tree for a while need not be a tensor.
    new = object.__new__(PerRank)
    (value,) = children
    object.__setattr__(new, "value", value)
    return new


pytree.register_everywhere(PerRank, _parts, _whole, _Value)
torch.serialization.add_safe_globals([PerRank])  # so that torch.load(weights_only=True) takes a state with labels


def labelled(spec: Spec) -> list[bool]:
    """Whether each leaf of a structure is labelled."""
    if spec.type is PerRank:
        return [True] * spec.num_leaves
    if not spec.num_children:
        return [False] * spec.num_leaves
    return [flag for child in spec.children() for flag in labelled(child)]


def unlabelled(tree: Tree) -> Tree:
    """A tree with the tensors of labelled leaves in their place; the tree itself if there are none."""
    leaves, spec = pytree.flatten(tree, none_is_leaf=True, whole=PerRank)
    if not any(type(leaf) is PerRank for leaf in leaves):
        return tree
    return pytree.unflatten(spec, [unlabelled(leaf.value) if type(leaf) is PerRank else leaf for leaf in leaves])


def with_labels(spec: Spec, which: Sequence[bool]) -> Spec:
    """The structure of a tree after some of its leaves got a label; labelled leaves keep theirs.

    Args:
        spec: the structure.
        which: for each leaf, whether it is to be.
    """
    wanted = iter([yes and not already for yes, already in zip(which, labelled(spec), strict=True)])
    label = pytree.structure_of(_whole([0]), spec.none_is_leaf)
    return spec.transform(None, lambda leaf: label if leaf.num_leaves and next(wanted) else leaf)


def labelled_inside(tree: Tree) -> Tree:
    """Label each tensor below a label, in a tree that a function made of a tree with labels."""
    leaves, spec = pytree.flatten(tree, none_is_leaf=True, whole=PerRank)
    return pytree.unflatten(spec, [_inside(leaf.value) if type(leaf) is PerRank else leaf for leaf in leaves])


def _inside(tree: Tree) -> Tree:
    return pytree.map_leaves(lambda x: PerRank(x) if isinstance(x, torch.Tensor) else x, unlabelled(tree))
