"""The containers of state, in one table for all that take trees apart, compare, copy or save them.

Outside of steps a leaf of a state may be more than a tensor that all ranks hold alike: it may be each rank's own, or
each rank may have a part of it. Then it lies in a container. A step is called with the one tensor that comes of taking
the container apart, and what it returns in the place of that is put together again. The structure of a tree that was
taken apart says which leaves lie in which container.

A new kind of placement is a file beside `labels.py` and `shards.py`, and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from fdp import pytree
from fdp.pytree import Spec, Tree
from fdp.state import labels, shards

Role: TypeAlias = Literal["state", "per rank", "part"]
"""What a tensor of a state is to a trace: the same on every rank, each rank's own, or a part of what is the same."""


def _itself(leaf: object) -> Any:
    return leaf


def _never(kind: type) -> bool:
    return False


def _alone(leaf: object) -> tuple[tuple[Any], Hashable, tuple[str]]:
    return (leaf,), None, ("leaf",)


def _only(rest: Any, children: Iterable[Any]) -> Any:
    (child,) = children
    return child


@dataclass(frozen=True)
class Container:
    """One kind of container, and what is to be known of it.

    A leaf is here what `pytree.flatten` shows of it outside of steps: the tensor inside of a container that all trees
    take apart, and the container itself where only steps take it apart.

    Attributes:
        adjective: what messages call a leaf in it.
        verb: what one does to a leaf to put it there.
        undone_by: the function that makes plain tensors of leaves in parts.
        role: what its tensor is to a trace.
        kind: its type; None if that is imported only when it is met.
        is_kind: tells such a type.
        everywhere: whether trees always take it apart, or only steps do.
        told_by_type: whether any two leaves of the type are taken apart alike, so that nothing else need be compared.
        apart: takes a container apart: the tensor that a step is called with, what else there is to it (which belongs
            to the structure of a tree), and the attribute of the tensor.
        together: makes a container of that rest and of a tensor.
        tensor: of a leaf, the tensor that holds its bits on this rank, which is copied and compared.
        saved: of a leaf, what a checkpoint holds. `torch.distributed.checkpoint` has to know it.
        beside: what a tensor becomes that belongs to such a leaf, as the state of an optimizer does.
    """

    adjective: str = ""
    verb: str = ""
    undone_by: str = ""
    role: Role = "state"
    kind: type | None = None
    is_kind: Callable[[type], bool] = _never
    everywhere: bool = False
    told_by_type: bool = False
    apart: Callable[[Any], tuple[tuple[Any], Hashable, tuple[str]]] = _alone
    together: Callable[[Any, Iterable[Any]], Any] = _only
    tensor: Callable[[Any], Any] = _itself
    saved: Callable[[Any], Any] = _itself
    beside: Callable[[torch.Tensor], Any] = _itself

    def __repr__(self) -> str:
        return f"<Container of {self.adjective or 'plain'} leaves>"

    @property
    def state(self) -> str:
        """What messages call state that lies in it."""
        return ("part of " if self.role == "part" else "") + f"{self.adjective} state".strip()

    def recognises(self, kind: type) -> bool:
        """Whether a type is that of the container."""
        return kind is self.kind or self.is_kind(kind)

    def seen(self, container: object) -> Any:
        """What stands for a container where there are none, as in a step; no rank has the whole of what is in parts."""
        return container if self.role == "part" else self.apart(container)[0][0]

    def with_tensor(self, leaf: object, tensor: object) -> Any:
        """A leaf that holds another tensor, or holds what was saved; else as a given one."""
        if not self.recognises(type(leaf)) or self.recognises(type(tensor)):
            return tensor
        return self.together(self.apart(leaf)[1], (tensor,))


PLAIN = Container()
"""A leaf in no container."""

LABELS = Container(
    adjective="labelled",
    verb="label",
    role="per rank",
    kind=labels.PerRank,
    everywhere=True,
    told_by_type=True,
    apart=labels.apart,
    together=labels.together,
    beside=labels.PerRank,
)

SHARDS = Container(
    adjective="sharded",
    verb="shard",
    undone_by="fdp.unshard",
    role="part",
    is_kind=shards.is_sharded_type,
    apart=shards.apart,
    together=shards.together,
    tensor=shards.part_of,
    beside=shards.whole_unless_divided,
)

CONTAINERS = (LABELS, SHARDS)
"""All of them."""


def register(container: Container, kind: type) -> None:
    """Make the type of a container known to trees."""
    to_trees = pytree.register_everywhere if container.everywhere else pytree.register_where_taken_apart
    to_trees(kind, container.apart, container.together, pytree.Unseen)


for _each in CONTAINERS:
    if _each.kind is not None:
        register(_each, _each.kind)


def container_of(leaf: object) -> Container:
    """The container that an object is."""
    return container_of_type(type(leaf))


def container_of_type(kind: type) -> Container:
    """The container that objects of a type are."""
    return next((each for each in CONTAINERS if each.recognises(kind)), PLAIN)


def lies_in_parts(leaf: object) -> bool:
    """Whether a rank holds no more than a part of a leaf."""
    return container_of(leaf).role == "part"


@dataclass(frozen=True)
class LeafPlace:
    """Where a leaf lies.

    Attributes:
        container: the one that it lies in, the innermost if there are several.
        around: the structure of all that lies around this leaf alone; None if nothing does.
    """

    container: Container = PLAIN
    around: Spec | None = None


_IN_NONE = LeafPlace()


def places_in(spec: Spec) -> list[LeafPlace]:
    """Where each leaf of a structure lies."""
    if not spec.num_children:
        return [_IN_NONE] * spec.num_leaves
    found = [place for child in spec.children() for place in places_in(child)]
    container = PLAIN if spec.type is None else container_of_type(spec.type)
    return found if container is PLAIN else [_within(container, spec.one_level(), place) for place in found]


def _within(container: Container, one: Spec | None, place: LeafPlace) -> LeafPlace:
    assert one is not None
    if place.around is None:
        return LeafPlace(container, one)
    around = place.around
    return replace(place, around=one.transform(None, lambda leaf: around))


def containers_of(leaves: Sequence[Any], spec: Spec) -> list[Container]:
    """The container of each leaf of a tree outside of steps, as `pytree.flatten` gave them."""
    return [
        own if (own := container_of(leaf)) is not PLAIN else place.container
        for leaf, place in zip(leaves, places_in(spec), strict=True)
    ]


def flatten_apart(tree: Tree) -> tuple[list[Any], Spec]:
    """The leaves of a tree as a step is called with them, and its structure with all containers."""
    leaves, spec = pytree.flatten(tree, apart=True)
    # The first one of a type makes it known.
    met = [(kind, container) for kind in set(map(type, leaves)) if (container := container_of_type(kind)) is not PLAIN]
    for kind, container in met:
        register(container, kind)
    return pytree.flatten(tree, apart=True) if met else (leaves, spec)


def bare(tree: Tree) -> Tree:
    """A tree with what a step sees in place of each container, but for what is in parts; itself if there are none.

    Example:
        >>> bare({"seen": labels.PerRank(torch.tensor(3)), "w": torch.tensor(0.5)})
        {'seen': tensor(3), 'w': tensor(0.5000)}
    """
    around = frozenset(each.kind for each in CONTAINERS if each.everywhere and each.kind is not None)
    leaves, spec = pytree.flatten(tree, none_is_leaf=True, whole=around)
    found = [each.seen(leaf) for leaf, each in zip(leaves, map(container_of, leaves), strict=True)]
    if all(one is two for one, two in zip(leaves, found, strict=True)):
        return tree
    # What was put into a tree for a while may be a tree itself, with containers in it.
    return pytree.unflatten(spec, [one if one is two else bare(two) for one, two in zip(leaves, found, strict=True)])


def bare_spec(spec: Spec, role: Role | None = None) -> Spec:
    """The structure of a tree without containers.

    Args:
        spec: the structure with them.
        role: of those that are left out; None for all.
    """
    if not spec.num_children:
        return spec
    container = PLAIN if spec.type is None else container_of_type(spec.type)
    children = [bare_spec(child, role) for child in spec.children()]
    if container is not PLAIN and role in (None, container.role):
        (child,) = children
        return child
    it, one = iter(children), spec.one_level()
    assert one is not None
    return one.transform(None, lambda leaf: next(it))


def with_containers(spec: Spec, around: Sequence[Spec | None]) -> Spec:
    """The structure of a tree after some of its leaves were put into containers.

    Args:
        spec: the structure.
        around: for each leaf, `LeafPlace.around`; None to leave it as it is.
    """
    wanted = iter(around)
    return spec.transform(None, lambda leaf: (next(wanted) or leaf) if leaf.num_leaves else leaf)


def in_containers_of(tree: Tree, spec: Spec) -> Tree:
    """What a step returns by itself, in the containers of what its program returns; itself if it is of another form.

    Args:
        tree: what it returns.
        spec: the structure of what the program returns, as `flatten_apart` has it.
    """
    leaves, found = pytree.flatten(bare(tree))
    return pytree.unflatten(spec, leaves) if found == bare_spec(spec) else tree


def looked_into(tree: Tree) -> tuple[list[Any], Spec]:
    """What two results are compared by: the tensors that hold the bits of their leaves, and their bare structure."""
    leaves, spec = pytree.flatten(tree)
    found = zip(leaves, containers_of(leaves, spec), strict=True)
    return [container.tensor(leaf) for leaf, container in found], bare_spec(spec)


def copied(tree: Tree) -> Tree:
    """A tree with a copy of each tensor, in a container of the same kind."""
    leaves, spec = pytree.flatten(tree)
    return pytree.unflatten(spec, map(_copied, leaves, containers_of(leaves, spec)))


def _copied(leaf: object, container: Container) -> Any:
    tensor = container.tensor(leaf)
    return container.with_tensor(leaf, tensor.detach().clone()) if isinstance(tensor, torch.Tensor) else leaf
