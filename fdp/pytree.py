"""Trees of tensors: flattening, and the key path by which a person knows a leaf.

optree does the work, in a namespace of fdp's own: containers that it does not know are registered there when they are
first met. Trees of other libraries stay as they are. Those containers are dataclasses, subclasses of `UserDict` (what a
tokenizer of Hugging Face returns), and whatever is registered with torch's own pytrees (its `ModelOutput`s).
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import optree
import torch
from optree.accessors import PyTreeEntry
from optree.registry import __GLOBAL_NAMESPACE as _EVERYWHERE

# What is registered with torch's pytrees has no public name: a dict from each type to its functions.
from torch.utils._pytree import SUPPORTED_NODES as _TORCH_NODES
from torch.utils._pytree import GetAttrKey
from torch.utils._pytree import register_pytree_node as register_torch_node

from fdp.endless_trees import endless
from fdp.errors import ArgumentError, build_message

Tree = Any
"""Any nesting of containers: dict, list, tuple, named tuple, deque, dataclass, `UserDict`, what is registered with
optree or with torch's pytrees."""

Spec: TypeAlias = optree.PyTreeSpec
"""The structure of a tree, without its leaves; compared and hashed."""

_NAMESPACE = "fdp"

_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum, type(None))

_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, torch.dtype, torch.device, type(None)})
"""Types that are no containers, by far the most frequent ones; others are looked at."""

_NOT_CARRIED = {"BatchEncoding": ("_encodings",), "BatchFeature": ("skip_tensor_conversion",)}
"""What the dictionaries of Hugging Face hold for their conversions to tensors, which lie behind them in a step."""

_apart: frozenset[type] = frozenset()
"""Types of containers that are leaves but where they are asked to be taken apart."""

_registering = threading.Lock()
_registered: set[type] = set()


def flatten(
    tree: Tree, none_is_leaf: bool = False, whole: frozenset[type] = frozenset(), apart: bool = False
) -> tuple[list[Any], Spec]:
    """Take a tree apart.

    Args:
        tree: any pytree.
        none_is_leaf: whether None is a leaf, or a container of nothing.
        whole: types of containers that are leaves for once.
        apart: whether what was registered by `register_where_taken_apart` is taken apart, too.

    Returns:
        Its leaves in a row, and its structure.

    Raises:
        ArgumentError: a static field of a dataclass holds what cannot be hashed; or the tree holds itself.

    Example:
        >>> flatten({"w": 1, "b": (2, None)})
        ([2, 1], PyTreeSpec({'b': (*, None), 'w': *}))
    """
    kept = whole if apart else _apart | whole
    is_leaf = (lambda node: type(node) in kept) if kept else None
    while True:
        try:
            leaves, spec = optree.tree_flatten(tree, is_leaf, none_is_leaf=none_is_leaf, namespace=_NAMESPACE)
        except RecursionError as error:
            raise endless(tree, _NAMESPACE) from error
        # A leaf that turns out to be a container shows containers inside of it only when it is taken apart.
        if not _register(set(map(type, leaves)) - _LEAVES - kept):
            return leaves, spec


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Tree:
    """Put leaves into a structure that `flatten` gave."""
    return optree.tree_unflatten(spec, leaves)


def register_everywhere(
    kind: type,
    parts: Callable[[Any], tuple[Sequence[Any], Any, Sequence[Any]]],
    whole: Callable[[Any, Iterable[Any]], Any],
    entry: type[PyTreeEntry],
) -> None:
    """Make a container of fdp's own known to optree, in all namespaces, and to torch's pytrees.

    Args:
        kind: its type.
        parts: takes one apart: children, what is no child and belongs to the structure, and for each child the
            attribute that holds it, by its name or otherwise.
        whole: makes one of the rest and its children.
        entry: a step of a key path into it.
    """
    optree.register_pytree_node(kind, parts, whole, path_entry_type=entry, namespace=_EVERYWHERE)
    register_torch_node(
        kind,
        lambda it: (list(parts(it)[0]), parts(it)[1]),
        lambda children, rest: whole(rest, children),
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=lambda it: (
            [(GetAttrKey(str(name)), child) for child, name in zip(parts(it)[0], parts(it)[2], strict=True)],
            parts(it)[1],
        ),
    )


def register_where_taken_apart(
    kind: type,
    parts: Callable[[Any], tuple[Sequence[Any], Any, Sequence[Any]]],
    whole: Callable[[Any, Iterable[Any]], Any],
    entry: type[PyTreeEntry],
) -> None:
    """Make a type a container for `flatten(..., apart=True)` alone; the arguments are as for `register_everywhere`."""
    global _apart
    with _registering:
        if kind not in _apart:
            optree.register_pytree_node(kind, parts, whole, path_entry_type=entry, namespace=_NAMESPACE)
            _apart = _apart | {kind}


def tuple_of(specs: Iterable[Spec]) -> Spec:
    """The structure of a tuple of trees of which only the structures are at hand."""
    return optree.treespec_tuple(specs, namespace=_NAMESPACE)


def leaves_of(tree: Tree) -> list[Any]:
    """The leaves of a tree in a row."""
    return flatten(tree)[0]


def structure_of(tree: Tree, none_is_leaf: bool = False) -> Spec:
    """The structure of a tree."""
    return flatten(tree, none_is_leaf)[1]


def map_leaves(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """The tree of what a function makes of each leaf, and of the leaves in its place in other trees."""
    leaves, spec = flatten(tree)
    return unflatten(spec, map(fn, leaves, *(spec.flatten_up_to(other) for other in others)))


def leaf_names(tree: Tree, root: str, none_is_leaf: bool = False) -> list[str]:
    """Name each leaf by the expression that would fetch it.

    Args:
        tree: any pytree.
        root: the name of the tree itself.
        none_is_leaf: whether None is a leaf.

    Returns:
        One name a leaf, in flattening order.

    Example:
        >>> leaf_names({"params": {"w": 1, "b": 2}, "n": (3,)}, "state")
        ["state['n'][0]", "state['params']['b']", "state['params']['w']"]
    """
    return names_in(structure_of(tree, none_is_leaf), root)


def names_in(spec: Spec, root: str) -> list[str]:
    """Likewise, for the leaves of a tree of which only the structure is at hand."""
    return [accessor.codify(root) for accessor in spec.accessors()]


def describe_kind(leaf: Any) -> str:
    """The type of a leaf; and why it is one, if it looks like a container.

    Example:
        >>> describe_kind(3), describe_kind(collections.Counter("a"))
        ('int', 'collections.Counter, a subclass of dict that is not registered')
    """
    kind = type(leaf)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    for base in (dict, list, tuple):
        if isinstance(leaf, base):
            return f"{name}, a subclass of {base.__name__} that is not registered"
    return name


class _Attribute(str):
    """The name of an attribute, as an entry of a key path; all other entries are keys or numbers."""

    __slots__ = ()


class _KeyPathEntry(PyTreeEntry):
    """One step of a key path through a container of ours."""

    def __call__(self, obj: Any) -> Any:
        return getattr(obj, self.entry) if isinstance(self.entry, _Attribute) else obj[self.entry]

    def codify(self, /, node: str = "") -> str:
        """The expression for what lies behind a node."""
        return f"{node}.{self.entry}" if isinstance(self.entry, _Attribute) else f"{node}[{self.entry!r}]"


@dataclasses.dataclass(frozen=True, eq=False)
class _Context:
    """What a container is beside its children.

    optree compares it and hashes it; what torch's pytrees keep may be a list, which has no hash.
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and bool(self.value == other.value)

    def __hash__(self) -> int:
        try:
            return hash(self.value)
        except TypeError:
            return 0

    def __repr__(self) -> str:
        return repr(self.value)


_Parts = tuple[Sequence[Any], _Context, Sequence[Any]]
"""The children of a container, what it is beside them, and the entry of each."""


class Unseen(PyTreeEntry):
    """The step of a key path into a container of one child, which adds nothing to the name of the child."""

    def __call__(self, obj: Any) -> Any:
        (child,), *_ = optree.tree_flatten_one_level(obj, namespace=_NAMESPACE)
        return child

    def codify(self, /, node: str = "") -> str:
        """The expression for the child."""
        return node


def _register(kinds: Iterable[type]) -> bool:
    """Make containers known that were met as leaves; whether any of the types is one."""
    found = False
    for kind in kinds:
        functions = _functions_for(kind)
        if functions is None:
            continue
        found = True
        with _registering:
            if kind not in _registered:
                optree.register_pytree_node(kind, *functions, path_entry_type=_KeyPathEntry, namespace=_NAMESPACE)
                _registered.add(kind)
    return found


def _functions_for(kind: type) -> tuple[Callable[[Any], _Parts], Callable[[Any, Iterable[Any]], Any]] | None:
    """How objects of a type are taken apart and put together; None if they are leaves."""
    if kind in _TORCH_NODES:
        return functools.partial(_torch_parts, kind), functools.partial(_torch_whole, kind)
    if issubclass(kind, (enum.Enum, torch.Tensor, torch.nn.Module)):
        return None
    if issubclass(kind, collections.UserDict):
        return functools.partial(_user_dict_parts, _not_carried(kind)), functools.partial(_user_dict_whole, kind)
    # One that also is a dict, a list or the like holds more than its fields.
    if dataclasses.is_dataclass(kind) and _is_made_of_attributes(kind):
        return _dataclass_parts, functools.partial(_dataclass_whole, kind)
    return None


def _is_made_of_attributes(kind: type) -> bool:
    """Whether nothing written in C lies under a class, which would hold more than attributes."""
    made_by = [c for c in kind.__mro__ if "__new__" in vars(c) and c is not object]
    return all(isinstance(vars(c)["__new__"], staticmethod) for c in made_by)


def _torch_parts(kind: type, whole: Any) -> _Parts:
    node = _TORCH_NODES[kind]
    children, context = node.flatten_fn(whole)
    if node.flatten_with_keys_fn is None:
        return children, _Context(context), range(len(children))
    # Its keys alone: of a dataclass that `torch.export` has registered it tells a context that cannot be put together.
    pairs, _ = node.flatten_with_keys_fn(whole)
    # A `ModelOutput` is read by attributes, and tells its keys as those of a dict.
    attributes = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return children, _Context(context), [_torch_entry(key, attributes) for key, _ in pairs]


def _torch_entry(key: Any, attributes: set[str]) -> Any:
    if isinstance(key, GetAttrKey):
        return _Attribute(key.name)
    entry = getattr(key, "key", getattr(key, "idx", key))
    return _Attribute(entry) if isinstance(entry, str) and entry in attributes else entry


def _torch_whole(kind: type, context: _Context, children: Iterable[Any]) -> Any:
    children = list(children)
    if kind is torch.Size and all(isinstance(child, int) for child in children):
        return torch.Size(children)  # torch would make a tuple of it
    return _TORCH_NODES[kind].unflatten_fn(children, context.value)


def _not_carried(kind: type) -> frozenset[str]:
    """Attributes that stay behind when a dictionary of Hugging Face is taken apart."""
    theirs = [c.__name__ for c in kind.__mro__ if c.__module__.startswith("transformers.")]
    return frozenset(name for c in theirs for name in _NOT_CARRIED.get(c, ()))


def _user_dict_parts(left: frozenset[str], whole: Any) -> _Parts:
    attributes = {key: value for key, value in vars(whole).items() if key != "data" and not _is_special(key)}
    plain = {k: v for k, v in attributes.items() if isinstance(v, _PLAIN) and k not in left}
    others = {k: v for k, v in attributes.items() if k not in plain and k not in left}
    keys = tuple(whole.data)
    constants = tuple(_constant(k, v) for k, v in plain.items())
    context = (keys, tuple(others), constants, tuple(sorted(left & attributes.keys())))
    entries = (*keys, *map(_Attribute, others))
    return (*whole.data.values(), *others.values()), _Context(context), entries


def _user_dict_whole(kind: Any, context: _Context, children: Iterable[Any]) -> Any:
    keys, others, constants, left = context.value
    values = iter(children)
    new = object.__new__(kind)
    # Not through the constructor, which may take other arguments; nor through attributes that a class computes.
    held = vars(new)
    held["data"] = dict(zip(keys, values, strict=False))
    held.update(dict(zip(others, values, strict=True)))
    held.update({name: value for name, value, *_ in constants})
    held.update(dict.fromkeys(left))
    return new


def _dataclass_parts(whole: Any) -> _Parts:
    names: list[str] = []
    constants = []
    fields = {field.name: field for field in dataclasses.fields(whole)}
    # Also what `__post_init__` or other code has set beside the fields; but not what is computed when asked for.
    beside = [key for key in getattr(whole, "__dict__", {}) if key not in fields and not _is_computed(whole, key)]
    for name in (*fields, *beside):
        if not hasattr(whole, name):
            continue  # a field that is not set yet
        if name in fields and _is_static(fields[name]):
            constants.append(_constant(name, _hashable(whole, name)))
        else:
            names.append(name)
    context = _Context((tuple(names), tuple(constants)))
    return [getattr(whole, name) for name in names], context, [_Attribute(name) for name in names]


def _dataclass_whole(kind: Any, context: _Context, children: Iterable[Any]) -> Any:
    names, constants = context.value
    # Not through the constructor: it may take other arguments (`init=False`, `InitVar`) or check values that are not
    # what they will be.
    new = object.__new__(kind)
    for name, value in zip(names, children, strict=True):
        object.__setattr__(new, name, value)
    for name, value, *_ in constants:
        object.__setattr__(new, name, value)
    return new


def _constant(name: str, value: Any) -> tuple[Any, ...]:
    """A constant, and what tells it from others that are equal to it: 1 == True == 1.0, 0.0 == -0.0."""
    text = repr(value)
    return name, value, type(value), None if " at 0x" in text else text


def _is_static(field: dataclasses.Field[Any]) -> bool:
    """Whether a field is a constant: as JAX has it ("static"), or as flax and optree do ("pytree_node")."""
    return bool(field.metadata.get("static")) or field.metadata.get("pytree_node") is False


def _is_computed(whole: Any, key: str) -> bool:
    return _is_special(key) or isinstance(getattr(type(whole), key, None), functools.cached_property)


def _is_special(key: str) -> bool:
    return key.startswith("__") and key.endswith("__")  # such as the type arguments of a generic class


def _hashable(whole: Any, name: str) -> Any:
    value = getattr(whole, name)
    try:
        hash(value)
    except TypeError:
        what = f"the static field {name!r} of a {type(whole).__qualname__} holds a {type(value).__qualname__}, which "
        remedy = "make it a tuple, a frozen dataclass or the like; or leave out what marks the field as static."
        raise ArgumentError(build_message(what + "cannot be hashed.", remedy=remedy)) from None
    if isinstance(value, torch.Tensor):
        what = f"the static field {name!r} of a {type(whole).__qualname__} holds a tensor, which would be frozen."
        raise ArgumentError(build_message(what, remedy="leave out what marks the field as static."))
    return value
