"""The parts by which a call is recognised: what tensors are, and what structures are."""

from __future__ import annotations

import collections
from typing import Any

import optree
import pytest
import torch
from containers import CONTAINERS
from telling_steps import Pair

from fdp import pytree
from fdp.pytorch import guards
from fdp.trace.calls.structure import Structure


@pytest.mark.parametrize("native", [True, False])
def test_tensors_are_told_apart_by_all_but_their_place(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(guards, "_TensorGuards", None)
    base = torch.ones(3, 3)
    square = guards.tensors_like([torch.zeros(1), base])
    one = torch.zeros(1)
    assert square([one, base]) and square([one, torch.zeros(10)[1:].view(3, 3)])
    with torch.inference_mode():
        under_inference = torch.ones(3, 3)
    others: list[Any] = [
        torch.ones(3, 2), base.t(), base.double(), torch.ones(3, 3, requires_grad=True), torch.nn.Parameter(base),
        base.to("meta"), base.to_sparse(), base.expand(1, 3, 3), 1, None, [base], base.numpy(), base._neg_view(),
        under_inference,
    ]  # fmt: skip
    for other in others:
        assert not square([one, other]), other
    twice = guards.tensors_like([base, one, base])
    assert twice([base, one, base])
    assert not twice([base, one, base.clone()]) and not twice([base, base, base])
    assert guards.tensors_like([])([])
    z = torch.ones(2, dtype=torch.complex64)
    assert not guards.tensors_like([z])([z.conj()])


def test_structures_are_those_of_optree() -> None:
    """For any two trees: the leaves that optree finds if the structures are equal, else none."""

    class Sub(dict):  # type: ignore[type-arg]
        pass

    OD, DD = collections.OrderedDict, collections.defaultdict
    Other = collections.namedtuple("Other", "first second")
    trees: list[Any] = [
        (), (1,), (1, 2), ([1],), ([],), ((),), (None,), ([None],), ({},), ({"a": 1},), ({"a": 1, "b": 2},),
        ({"b": 1, "a": 2},), (OD(a=1, b=2),), (OD(b=1, a=2),), (OD(),), (DD(int, a=1),), (DD(list, a=1),), (DD(int),),
        (Pair(1, 2),), (Pair(1, None),), (Other(1, 2),), ([1, 2],), (Sub(a=1),), (collections.deque([1, 2]),),
        (collections.deque([1, 2], maxlen=4),), (torch.Size([1, 2]),), ({"a": {"b": 1}, "c": {"d": 2}},),
        ({"a": {"b": 1}, "c": {"e": 2}},), ({"a": {"b": 1}, "c": [2]},), ({"a": OD(x=1, y=2), "c": [2]},),
        ({"a": OD(y=1, x=2), "c": [2]},), ({"a": [OD(x=1, y=2)]},), ({"a": [OD(y=1, x=2)]},), ({"a": [None], "b": 1},),
        ({1: 1, 2: [2]},), ({"a": {"b": 1, "z": 3}, "c": {}},), ({"a": {"b": None}, "c": {"d": 2}},),
        (torch.return_types.max((1, 2)),),
    ]  # fmt: skip
    for known in trees:
        leaves, spec = optree.tree_flatten(known)
        structure = Structure(spec)
        assert structure.flatten(known) == leaves
        for tree in trees:
            found = structure.flatten(tree)
            expected, other = optree.tree_flatten(tree)
            if other == spec:
                assert found == expected
            elif found is not None:  # something is left in the place of a leaf, which is none
                assert any(optree.tree_structure(leaf).kind != optree.PyTreeKind.LEAF for leaf in found), (known, tree)


def test_a_container_of_the_wrong_type_is_not_written_out() -> None:
    class Costly:
        def __repr__(self) -> str:
            raise AssertionError("was written out")

    structure = Structure(optree.tree_structure(({"a": [1, 2], "b": (1, None)},)))
    wrong: list[Any] = [
        {"a": (Costly(), Costly()), "b": (1, None)}, {"a": [Costly()], "b": (1, None)}, [Costly()], Costly(),
        {"a": [1, 2], "b": (1, Costly())}, {"a": [1, 2], "c": Costly()}, {"a": Costly(), "b": Costly()},
    ]  # fmt: skip
    for tree in wrong:
        assert structure.flatten((tree,)) is None


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
