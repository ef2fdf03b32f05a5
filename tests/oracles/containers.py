"""Containers of all kinds, as people define them; few are registered anywhere."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

T = TypeVar("T")


@dataclasses.dataclass
class Batch:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    w: Any
    inner: Any
    name: str = "layer"
    size: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    b: Any
    a: Any


@dataclasses.dataclass
class Derived:
    """What its constructor takes is not what it holds, and it does not take everything."""

    rows: dataclasses.InitVar[Any]
    x: Any = dataclasses.field(init=False)
    never_set: Any = dataclasses.field(init=False)

    def __post_init__(self, rows: Any) -> None:
        if not isinstance(rows, torch.Tensor):
            raise TypeError("rows of tensors")
        self.x = rows * 2
        self.beside = rows + 1

    @functools.cached_property
    def total(self) -> Any:
        return self.x.sum()


@dataclasses.dataclass
class Box(Generic[T]):
    value: T


@dataclasses.dataclass
class Larger(Batch):
    more: dict[str, Any] = dataclasses.field(default_factory=dict, kw_only=True)


@dataclasses.dataclass
class Marked:
    x: Any
    scale: Any = dataclasses.field(default=2.0, metadata={"static": True})
    mode: Any = dataclasses.field(default="a", metadata={"pytree_node": False})


class Point(NamedTuple):
    x: Any
    y: Any


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """As a tokenizer returns it: a dictionary that takes other arguments, with attributes beside its items."""

    def __init__(self, data: dict[str, Any], *, required: Any) -> None:
        super().__init__(data)
        self.lengths, self.kind = required, "pt"


class Tokens:
    """What a tokenizer knows of one text."""

    n_sequences = 1


class Registered:
    """Known to torch's pytrees, under keys of three kinds or none."""

    def __init__(self, *parts: Any) -> None:
        self.parts = list(parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registered) and self.parts == other.parts


class Keyed(Registered):
    pass


torch.utils._pytree.register_pytree_node(Registered, lambda r: (r.parts, ["no hash"]), lambda c, _: Registered(*c))


torch.utils._pytree.register_pytree_node(
    Keyed,
    lambda r: (r.parts, None),
    lambda c, _: Keyed(*c),
    flatten_with_keys_fn=lambda r: (
        list(zip([torch.utils._pytree.GetAttrKey("first"), torch.utils._pytree.MappingKey("b")], r.parts, strict=True)),
        None,
    ),
)


@dataclasses.dataclass(frozen=True)
class Mixin:
    number: int


class Colour(Mixin, enum.Enum):
    RED = 1


@dataclasses.dataclass(eq=False)
class Net(nn.Module):
    width: int = 2

    def __post_init__(self) -> None:
        super().__init__()


@dataclasses.dataclass
class Odd(dict):  # type: ignore[type-arg]
    x: int = 1


CONTAINERS: dict[str, tuple[Any, list[str]]] = {
    "dataclass": (Batch(1, 2), ["t.x", "t.y"]),
    "with None": (Batch(1), ["t.x"]),
    "frozen, nested": (Frozen(1, Batch({"k": 2}, (3,))), ["t.w", "t.inner.x['k']", "t.inner.y[0]", "t.name", "t.size"]),
    "with slots": (Slotted(1, [2]), ["t.b", "t.a[0]"]),
    "init=False": (Derived(torch.ones(2)), ["t.x", "t.beside"]),
    "generic": (Box[int](1), ["t.value"]),
    "inherited": (Larger(1, more={"k": 2}), ["t.x", "t.more['k']"]),
    "static": (Marked(1), ["t.x"]),
    "named tuple": (Point(1, Point(2, 3)), ["t.x", "t.y.x", "t.y.y"]),
    "UserDict": (collections.UserDict({"b": 1, "a": (2,)}), ["t['b']", "t['a'][0]"]),
    "UserDict of its own": (Encoding({"b": 1, "a": 2}, required=[3]), ["t['b']", "t['a']", "t.lengths[0]"]),
    "torch's registry": (Registered(1, [2]), ["t[0]", "t[1][0]"]),
    "torch's registry, keys": (Keyed(1, [2]), ["t.first", "t['b'][0]"]),
    "shape": (torch.Size([4, 5]), ["t[0]", "t[1]"]),
    "deque": (collections.deque([1, 2]), ["t[0]", "t[1]"]),
    "defaultdict": (collections.defaultdict(list, b=1, a=2), ["t['a']", "t['b']"]),
    "fields of torch": (torch.return_types.max((1, 2)), ["t.values", "t.indices"]),
}
