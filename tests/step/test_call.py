"""How a call finds its program: whatever changes between calls, the step computes what its function does.

A call that is like an earlier one is recognised without its signature; these tests change arguments between calls in
every way that comes to mind, and compare with the function itself and with the signature worked out in full.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
from bits import same_bits
from hypothesis import given
from hypothesis import strategies as st
from samples import examples

import fdp
import fdp.step.transform
from fdp.context.ambient import ambient_context
from fdp.distributed.group import resolve_group
from fdp.pytorch import guards
from fdp.trace import arguments, recognise
from fdp.trace.structure import Structure

Tree = Any


# --- what is recognised --------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(unsafe_hash=True)
class Options:
    scale: float


def kinds(tree: Tree) -> str:
    """Everything about containers and constants that a step can see."""
    if isinstance(tree, torch.Tensor):
        return "x"
    if isinstance(tree, collections.OrderedDict):
        return "od(" + ",".join(f"{k}={kinds(v)}" for k, v in tree.items()) + ")"
    if isinstance(tree, dict):  # of a dict's keys the order is none
        return f"{type(tree).__name__}(" + ",".join(f"{k}={kinds(tree[k])}" for k in sorted(tree)) + ")"
    if isinstance(tree, (list, tuple)):
        return f"{type(tree).__name__}(" + ",".join(map(kinds, tree)) + ")"
    return repr(tree)


def telling(state: Tree, options: Options, batch: Tree) -> Tree:
    """A step whose result tells what its arguments were like: containers, constants, layout, options."""
    mean = fdp.pmean(batch["x"].mean()) * options.scale
    tensors = [leaf for leaf in optree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]

    def new(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        return (leaf * 2 + mean).to(leaf.dtype)

    first = [leaf.detach().as_strided((min(1, leaf.numel()),), (1,)).real * 1.0 for leaf in tensors]
    layout = repr([(leaf.dtype, leaf.shape, leaf.stride()) for leaf in tensors])
    return optree.tree_map(new, state), first, kinds(state), layout, batch["x"].shape[0]


def plain_telling(state: Tree, options: Options, batch: Tree) -> Tree:
    """Likewise, without an operator that has an offset in it."""
    new, _, kind, layout, size = telling(state, options, batch)
    return new, kind, layout, size


def a_state() -> Tree:
    return {
        "w": torch.arange(9.0).view(3, 3).clone(),
        "v": collections.OrderedDict(a=torch.ones(2, 3), b=torch.arange(4.0)),
        "l": [torch.full((3, 3), 2.0), (torch.zeros(()), None), Pair(torch.ones(4), 1)],
        "c": {"n": 2, "f": 0.5},
    }


def apart(tree: Tree) -> Tree:
    """A copy whose tensors share nothing, in the same layouts."""

    def copy(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        return y.copy_(x.detach())

    return optree.tree_map(copy, tree)


def on_a_leaf(change: Callable[[Any, random.Random], Any]) -> Callable[[Tree, random.Random], Tree]:
    """A change of the state that replaces one of its tensors by what `change` makes of it, or changes it in place."""

    def changed(state: Tree, dice: random.Random) -> Tree:
        leaves, spec = optree.tree_flatten(state)
        which = dice.choice([i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)])
        new = change(leaves[which], dice)
        if new is not None:
            leaves[which] = new
        return optree.tree_unflatten(spec, leaves)

    return changed


def other_memory(x: torch.Tensor, dice: random.Random) -> None:
    x.data = x.data.clone()


def transposed_in_place(x: torch.Tensor, dice: random.Random) -> None:
    if x.dim() == 2 and not x.requires_grad:
        x.t_()


def part_of_more(x: torch.Tensor, dice: random.Random) -> torch.Tensor:
    more = torch.zeros(x.numel() + 2, dtype=x.dtype)
    return more[2:].view(x.shape).copy_(x.detach())


def aliased(state: Tree, dice: random.Random) -> Tree:
    """Two leaves of one shape become one, or views of one, or one gets the memory of the other."""
    leaves, spec = optree.tree_flatten(state)
    pairs = [
        (i, j)
        for i, x in enumerate(leaves)
        for j, y in enumerate(leaves)
        if i != j and isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
        if x.shape == y.shape and x.dtype == y.dtype and x.stride() == y.stride() and not y.requires_grad
    ]
    if pairs:
        i, j = dice.choice(pairs)
        way = dice.randrange(3)
        if way == 2 and not leaves[i].requires_grad:
            leaves[i].data = leaves[j].data
        else:
            leaves[i] = leaves[j] if way else leaves[j].view(leaves[j].shape)
    return optree.tree_unflatten(spec, leaves)


CHANGES: dict[str, Callable[[Tree, random.Random], Tree]] = {
    "nothing": lambda state, dice: state,
    "nothing again": lambda state, dice: state,
    "new tensors": lambda state, dice: apart(state),
    "a new tensor": on_a_leaf(lambda x, dice: x.detach().clone()),
    "aliases": aliased,
    "a view of itself": on_a_leaf(lambda x, dice: x.detach()),
    "transposed in place": on_a_leaf(transposed_in_place),
    "transposed": on_a_leaf(lambda x, dice: x.detach().t() if x.dim() == 2 else None),
    "other memory": on_a_leaf(other_memory),
    "an offset": on_a_leaf(part_of_more),
    "another shape": on_a_leaf(lambda x, dice: torch.ones(dice.choice([1, 2, 5]), 3)),
    "empty": on_a_leaf(lambda x, dice: torch.ones(0, 3)),
    "another dtype": on_a_leaf(lambda x, dice: x.detach().real.double()),
    "complex": on_a_leaf(lambda x, dice: x.detach().to(torch.complex64)),
    "conjugated": on_a_leaf(lambda x, dice: x.detach().to(torch.complex64).conj()),
    "gradients": on_a_leaf(lambda x, dice: x.detach().clone().requires_grad_() if x.is_floating_point() else None),
    "a parameter": on_a_leaf(lambda x, dice: torch.nn.Parameter(x.detach().clone(), False)),
    "a history": on_a_leaf(lambda x, dice: x.detach().requires_grad_() * 1 if x.is_floating_point() else None),
    "a subtree": on_a_leaf(lambda x, dice: dice.choice([[x], None, (), {"x": x}, 7])),
    "a dict for an ordered one": lambda state, dice: {**state, "v": dict(state["v"])},
    "a default dict": lambda state, dice: {**state, "v": collections.defaultdict(int, state["v"])},
    "an ordered dict for a dict": lambda state, dice: {**state, "c": collections.OrderedDict(state["c"])},
    "another order": lambda state, dice: {**state, "v": collections.OrderedDict(reversed(state["v"].items()))},
    "keys in another order": lambda state, dice: dict(reversed(state.items())),
    "a tuple for a list": lambda state, dice: {**state, "l": tuple(state["l"])},
    "a list again": lambda state, dice: {**state, "l": list(state["l"])},
    "a tuple for a named one": lambda state, dice: {**state, "l": [*state["l"][:2], tuple(state["l"][2])]},
    "more": lambda state, dice: {**state, f"more{dice.randrange(2)}": torch.ones(2)},
    "another key": lambda state, dice: {("w2" if k == "w" else k): v for k, v in state.items()},
    "the key again": lambda state, dice: {("w" if k == "w2" else k): v for k, v in state.items()},
    "a number": lambda state, dice: {**state, "n": dice.choice([0, 1, True, 1.0, 0.0, -0.0, float("nan"), "1", None])},
}  # fmt: skip


def batches(dice: random.Random, state: Tree) -> Tree:
    if dice.random() < 0.2:  # in the memory of the state
        tensors = [leaf for leaf in optree.tree_leaves(state) if isinstance(leaf, torch.Tensor) and leaf.numel()]
        lent = dice.choice(tensors)
        if lent.is_floating_point() and lent.dtype == torch.float32:
            return {"x": lent.detach().as_strided((1,), (1,))}
    return {"x": torch.arange(float(dice.choice([2, 2, 2, 3])))}


@pytest.mark.filterwarnings("ignore:fdp. step .* was traced for the")
@pytest.mark.parametrize("fn", [telling, plain_telling])
@pytest.mark.parametrize("donate", [(), 0], ids=["kept", "donated"])
@examples(12)
@given(st.integers(0, 2**32))
def test_any_change_between_calls_is_noticed(fn: Callable[..., Any], donate: Any, seed: int) -> None:
    dice = random.Random(seed)
    step = fdp.data_parallel(fn, donate_argnums=donate, static_argnums=1, check_trace=False)
    roles = step._roles_for(3)
    options, state, alive = Options(1.0), a_state(), []
    for _ in range(12):
        state = CHANGES[dice.choice(list(CHANGES))](state, dice)
        batch = batches(dice, state)
        if dice.random() < 0.1:
            options.scale = dice.choice([1.0, 2.0])  # the same object
        # Memory that is freed and taken again may lie where other memory lay; this is about what is told apart.
        alive.append((optree.tree_leaves(state), batch))
        args = (state, options, batch)
        copies = (apart(state), Options(options.scale), apart(batch))
        place = (3, resolve_group(None), ambient_context())
        found = step._calls.recognise(place, *arguments.set_apart(args, roles))
        if found is not None:
            assert found[0] is step._known[step._key(arguments.flatten(args, roles), place)]
        try:
            result = step(*args)
        except fdp.TraceError as error:
            assert found is None and "leaves that it cannot take" in str(error)
            state = a_state()
            continue
        assert same_bits_of_all(result, fn(*copies))
        if donate == ():
            assert same_bits_of_all(state, copies[0])
        else:
            state = result[0]


def same_bits_of_all(one: Tree, two: Tree) -> bool:
    """As `same_bits`, of trees that hold constants."""
    (xs, spec), (ys, other) = optree.tree_flatten(one), optree.tree_flatten(two)
    if spec != other:
        return False
    return all(
        same_bits(x, y) if isinstance(x, torch.Tensor) else type(x) is type(y) and repr(x) == repr(y)
        for x, y in zip(xs, ys, strict=True)
    )


def recognised(step: Any, *args: Any) -> bool:
    roles = step._roles_for(len(args))
    place = (len(args), resolve_group(None), ambient_context())
    return step._calls.recognise(place, *arguments.set_apart(args, roles)) is not None


@pytest.mark.parametrize("donate", [(), 0], ids=["kept", "donated"])
def test_a_training_loop_is_recognised(donate: Any) -> None:
    """State that comes back, state from elsewhere, tied leaves, and signatures that take turns."""
    step = fdp.data_parallel(plain_telling, donate_argnums=donate, static_argnums=1, check_trace=False)
    tied = a_state()
    tied["l"][0] = tied["w"]
    with_empty = {**a_state(), "e": torch.ones(0), "e2": torch.ones(0)}
    for state in (a_state(), tied, with_empty):
        for width in (2, 3):
            step(state, Options(1.0), {"x": torch.ones(width)})
        for turn in range(6):
            args = (state, Options(1.0), {"x": torch.ones(2 + turn % 2)})
            assert recognised(step, *args)
            state = step(*args)[0]
        fresh = apart(state)
        # Donated leaves that no longer share memory are another signature.
        is_tied = state["l"][0] is state["w"]
        assert recognised(step, fresh, Options(1.0), {"x": torch.ones(2)}) != (is_tied and donate == 0)


@pytest.mark.filterwarnings("ignore:fdp. step .* was traced for the")
def test_one_more_signature_than_are_remembered_takes_the_long_way_and_is_right() -> None:
    step = fdp.data_parallel(lambda w, b: w + fdp.pmean(b.sum()), check_trace=False)
    widths = range(1, recognise.MOST + 2)
    for _ in range(2):
        for width in widths:
            assert step(torch.zeros(1), torch.ones(width)).item() == width
    assert step.traces == len(widths)
    assert len(step._calls._calls) == recognise.MOST
    before = {id(known.remembered) for known in step._known.values()}
    for width in widths:
        step(torch.zeros(1), torch.ones(width))
    assert {id(known.remembered) for known in step._known.values()} == before  # not made anew
    step(torch.zeros(1, requires_grad=True), torch.ones(1))  # the same signature, but not like the call before
    assert recognised(step, torch.zeros(1, requires_grad=True), torch.ones(1))


def test_a_step_keeps_no_tensor_alive_however_it_was_called() -> None:
    step = fdp.data_parallel(plain_telling, donate_argnums=0, static_argnums=1, check_trace=False)
    refs = []
    for width in (2, 3, 2):
        state, batch = a_state(), {"x": torch.ones(width)}
        refs += [weakref.ref(x) for x in optree.tree_leaves((state, batch)) if isinstance(x, torch.Tensor)]
        refs += [weakref.ref(x.untyped_storage()) for x in optree.tree_leaves(batch)]
        for _ in range(2):
            state = step(state, Options(1.0), batch)[0]
        del state, batch
    gc.collect()
    assert not [ref for ref in refs if ref() is not None]


def test_a_batch_in_the_memory_of_returned_state_is_noticed() -> None:
    """The state lies where it lay, so nothing else would be looked at."""
    step = fdp.data_parallel(
        lambda s, b: {"a": s["a"] * 0, "b": s["b"] + fdp.pmean(b[0])}, donate_argnums=0, check_trace=False
    )
    state = {"a": torch.ones(4), "b": torch.zeros(4)}
    for _ in range(2):
        state = step(state, torch.ones(4))
    state["a"].fill_(5.0)
    assert not recognised(step, state, state["a"])
    assert not recognised(step, state, state["a"][:])
    assert step(state, state["a"])["b"].tolist() == [7.0] * 4


def adds(state: Tree, batch: Tree) -> Tree:
    mean = fdp.pmean(sum(leaf.sum() for leaf in optree.tree_leaves(batch)))
    return {key: leaf + mean for key, leaf in state.items()}


def warm(fn: Callable[..., Any], state: Tree, *rest: Any, **options: Any) -> tuple[Any, Tree]:
    """A step that was called twice, and the state that it returned."""
    step = fdp.data_parallel(fn, donate_argnums=0, check_trace=False, **options)
    for _ in range(2):
        state = step(state, *rest)
    assert recognised(step, state, *rest)
    return step, state


def test_small_changes_of_donated_state_and_batch_are_noticed() -> None:
    batch = {"x": torch.ones(2), "y": torch.ones(2)}
    step, state = warm(adds, {"a": torch.zeros(3), "e": torch.zeros(0)}, batch)
    assert not recognised(step, {**state, "e": state["a"][:0]}, batch)
    step, state = warm(adds, {"a": torch.zeros(3), "b": torch.zeros(3)}, batch)
    assert not recognised(step, {**state, "a": torch.zeros(5)[2:]}, batch)
    assert not recognised(step, state, {"x": batch["x"], "y": batch["x"].view(2)})
    assert recognised(step, state, {"x": batch["y"], "y": batch["x"]})


def test_memory_that_begins_elsewhere_and_lies_in_the_same_place() -> None:
    """The same bytes at another offset: a program that has offsets in it would read others."""

    def by_offset(state: Tree, batch: Tree) -> Tree:
        first = state["w"].as_strided((1,), (1,), state["w"].storage_offset())
        return {"w": state["w"] * 0 + first + fdp.pmean(batch)}

    def by_index(state: Tree, batch: Tree) -> Tree:
        return {"w": state["w"] * 0 + state["w"][0] + fdp.pmean(batch)}

    for fn in (by_offset, by_index):
        array = np.array([7.0, 7.0, 5.0, 5.0])
        step, state = warm(fn, {"w": torch.from_numpy(array[2:])}, torch.zeros(1))
        elsewhere = {"w": torch.from_numpy(array)[2:]}
        assert state["w"].data_ptr() == elsewhere["w"].data_ptr()
        assert recognised(step, elsewhere, torch.zeros(1)) == (fn is by_index)
    assert step(elsewhere, torch.zeros(1))["w"].tolist() == [5.0] * 2


@pytest.mark.parametrize("shows", [True, False], ids=["seen in repr", "seen in hash"])
def test_a_static_object_that_was_changed_inside_is_noticed(shows: bool) -> None:
    @dataclasses.dataclass(eq=not shows, unsafe_hash=not shows, repr=shows)
    class Config:
        scale: float

    config = Config(2.0)
    step, _ = warm(
        lambda w, c, b: w * 0 + fdp.pmean(b) * c.scale, torch.ones(1), config, torch.ones(1), static_argnums=1
    )
    config.scale = 3.0
    assert step(torch.ones(1), config, torch.ones(1)).item() == 3.0


def test_a_static_argument_that_cannot_be_hashed_is_refused_at_every_call() -> None:
    step, w = warm(lambda w, c, b: w + fdp.pmean(b), torch.ones(1), (1,), torch.ones(1), static_argnums=1)
    with pytest.raises(fdp.FdpError, match="static arguments that cannot be hashed"):
        step(w, [1], torch.ones(1))


def test_a_refused_leaf_is_refused_at_every_call() -> None:
    class Sub(torch.Tensor):
        pass

    step = fdp.data_parallel(lambda w, b: w + fdp.pmean(b), donate_argnums=0, check_trace=False)
    for _ in range(2):
        step(torch.ones(2), torch.ones(2))
    with torch.inference_mode():
        under_inference = torch.ones(2)
    bad: list[Any] = [torch.ones(2).as_subclass(Sub), torch.ones(2, requires_grad=True) * 2, under_inference]
    for w in (*bad, torch.ones(2).to_sparse()):
        with pytest.raises(fdp.TraceError, match="leaves that it cannot take"):
            step(w, torch.ones(2))
    leaf = torch.ones(2, requires_grad=True)
    for _ in range(2):
        step(leaf, torch.ones(2))
    with pytest.raises(fdp.TraceError, match="autograd may go back through it"):
        step(leaf * 2, torch.ones(2))


# --- signatures that are forgotten -----------------------------------------------------------------------


def test_old_signatures_are_forgotten_and_those_in_use_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fdp.step.cache, "_MOST_SIGNATURES", 3)
    monkeypatch.setattr(recognise, "MOST", 1)
    step = fdp.data_parallel(lambda w, b: w + fdp.pmean(b.sum()), check_trace=False)

    def call(width: int) -> None:
        assert step(torch.zeros(1), torch.ones(width)).item() == width

    call(1)
    for width in (2, 3):
        call(width)
        call(1)
    oldest = weakref.ref(
        next(known.emitted for known in step._known.values() if "[2]" in str(known.emitted.plan.trace))
    )
    assert oldest() is not None
    call(4)
    call(1)
    assert step.traces == 4 and len(step._known) == 3
    gc.collect()
    assert oldest() is None
    call(1)
    call(3)
    assert step.traces == 4
    with pytest.warns(UserWarning, match="was traced again for arguments that it had been traced for"):
        call(2)
    assert step.traces == 5


# --- the parts -------------------------------------------------------------------------------------------


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
