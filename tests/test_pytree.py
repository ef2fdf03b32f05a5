"""Containers of all kinds are taken apart and put together, unregistered by whoever uses them."""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any

import optree
import pytest
import torch
from containers import CONTAINERS, Batch, Box, Colour, Encoding, Frozen, Marked, Net, Odd, Registered, Slotted, Tokens

import fdp
from fdp import pytree


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
        "batch['d']: containers.Odd, a subclass of dict that is not registered Odd(x=1), in a batch argument, which "
        "holds tensors only",
    ]


@dataclasses.dataclass(eq=False, repr=False)
class Node:
    value: Any
    more: Any = None


def test_a_tree_that_holds_itself_is_refused() -> None:
    state: dict[str, Any] = {"w": torch.ones(3), "more": [1, {}]}
    state["more"][1]["me"] = state
    deep, chain, shared = torch.ones(1), (), Node(torch.ones(1))  # type: ignore[var-annotated]
    for _ in range(3_000):
        deep, chain = [deep], (1, chain)  # type: ignore[assignment]
    for _ in range(40):
        shared = Node(shared, shared)
    root = Node(None, shared)
    root.value = [root]
    optree.register_pytree_node(
        Node, lambda node: ((node.value, node.more), None, ("value", "more")), lambda _, parts: Node(*parts),
        namespace="fdp",
    )  # fmt: skip
    for call in (fdp.replicate, fdp.pmean, fdp.data_parallel(lambda state: state)):
        with pytest.raises(fdp.ArgumentError, match=r"endless: what .*\['more'\]\[1\]\['me'\] holds"):
            call(state)
        for tree in (deep, chain):
            with pytest.raises(fdp.ArgumentError, match="nested too deep"):
                call(tree)
    with pytest.raises(fdp.ArgumentError, match=r"endless: what \['value'\]\[0\] holds"):
        fdp.replicate(root)
