"""How a call finds its program: whatever changes between calls, the step computes what its function does.

A call that is like an earlier one is recognised without its signature; these tests change arguments between calls in
every way that comes to mind, and compare with the function itself and with the signature worked out in full.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from bits import same_bits_or_equal
from hypothesis import given
from hypothesis import strategies as st
from samples import ALL_SAMPLES, examples, exhaustive, some
from telling_steps import Options, a_state, apart, plain_telling, telling

import fdp
from fdp.distributed.group import resolve_group
from fdp.trace.calls import arguments

Tree = Any


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
@pytest.mark.parametrize("fn", some([telling, plain_telling]))
@pytest.mark.parametrize("donate", [pytest.param((), marks=exhaustive), 0], ids=["kept", "donated"])
@examples(12)
@given(st.integers(0, 2**32))
def test_any_change_between_calls_is_noticed(fn: Callable[..., Any], donate: Any, seed: int) -> None:
    dice = random.Random(seed)
    step = fdp.data_parallel(fn, donate_argnums=donate, static_argnums=1, check_trace=False)
    roles = step._roles_for(3)
    options, state, alive = Options(1.0), a_state(), []
    for _ in range(12 if ALL_SAMPLES else 8):
        state = CHANGES[dice.choice(list(CHANGES))](state, dice)
        batch = batches(dice, state)
        if dice.random() < 0.1:
            options.scale = dice.choice([1.0, 2.0])  # the same object
        # Memory that is freed and taken again may lie where other memory lay; this is about what is told apart.
        alive.append((optree.tree_leaves(state), batch))
        args = (state, options, batch)
        copies = (apart(state), Options(options.scale), apart(batch))
        place = step._known.place(args, roles, resolve_group(None))
        found = step._known.calls.recognise(place, *arguments.split_static(args, roles))
        if found is not None:
            assert found[0] is step._known[step._known.key(arguments.flatten_call(args, roles), place)]
        try:
            result = step(*args)
        except fdp.TraceError as error:
            assert found is None and "leaves that it cannot take" in str(error)
            state = a_state()
            continue
        assert same_bits_or_equal(result, fn(*copies))
        if donate == ():
            assert same_bits_or_equal(state, copies[0])
        else:
            state = result[0]
