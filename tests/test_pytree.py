"""Containers of all kinds: as batches, as state, as what a step returns, unregistered by whoever uses them."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import importlib.util
import pathlib
import threading
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import optree
import pytest
import ranks
import torch
from samples import ALL_SAMPLES
from torch import nn

import fdp
from fdp import pytree
from fdp.trace.structure import Structure

T = TypeVar("T")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="no transformers: pip install fdp[huggingface]"
)


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


def contents(tree: Any) -> Any:
    """What a container holds, by another way than by flattening it."""
    if dataclasses.is_dataclass(tree) and hasattr(tree, "__dict__"):
        return type(tree), {k: contents(v) for k, v in vars(tree).items() if not k.startswith("__")}
    if isinstance(tree, collections.UserDict):
        return type(tree), {k: contents(v) for k, v in vars(tree).items()}, list(tree)
    if isinstance(tree, torch.Tensor):
        return tree.tolist()
    return type(tree), tree


@pytest.mark.parametrize("name", list(CONTAINERS))
def test_there_and_back(name: str) -> None:
    tree, names = CONTAINERS[name]
    leaves, spec = pytree.flatten(tree)
    assert pytree.leaf_names(tree, "t") == pytree.names_in(spec, "t") == names
    assert len(leaves) == len(names)
    assert contents(pytree.unflatten(spec, leaves)) == contents(tree)
    assert pytree.structure_of(tree) == spec
    assert hash(pytree.structure_of(tree)) == hash(spec)
    # By the same way as its name says, a leaf is found again.
    if not isinstance(tree, Registered):
        by_path = [accessor(tree) for accessor in spec.accessors()]
        assert all(a is b for a, b in zip(by_path, leaves, strict=True))


def test_a_batch_encoding_leaves_its_encodings_behind() -> None:
    transformers = pytest.importorskip("transformers", reason="no transformers: pip install fdp[huggingface]")
    batch = transformers.BatchEncoding({"input_ids": torch.ones(2)}, encoding=[Tokens()], n_sequences=1)
    leaves, spec = pytree.flatten(batch)
    assert pytree.leaf_names(batch, "batch") == ["batch['input_ids']"]
    again = pytree.unflatten(spec, leaves)
    assert type(again) is type(batch)
    assert (again.input_ids is leaves[0], again.n_sequences, again.encodings) == (True, 1, None)
    other = transformers.BatchEncoding({"input_ids": torch.ones(2)}, encoding=[Tokens()], n_sequences=1)
    assert pytree.structure_of(other) == spec


def test_a_model_output_is_read_by_attributes() -> None:
    pytest.importorskip("transformers", reason="no transformers: pip install fdp[huggingface]")
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    output = BaseModelOutputWithPooling(torch.ones(2), None, hidden_states=(torch.ones(1), torch.ones(1)))
    names = ["o.last_hidden_state", "o.hidden_states[0]", "o.hidden_states[1]"]
    assert pytree.leaf_names(output, "o") == names
    again = pytree.map_leaves(lambda x: x + 1, output)
    assert type(again) is type(output)
    assert (list(again), again.pooler_output, again[0].tolist()) == (list(output), None, [2.0, 2.0])


def test_a_dataclass_that_torch_export_has_registered() -> None:
    @dataclasses.dataclass
    class Pair:
        a: Any
        b: Any = None

    torch.export.register_dataclass(Pair)
    pair = Pair(torch.ones(2), [torch.zeros(1)])
    assert pytree.leaf_names(pair, "p") == ["p.a", "p.b[0]"]
    assert pytree.map_leaves(lambda x: x + 1, pair).b[0].tolist() == [1.0]
    alone = pytree.map_leaves(lambda x: x + 1, Pair(torch.ones(2)))
    assert (alone.a.tolist(), alone.b) == ([2.0, 2.0], None)
    assert pytree.structure_of(alone) != pytree.structure_of(pair)


@dataclasses.dataclass
class Failure(Exception):
    x: int = 1


@pytest.mark.parametrize(
    "leaf", [Failure(), Colour.RED, Batch, Net(), Odd(), lambda: 0, object()], ids=lambda x: type(x).__name__
)
def test_what_is_no_container(leaf: Any) -> None:
    assert pytree.leaves_of([leaf])[0] is leaf


def test_the_registry_of_others_is_not_changed() -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    tree = [Local(1), Registered(2), collections.UserDict(k=3)]
    before = optree.tree_leaves(tree)
    assert pytree.leaves_of(tree) == [1, 2, 3]
    assert [a is b for a, b in zip(optree.tree_leaves(tree), before, strict=True)] == [True] * 3
    optree.register_pytree_node(Local, lambda x: ((x.x,), None), lambda _, c: Local(*c), namespace="theirs")


def test_structures_differ_by_what_is_not_a_leaf() -> None:
    trees = [Marked(0), Marked(0, 2), Marked(0, 1), Marked(0, True), Marked(0, 0.0), Marked(0, -0.0), Marked(0, mode=2),
             Batch(0), Batch(0, 0), Box(0), Slotted(0, 0), Encoding({"a": 0}, required=0),
             Encoding({"a": 0, "b": 0}, required=0), Encoding({"b": 0, "a": 0}, required=0)]  # fmt: skip
    found = [pytree.structure_of(tree) for tree in trees]
    assert len(set(found)) == len(trees)
    assert all((a == b) == (i == j) for i, a in enumerate(found) for j, b in enumerate(found))


@pytest.mark.parametrize(
    ("value", "what"),
    [([1], "holds a list, which cannot be hashed."), (torch.ones(1), "holds a tensor, which would be frozen.")],
)
def test_a_static_field_that_cannot_be_one(value: Any, what: str) -> None:
    with pytest.raises(fdp.ArgumentError) as caught:
        pytree.flatten({"k": Marked(1, value)})
    first, last = str(caught.value).splitlines()
    assert first == f"the static field 'scale' of a Marked {what}"
    assert last.startswith("Remedy: ")


def test_containers_met_by_many_threads_at_once() -> None:
    kinds = [dataclasses.make_dataclass(f"Made{i}", ["x"]) for i in range(20)]
    found: list[Any] = []

    def look() -> None:
        found.append([pytree.leaves_of([kind(i)]) for i, kind in enumerate(kinds)])

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[[i] for i in range(20)]] * 8


def test_key_paths_in_messages() -> None:
    @fdp.data_parallel
    def step(state: Any, batch: Any) -> Any:
        return Frozen(batch.x, Batch({"k": batch.x.sum()}), size=0)

    with pytest.raises(fdp.ReplicationError) as caught:
        step(torch.ones(2), Batch(torch.ones(2)))
    assert "output.w" in str(caught.value)
    assert "output.inner.x['k']" in str(caught.value)
    with pytest.raises(fdp.TraceError) as refused:
        step(Frozen(torch.ones(2), object()), Encoding({"x": 3, "d": Odd()}, required=torch.ones(1)))
    assert [line.strip() for line in str(refused.value).splitlines()[1:-1]] == [
        "state.inner: object, which is neither a tensor nor a plain constant",
        "batch['x']: int 3, in a batch argument, which holds tensors only",
        "batch['d']: test_pytree.Odd, a subclass of dict that is not registered Odd(x=1), in a batch argument, which "
        "holds tensors only",
    ]


# --- on ranks -----------------------------------------------------------------------------------------

WRAPPERS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
    # How a pair of tensors is put into a container, and got out of it.
    "dict": (lambda x, y: {"x": x, "y": y}, lambda c: (c["x"], c["y"])),
    "dataclass": (Batch, lambda c: (c.x, c.y)),
    "slots": (Slotted, lambda c: (c.b, c.a)),
    "nested": (lambda x, y: Frozen(x, Batch(None, [y])), lambda c: (c.w, c.inner.y[0])),
    "static": (lambda x, y: [Marked(x), Marked(y, "s")], lambda c: (c[0].x, c[1].x)),
    "named tuple": (Point, lambda c: (c.x, c.y)),
    "UserDict": (lambda x, y: collections.UserDict(x=x, y=y), lambda c: (c["x"], c["y"])),
    "encoding": (lambda x, y: Encoding({"x": x}, required=y), lambda c: (c["x"], c.lengths)),
    "registered": (Registered, lambda c: tuple(c.parts)),
    "keyed": (Keyed, lambda c: tuple(c.parts)),
}


def loss_of(w: Any, b: Any, x: Any, y: Any) -> torch.Tensor:
    return ((x @ w + b - y) ** 2).mean()


def train_with(name: str, folder: str) -> Any:
    """Three steps with state, batch, auxiliary result and output in one kind of container; and with plain tensors."""
    pack, unpack = WRAPPERS[name]
    rank = fdp.axis_index()
    g = torch.Generator().manual_seed(int(rank))
    # Constants may be in state, not in a batch.
    plain = name != "nested"
    pack_batch = pack if plain else lambda x, y: Batch(x, Box(y))
    unpack_batch = unpack if plain else lambda c: (c.x, c.y.value)
    optimizer = fdp.optim.from_torch(torch.optim.Adam, lr=0.1)

    @fdp.data_parallel(donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            w, b = unpack(params)
            x, y = unpack_batch(batch)
            return loss_of(w, b, x, y), pack_batch(x.sum(), (x @ w).detach())

        (loss, aux), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        metrics = pack(fdp.pmean(loss), fdp.psum(unpack_batch(aux)[0]))
        return {"params": params, "opt": opt}, metrics, fdp.per_rank(aux)

    params = pack(torch.full((3, 1), float(rank)), torch.zeros(1))
    params = fdp.replicate(params)  # rank 0's
    state = {"params": params, "opt": optimizer.init(params)}
    # The dumber program: the class itself, and gradients that are averaged by hand.
    w, b = torch.zeros(3, 1).requires_grad_(), torch.zeros(1).requires_grad_()
    by_hand = torch.optim.Adam([w, b], lr=0.1)
    for _ in range(3):
        x, y = torch.randn(4, 3, generator=g), torch.randn(4, 1, generator=g)
        by_hand.zero_grad()
        loss = loss_of(w, b, x, y)
        loss.backward()
        for p in (w, b):
            assert p.grad is not None
            p.grad.copy_(fdp.pmean(p.grad))
        before, inside = fdp.pmean(loss.detach()), (x @ w).detach()
        by_hand.step()
        old = unpack(state["params"])
        state, metrics, aux = step(state, pack_batch(x, y))
        assert type(state["params"]) is type(metrics) is type(params)
        assert type(aux) is type(pack_batch(x, y))
        torch.testing.assert_close(unpack(state["params"]), (w.detach(), b.detach()))
        torch.testing.assert_close(unpack(metrics), (before, fdp.psum(x.sum())))
        torch.testing.assert_close(unpack_batch(aux)[1], inside)
        assert all(new is was for new, was in zip(unpack(state["params"]), old, strict=True))  # donated
    fdp.assert_replicated(state)
    fdp.save(folder, state)
    blank = pytree.map_leaves(lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x, state)
    loaded = fdp.load(folder, like=blank)
    assert type(loaded["params"]) is type(params)
    torch.testing.assert_close(unpack(loaded["params"]), unpack(state["params"]), rtol=0, atol=0)
    return step.traces


def train_with_each(names: list[str], folder: str) -> dict[str, int]:
    return {name: train_with(name, f"{folder}/{name.replace(' ', '-')}") for name in names}


def test_training_in_containers_of_all_kinds(tmp_path: pathlib.Path) -> None:
    names = list(WRAPPERS) if ALL_SAMPLES else ["nested", "static", "encoding", "keyed"]
    for traces in ranks.run(2, train_with_each, names, str(tmp_path)):
        assert traces == dict.fromkeys(names, 1)


def test_containers_under_transforms() -> None:
    params = Batch(torch.tensor([1.0, 2.0]), torch.tensor(3.0))

    def loss(p: Batch, x: torch.Tensor) -> Any:
        return (p.x * x).sum() * p.y, Frozen(p.x * x, None)

    (value, aux), grads = fdp.value_and_grad(loss, has_aux=True)(params, torch.ones(2))
    assert (value.item(), grads, aux.w.tolist()) == (9.0, Batch(grads.x, grads.y), [1.0, 2.0])
    assert (grads.x.tolist(), grads.y.item()) == ([3.0, 3.0], 3.0)
    assert not aux.w.requires_grad

    def both(x: torch.Tensor) -> Any:
        grads, aux = fdp.grad(loss, has_aux=True)(params, x)
        return grads.x, aux.w

    found, seen = torch.func.vmap(both)(torch.eye(2))
    assert found.tolist() == (3 * torch.eye(2)).tolist()
    assert seen.tolist() == [[1.0, 0.0], [0.0, 2.0]]


@needs_transformers
def test_a_batch_of_a_tokenizer_keeps_its_trace() -> None:
    from transformers import BatchEncoding
    from transformers.modeling_outputs import BaseModelOutput

    @fdp.data_parallel
    def step(w: Any, batch: Any) -> Any:
        assert isinstance(batch, BatchEncoding)
        hidden = batch.input_ids.float() * w
        return fdp.per_rank(BaseModelOutput(hidden, attentions=(hidden.sum(),)))

    for number in range(3):
        output = step(torch.tensor(2.0), BatchEncoding({"input_ids": torch.tensor([[number]])}, encoding=[Tokens()]))
        assert (output.last_hidden_state.item(), output.attentions[0].item()) == (2 * number, 2 * number)
        assert type(output) is BaseModelOutput
    assert step.traces == 1


@pytest.mark.parametrize("name", list(CONTAINERS))
def test_arguments_of_a_structure_that_is_known(name: str) -> None:
    """Taken apart along it they are the same leaves; and what has another structure is not taken for one of it."""
    tree, _ = CONTAINERS[name]
    for make in (lambda t: (t, {"a": 1}), lambda t: (t,), lambda t: (None, t), lambda t: ({"k": [t]}, 2, t)):
        args = make(tree)
        known = Structure(pytree.structure_of(args))
        found = known.flatten(args)
        assert found is not None
        assert [id(leaf) for leaf in found] == [id(leaf) for leaf in pytree.leaves_of(args)]
        assert known.flatten((*args, 1)) is None
        for other, _ in CONTAINERS.values():
            if pytree.structure_of(make(other)) != known.spec:
                taken = known.flatten(make(other))
                # A container in the place of a leaf is left for whoever looks at the leaves.
                assert taken is None or not all(isinstance(leaf, (int, str, torch.Tensor)) for leaf in taken)
