"""Every way in which Python changes a tensor out of the dispatcher's sight, or under another name: right, or refused.

What is right is compared with the step itself, as plain torch runs it, over several calls, operator by operator and
compiled: results, what donated arguments hold afterwards, and that no tensor of the caller changes its strides. What is
refused names the line of this file, and leaves what the step closes over as it was. docs/memory-changes.md has the same
table.
"""

from __future__ import annotations

import gc
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch import nn

import fdp

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

Tensor = torch.Tensor
Tree = Any
Case = Callable[[Tree, Tensor], Tree]


def state() -> Tree:
    return {"w": torch.arange(9.0).view(3, 3) + 1, "k": torch.arange(9.0).view(3, 3) * 2, "lr": torch.zeros(())}


def batch(call: int) -> Tensor:
    return torch.arange(9.0).view(3, 3) * 0.1 + call


# --- right: values of the step ----------------------------------------------------------------------------------


def other_value(s: Tree, b: Tensor) -> Tree:
    x, y = s["w"] * 2, b * 5
    before = x[0]
    x.data = y
    x.add_(1)
    return x, y, before, x @ x


def other_shape_and_dtype(s: Tree, b: Tensor) -> Tree:
    x, z = s["w"] * 2, b * 3
    x.data = b[0] * 2
    z.data = z.data.double() / 3
    return x * x, z + 1


def exchanged(s: Tree, b: Tensor) -> Tree:
    x, y = s["w"] * 2, b * 5
    x.data, y.data = y.data, x.data
    x.mul_(3)
    return x, y


def view_that_moves(s: Tree, b: Tensor) -> Tree:
    x = s["w"] * 2
    row = x[0]
    row.data = b[1] * 1
    row.add_(100)
    return x, row, b * 1


def through_the_getter(s: Tree, b: Tensor) -> Tree:
    x, y = s["w"] * 2, (b * 5).requires_grad_()
    x.data.mul_(3)
    y.data[0] = 7
    x.detach().copy_(x.detach() + b)
    torch._foreach_add_([x.data, y.data], 1.0)
    return x, y


def parameters_of_its_own(s: Tree, b: Tensor) -> Tree:
    """What optimizers and exponential averages are written with, on parameters that the step makes."""
    p = nn.Parameter(s["w"].clone())
    q = nn.Parameter(torch.zeros(3, 3))
    (p * b).sum().backward()
    p.data = p.data - 0.1 * p.grad
    q.data = q.data * 0.9 + p.data * 0.1
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([p, q]) * 2, [p, q])
    p.grad = None
    (p * p).sum().backward()
    return p, q, p.grad


def in_hooks(s: Tree, b: Tensor) -> Tree:
    p = s["w"].clone().requires_grad_()
    q = s["w"].clone().requires_grad_()

    def give_other(g: Tensor) -> None:
        g.data = g.data * 3

    h = p * 2
    h.register_hook(lambda g: g.mul_(2))
    q.register_hook(give_other)
    return torch.autograd.grad((h * b).sum() + (q * b).sum(), [p, q])


def saved_for_a_backward_pass(s: Tree, b: Tensor) -> Tree:
    """Autograd keeps the object, so it sees the new value, in plain torch as well."""
    p = s["w"].clone().requires_grad_()
    loss = (p * p).sum()
    p.data = b * 10
    return torch.autograd.grad(loss, p)


def set_and_resized(s: Tree, b: Tensor) -> Tree:
    x, y, z = s["w"] * 2, b * 5, b * 7
    x.set_(y)
    x.add_(1)
    z.resize_(2, 2)
    r = (b * 9).resize_as_(z)
    e = torch.empty(0).resize_(2, 3).fill_(4)
    v = (b * 3)[1:]
    v.resize_(2)
    return x, y, z, r, e, v


def given_out_arguments(s: Tree, b: Tensor) -> Tree:
    empty, small, fitting = torch.empty(0), torch.empty(2), torch.empty(3, 3)
    torch.mul(s["w"], b, out=empty)
    behind = b * 3
    torch.add(s["w"], b, out=small)
    torch.sub(s["w"], b, out=fitting)
    values, places = torch.empty(0), torch.empty(0, dtype=torch.int64)
    torch.max(b, 0, out=(values, places))
    return empty, small * behind, fitting, values, places


def turned(s: Tree, b: Tensor) -> Tree:
    """Each beside another name of the same memory, which stays as it is."""
    out = []
    for change in (
        lambda x: x.t_(),
        lambda x: x.transpose_(0, 1),
        lambda x: x.swapaxes_(0, 1),
        lambda x: x.swapdims_(0, 1),
        lambda x: x.unsqueeze_(0),
        lambda x: x.unsqueeze_(1).squeeze_(),
        lambda x: x.as_strided_((2, 2), (1, 3), 1),
        lambda x: x.squeeze_(),
    ):
        s["w"].detach_()  # an error, if the comparison's copies were views
        h = (s["w"] * 1).detach_()
        same, alias = h[:], h.detach()
        change(h)
        h.mul_(2)
        out += [h * 1, same * 10, alias @ b]
        d = s["w"].detach()
        change(d)
        out += [d * 1, s["w"] * 10]
        v = s["k"][:]
        change(v)
        out += [v + 1, s["k"].sum(0)]
    return out


def windows(s: Tree, b: Tensor) -> Tree:
    x = (s["w"] * 2).view(-1)
    y = torch.zeros(6)
    y.unfold(0, 2, 3).copy_(x.unfold(0, 3, 3)[:2, :2])
    return x.unfold(0, 3, 2).sum(1), b.expand(2, 3, 3).sum(0), y, b.as_strided((3, 3), (1, 1)).sum(0)


def lazy_flags(s: Tree, b: Tensor) -> Tree:
    z = torch.complex(s["w"], b)
    return z.conj(), z.conj().imag, torch._neg_view(b * 2), torch._efficientzerotensor((3,)), b.sum().expand(4)


class Running(nn.Module):
    """A module whose forward pass changes its buffers in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        for name in "abcd":
            self.register_buffer(name, torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.a = self.a * 0.9 + x.mean(0)
        self.b.data = self.b.data * 0.9 + x.mean(0)
        self.c.copy_(x.mean(0))
        self.d.data.mul_(2)
        return (x * self.w * self.a * self.b * self.c * self.d).sum()


apply, PARAMS, BUFFERS = fdp.from_module(Running())


def buffers_of_a_module(s: Tree, b: Tensor) -> Tree:
    out, new = apply(PARAMS_DETACHED, BUFFERS, b + s["w"])
    return out, new


PARAMS_DETACHED = {name: p.detach() for name, p in PARAMS.items()}
TABLE = torch.arange(6.0).view(2, 3)
FROM_NUMPY = torch.from_numpy(np.arange(3, dtype=np.float32))


def reads_what_it_closes_over(s: Tree, b: Tensor) -> Tree:
    """Views of closed-over tensors are read, turned and returned; none of it is theirs."""
    t = TABLE[:]
    t.t_()
    return TABLE[0], TABLE, t @ b[:2], TABLE.detach().sum() + FROM_NUMPY, TABLE[1, 1].item() * b


PLACES = torch.tensor([1, 2])
SCALE, SCALES = torch.tensor(2.0), torch.tensor([2.0, 3.0])

NUMBERS: dict[str, Callable[[], Any]] = {
    # Numbers that are read from what the step closes over, alone, with numbers, and with tensors made of numbers.
    "item": lambda: SCALE.item(),
    "tolist": lambda: SCALES.tolist()[1] + SCALE.tolist(),
    "of a view": lambda: SCALES[1].item(),
    "of a copy": lambda: SCALE.clone().item(),
    "with numbers": lambda: (SCALE * 2).item() + (SCALE + 1).item() - (SCALE / 2).item() + (3 - SCALE).item(),
    "converted": lambda: SCALE.double().item() + SCALE.to(torch.float16).item(),
    "with a constant": lambda: (torch.tensor(1.0) + SCALE).item() + torch.tensor(1.0).mul_(SCALE).item(),
    "into a constant": lambda: torch.tensor(1.0).copy_(SCALE).item() + torch.stack([torch.tensor(1.0), SCALE]).sum().item(),
    "into a part of a constant": lambda: torch.tensor([1.0, 2.0]).index_fill_(0, torch.tensor([1]), SCALE).sum().item(),
    "of several": lambda: torch._foreach_mul([SCALE], 2)[0].item(),
    "as a number": lambda: torch.add(torch.ones(()), torch.ones(()), alpha=SCALE) * torch.full((), SCALE),
}  # fmt: skip


def reads_numbers_of_what_it_closes_over(s: Tree, b: Tensor) -> Tree:
    return [b * number() for number in NUMBERS.values()]


@pytest.mark.parametrize("compiled", [False, True])
def test_numbers_of_closed_over_tensors_are_read_anew(compiled: bool) -> None:
    step = fdp.data_parallel(reads_numbers_of_what_it_closes_over, check_replication=False, compile=compiled)
    try:
        for call in range(3):
            SCALE.fill_(2.0 + call)
            SCALES.fill_(3.0 - call)
            same(step(state(), batch(call)), reads_numbers_of_what_it_closes_over(state(), batch(call)))
    finally:
        SCALE.fill_(2.0)
        SCALES.copy_(torch.tensor([2.0, 3.0]))
    assert step.traces == 1


RIGHT: dict[str, Case] = {
    f.__name__: f
    for f in (
        other_value, other_shape_and_dtype, exchanged, view_that_moves, through_the_getter, parameters_of_its_own,
        in_hooks, saved_for_a_backward_pass, set_and_resized, given_out_arguments, turned, windows, lazy_flags,
        buffers_of_a_module, reads_what_it_closes_over, reads_numbers_of_what_it_closes_over,
    )
}  # fmt: skip


def cloned(tree: Tree) -> Tree:
    return optree.tree_map(torch.clone, tree)


def geometry(tree: Tree) -> list[Any]:
    return [(x.shape, x.stride(), x.storage_offset()) for x in optree.tree_leaves(tree)]


def same(found: Tree, expected: Tree) -> None:
    """Equal values in equal shapes, all plain tensors."""
    for one, two in zip(optree.tree_leaves(found), optree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, two.detach().resolve_conj().resolve_neg() + 0)
        assert not (one.is_conj() or one.is_neg() or one._is_zerotensor())


@pytest.mark.parametrize("name", list(RIGHT))
def test_values_of_the_step(name: str) -> None:
    given, table = state(), TABLE.clone()
    before = cloned(given)
    step = fdp.data_parallel(RIGHT[name], check_replication=False)
    for call in range(3):
        found = step(given, batch(call))
        same(found, RIGHT[name](cloned(given), batch(call)))
        for leaf in optree.tree_leaves(found):
            leaf.fill_(77)  # what a call returned is the caller's: no later call looks at it
    same(given, before)
    assert geometry(given) == geometry(before) and torch.equal(TABLE, table) and step.traces == 1


def all_at_once(s: Tree, b: Tensor) -> Tree:
    return {name: case(s, b) for name, case in RIGHT.items()}


def test_values_of_a_compiled_step() -> None:
    given, table = state(), TABLE.clone()
    before = cloned(given)
    step = fdp.data_parallel(all_at_once, check_replication=False, compile=True)
    for call in range(3):
        found = step(given, batch(call))
        same(found, all_at_once(cloned(given), batch(call)))
        for leaf in optree.tree_leaves(found):
            leaf.fill_(77)
    same(given, before)
    assert geometry(given) == geometry(before) and torch.equal(TABLE, table)


# --- right: donated arguments -----------------------------------------------------------------------------------


def momentum_encoder(s: Tree, b: Tensor) -> Tree:
    """MoCo, as published."""
    s["k"].data = s["k"].data * 0.9 + s["w"].data * 0.1
    return {"w": s["w"] + b, "k": s["k"], "lr": s["lr"]}


def momentum_encoder_that_is_not_returned(s: Tree, b: Tensor) -> Tree:
    s["k"].data = s["k"].data * 0.9 + s["w"].data * 0.1
    return {"w": s["w"] + b, "lr": s["lr"]}, s["k"].sum()


def learning_rate_of_zero(s: Tree, b: Tensor) -> Tree:
    """At the first call it changes nothing."""
    s["w"].data = s["w"].data - s["lr"] * b
    return {"w": s["w"], "k": s["k"], "lr": s["lr"] + 0.1}


def old_and_new(s: Tree, b: Tensor) -> Tree:
    old, row = s["w"].detach(), s["w"][0]
    s["w"].data = s["w"].data * 2
    s["w"].add_(1)
    return {"w": s["w"], "k": old, "lr": s["lr"] + row.sum()}


def exchanged_arguments(s: Tree, b: Tensor) -> Tree:
    s["w"].data, s["k"].data = s["k"].data, s["w"].data
    s["w"].add_(1)
    return {"w": s["w"], "k": s["k"], "lr": s["lr"] + b.sum()}


def turned_by_data(s: Tree, b: Tensor) -> Tree:
    s["w"].data = s["w"].data.t()
    return {"w": s["w"], "k": s["k"] + b, "lr": s["lr"]}


def turned_views(s: Tree, b: Tensor) -> Tree:
    k, d = s["w"][:], s["w"].detach()
    d.t_()
    d.add_(b)
    e = s["k"].view(3, 3)
    e.unsqueeze_(0)
    return {"w": s["w"], "k": k + e[0], "lr": s["lr"] + d[0].sum()}


DONATED: dict[str, Case] = {
    f.__name__: f
    for f in (
        momentum_encoder, momentum_encoder_that_is_not_returned, learning_rate_of_zero, old_and_new,
        exchanged_arguments, turned_by_data, turned_views,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", list(DONATED))
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_donated_arguments(name: str, compiled: bool) -> None:
    """The arguments hold afterwards what plain torch leaves in them, wherever the step says something of them."""
    case = DONATED[name]
    step = fdp.data_parallel(case, donate_argnums=0, check_replication=False, compile=compiled)
    ours, plain = state(), state()
    for call in range(4):
        passed, strides = dict(ours), geometry(ours)
        found, expected = step(ours, batch(call)), case(plain, batch(call))
        same(found, expected)
        assert geometry(passed) == strides
        if "not_returned" in name:
            same(passed["k"], plain["k"])
            ours, plain = {**found[0], "k": passed["k"]}, {**expected[0], "k": plain["k"]}
        else:
            ours, plain = found, cloned(expected)


def all_arguments_of_a_module(s: Tree, b: Tensor) -> Tree:
    """A module that changes its own parameters by `.data` while it runs, as a momentum encoder does."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            self.k.data = self.k.data * 0.9 + self.q.data * 0.1
            return (x @ self.k).sum()

    out = torch.func.functional_call(Encoder(), {"q": s["w"], "k": s["k"]}, (b,))
    return {"w": s["w"] + 1, "k": s["k"], "lr": s["lr"] + out}


def test_parameters_that_a_module_changes_while_it_runs() -> None:
    step = fdp.data_parallel(all_arguments_of_a_module, donate_argnums=0, check_replication=False)
    ours, plain = state(), state()
    for call in range(3):
        ours, plain = step(ours, batch(call)), all_arguments_of_a_module(plain, batch(call))
        same(ours, plain)
    with pytest.raises(
        fdp.PurityError, match=r"s\['k'\]: s\['k'\].data = ... at test_memory_changes.py:\d+ in forward"
    ):
        fdp.data_parallel(all_arguments_of_a_module, check_replication=False)(state(), batch(0))


# ruff: noqa: E501

# --- refused ----------------------------------------------------------------------------------------------------

COUNT, LARGE, PARAMETER = torch.zeros(()), torch.zeros(2**17), nn.Parameter(torch.ones(3))
ARRAY = np.zeros(3, dtype=np.float32)
SHARED = torch.from_numpy(ARRAY)
MODULE = Running().requires_grad_(False)
LINEAR = nn.Linear(3, 3).requires_grad_(False)


def writes_to_an_array(s: Tree, b: Tensor) -> Tree:
    ARRAY[0] += 1
    return s["w"] + SHARED


def closed_over_module(s: Tree, b: Tensor) -> Tree:
    MODULE.a = MODULE.a * 0.9 + b.mean(0)
    return s["w"] + MODULE.a


def new_buffer(s: Tree, b: Tensor) -> Tree:
    MODULE.register_buffer("z", b.mean(0))
    return s["w"] + MODULE.z


def parametrized(s: Tree, b: Tensor) -> Tree:
    nn.utils.parametrizations.weight_norm(LINEAR)
    return LINEAR(b)


def converted(s: Tree, b: Tensor) -> Tree:
    LINEAR.double()
    return LINEAR(b.double())


def set_state(s: Tree, b: Tensor) -> Tree:
    x = s["w"] * 2
    x.__setstate__((x.untyped_storage(), 0, x.shape, x.stride()))
    return x


def grown(s: Tree, b: Tensor) -> Tree:
    x = s["w"] * 2
    x.resize_(4, 4)
    return x.fill_(1)


def output_with_another_name(s: Tree, b: Tensor) -> Tree:
    small = torch.empty(2)
    view = small[:]
    torch.mul(s["w"], b, out=small)
    return small, view * 1


PURITY, TRACE = fdp.PurityError, fdp.TraceError
GIVES, SIGHT, OWN = "gives tensors another shape", "closes over, out of the trace's sight", "that it does not own"
VALUE = "reads the value of a tensor, which a traced step does not have"
NO_MEMORY, NOT_TRACED = "changes memory that a trace does not have", "runs by itself but cannot be traced"

# What was done; the error; what is wrong with it; who is named; a part of the remedy.
REFUSED: dict[str, tuple[Case, type, str, str, str]] = {
    "argument.data =": (
        lambda s, b: (setattr(s["w"], "data", b), s["w"])[1], PURITY, OWN, r"s\['w'\]: s\['w'\].data", "donate_argnums"
    ),
    "argument.set_": (lambda s, b: s["w"].set_(b), PURITY, GIVES, r"s\['w'\]", "make a view"),
    "argument.t_": (lambda s, b: s["w"].t_() + 1, PURITY, GIVES, r"s\['w'\]", "w = w.t()"),
    "argument.squeeze_": (lambda s, b: s["w"][:, :1].squeeze_() + s["w"].unsqueeze_(0), PURITY, GIVES, r"s\['w'\]", ""),
    "argument.resize_": (lambda s, b: s["w"].resize_(2) + 1, PURITY, GIVES, r"s\['w'\]", "make a view"),
    "argument.as_strided_": (lambda s, b: s["w"].as_strided_((2,), (1,)) + 1, PURITY, GIVES, r"s\['w'\]", ""),
    "argument as out": (lambda s, b: torch.mul(b, b[0, 0], out=s["lr"]), PURITY, GIVES, r"s\['lr'\]", ""),
    "a view of an argument": (lambda s, b: s["w"][0].add_(1), PURITY, OWN, r"s\['w'\]", ""),
    "argument.detach().copy_": (lambda s, b: s["w"].detach().copy_(b), PURITY, OWN, r"s\['w'\]", ""),
    "_foreach on argument.data": (
        lambda s, b: torch._foreach_add_([s["w"].data], 1.0) or s["w"] * 1, PURITY, OWN, r"s\['w'\]", ""
    ),
    "resize_ that grows": (grown, TRACE, GIVES, r"aten.resize_", "torch.empty"),
    "out= that another name looks at": (output_with_another_name, TRACE, GIVES, r"aten.mul.out", "torch.empty"),
    "swap_tensors": (
        lambda s, b: torch.utils.swap_tensors(x := s["w"] * 1, b * 2) or x, TRACE, "exchanges two objects", "step", ".data"
    ),
    "storage.resize_": (lambda s, b: (s["w"] * 2).untyped_storage().resize_(0) or b, TRACE, NO_MEMORY, "step", "x.copy_"),
    "storage.fill_": (lambda s, b: (s["w"] * 2).untyped_storage().fill_(0) or b, TRACE, NO_MEMORY, "step", "x.copy_"),
    "storage[]": (
        lambda s, b: (s["w"] * 2).untyped_storage().__setitem__(0, 1) or b, TRACE, NO_MEMORY, "step", "x.copy_"
    ),
    "storage.copy_": (
        lambda s, b: s["w"].untyped_storage().copy_(b.untyped_storage()) or b, TRACE, NO_MEMORY, "step", "x.copy_"
    ),
    "typed storage[]": (
        lambda s, b: (s["w"] * 2).storage().__setitem__(0, 1) or b, TRACE, NO_MEMORY, "step", "x.copy_"
    ),
    "set_ to a storage": (lambda s, b: (s["w"] * 2).set_(b.untyped_storage()), TRACE, NOT_TRACED, "lambda", ""),
    "set_ to a place": (lambda s, b: (s["w"] * 2).set_(b * 1, 3, (2,), (1,)), TRACE, NOT_TRACED, "lambda", ""),
    "__setstate__": (set_state, TRACE, NOT_TRACED, "set_state", ""),
    "apply_": (lambda s, b: (s["w"] * 2).apply_(lambda v: v + 1), TRACE, "calls a Python function", "step", "operators"),
    "map_": (lambda s, b: (s["w"] * 2).map_(b, max), TRACE, "calls a Python function", "step", "operators"),
    "numpy": (lambda s, b: s["w"].numpy().fill(1) or b, TRACE, "reads the value of a tensor", "lambda", ""),
    "np.asarray": (lambda s, b: np.asarray(s["w"]).fill(1) or b, TRACE, "reads the value of a tensor", "lambda", ""),
    "dlpack": (lambda s, b: torch.from_dlpack(s["w"]).add_(1), TRACE, "reads the value of a tensor", "lambda", ""),
    "closed over, a view": (
        lambda s, b: (TABLE[0:1].copy_(b[:1]), COUNT.view(1).add_(1), s["w"] * COUNT)[2], PURITY, OWN, "TABLE: ", "new value"
    ),
    "closed over, .detach()": (
        lambda s, b: (TABLE.detach().mul_(2), TABLE * 1)[1], PURITY, OWN, "TABLE: ", "new value"
    ),
    "closed over, .data.mul_": (lambda s, b: (TABLE.data.mul_(2), TABLE * 1)[1], PURITY, OWN, "TABLE: ", "new value"),
    "closed over, in place": (lambda s, b: (LARGE.add_(1), LARGE[:3] * b)[1], PURITY, OWN, "LARGE: ", "new value"),
    "closed over, _foreach": (
        lambda s, b: (torch._foreach_mul_([TABLE[0]], 2.0), TABLE * 1)[1], PURITY, OWN, "TABLE: ", "new value"
    ),
    "closed over, .data =": (
        lambda s, b: (setattr(TABLE, "data", TABLE * 2), TABLE * 1)[1], PURITY, SIGHT, "TABLE: .data =", "as an argument"
    ),
    "closed over, set_": (lambda s, b: TABLE.set_(b), PURITY, GIVES, "TABLE: ", "make a view"),
    "closed over, t_": (lambda s, b: TABLE.t_() * 1, PURITY, GIVES, "TABLE: ", "make a view"),
    "closed over, out=": (lambda s, b: torch.mul(b[0, 0], 2, out=COUNT), PURITY, OWN, "COUNT: ", "new value"),
    "closed over, resize_": (lambda s, b: TABLE.resize_(2) * 1, PURITY, GIVES, "TABLE: ", "make a view"),
    "closed over, numpy": (
        lambda s, b: (TABLE.numpy().__setitem__(0, 5), TABLE * 1)[1], PURITY, SIGHT, r"TABLE: \.numpy", "as an argument"
    ),
    "closed over, apply_": (
        lambda s, b: TABLE.apply_(lambda v: v + 1) * 1, PURITY, SIGHT, r"TABLE: \.apply_", "as an argument"
    ),
    "closed over, typed storage[]": (
        lambda s, b: (TABLE.storage().__setitem__(0, 5), TABLE * 1)[1], PURITY, SIGHT, "TABLE: __setitem__", ""
    ),
    "closed over, np.asarray": (
        lambda s, b: (np.asarray(TABLE).fill(5), TABLE * 1)[1], PURITY, SIGHT, r"TABLE: \.numpy", "outside of the step"
    ),
    "closed over, dlpack": (
        lambda s, b: (np.from_dlpack(TABLE), TABLE * 1)[1], PURITY, SIGHT, "TABLE: DLPack", "as an argument"
    ),
    "closed over, storage[]": (
        lambda s, b: (TABLE.untyped_storage().__setitem__(0, 5), TABLE * 1)[1], PURITY, SIGHT, "TABLE: __setitem__", ""
    ),
    "closed over, storage.resize_": (
        lambda s, b: (LARGE.untyped_storage().resize_(0), LARGE * 1)[1], PURITY, SIGHT, "LARGE: resize_", ""
    ),
    "closed over, if": (lambda s, b: b if COUNT else -b, TRACE, VALUE, "", "torch.where"),
    "closed over, if what is computed": (lambda s, b: b if COUNT * 2 > 1 else -b, TRACE, VALUE, "", "torch.where"),
    "closed over, int": (lambda s, b: b * int(COUNT), TRACE, VALUE, "", "torch.where"),
    "closed over, an index": (lambda s, b: b[COUNT.long()], TRACE, "reads ", "", "index_select"),
    "closed over, a list": (lambda s, b: [b, -b][PLACES.tolist()[0]], TRACE, VALUE, "", "torch.where"),
    "closed over, equal": (lambda s, b: b if torch.equal(PLACES, PLACES) else -b, TRACE, VALUE, "", "torch.where"),
    "closed over, allclose": (
        lambda s, b: b if torch.allclose(COUNT, torch.tensor(0.0)) else -b, TRACE, VALUE, "", "torch.where"
    ),
    "closed over, tensor_split": (
        lambda s, b: torch.tensor_split(b, PLACES)[1], TRACE, VALUE, "", "numbers"
    ),
    "an array that a tensor looks at": (writes_to_an_array, PURITY, SIGHT, "SHARED: its values", "as an argument"),
    "a buffer of a closed-over module": (closed_over_module, PURITY, SIGHT, r"MODULE\.a: this buffer became", "from_module"),
    "a new buffer of a closed-over module": (new_buffer, PURITY, SIGHT, r"MODULE\.z: this buffer became", "from_module"),
    "closed over, requires_grad_": (
        lambda s, b: TABLE.requires_grad_() * 1, PURITY, SIGHT, "TABLE: it came to require", "as an argument"
    ),
    "closed over, .grad": (
        lambda s, b: ((PARAMETER * b).sum().backward(), b)[1], PURITY, SIGHT, "PARAMETER: its .grad", "as an argument"
    ),
    "a closed-over module, converted": (converted, PURITY, SIGHT, r"LINEAR\.\w+: this parameter became", "from_module"),
    "a closed-over module, parametrized": (parametrized, PURITY, SIGHT, r"LINEAR\.weight: this parameter", "from_module"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused(name: str) -> None:
    case, error, what, who, remedy = REFUSED[name]
    closed = [TABLE, COUNT, LARGE, SHARED, PARAMETER, *MODULE.buffers(), *LINEAR.parameters()]
    before = [(x.detach().clone(), x.requires_grad, x.grad, x.stride(), id(x)) for x in closed]
    with pytest.raises(error) as caught:
        # Not by the comparison at the first call: by the trace itself.
        fdp.data_parallel(case, check_replication=False, check_trace=False)(state(), batch(0))
    text = str(caught.value)
    *_, last = text.splitlines()
    assert what in text and re.search(who, text) and re.search(r"step '\w+|step '<lambda>", text), text
    assert last.startswith("Remedy: ") and remedy in last, text
    if not re.search("its values|this |it came|its .grad", who):  # those are seen when the trace is done: no line
        line = re.search(r"test_memory_changes\.py:(\d+) in ([\w<>]+)", text)
        start = case.__code__.co_firstlineno
        assert line is not None and start <= int(line[1]) <= start + 4, text
    closed = [TABLE, COUNT, LARGE, SHARED, PARAMETER, *MODULE.buffers(), *LINEAR.parameters()]
    for tensor, (value, required, grad, strides, identity) in zip(closed, before, strict=True):
        assert torch.equal(tensor.detach(), value) and tensor.requires_grad == required and tensor.grad is grad
        assert tensor.stride() == strides and id(tensor) == identity


def test_donated_arguments_of_another_kind_are_refused() -> None:
    def step(s: Tree, b: Tensor) -> Tree:
        s["w"].data = s["w"].data.half()
        return s["w"]

    with pytest.raises(fdp.PurityError, match=r"s\['w'\]: \[3, 3\] torch.float32 cpu became \[3, 3\] torch.float16"):
        fdp.data_parallel(step, donate_argnums=0)(state(), batch(0))

    def turns(s: Tree, b: Tensor) -> Tree:
        s["w"].t_()
        return s

    given = state()
    with pytest.raises(fdp.PurityError, match=r"s\['w'\]: aten.t_.default at test_memory_changes.py"):
        fdp.data_parallel(turns, donate_argnums=0)(given, batch(0))
    assert given["w"].stride() == (3, 1)


def test_what_does_nothing_to_an_argument_is_no_change() -> None:
    def step(s: Tree, b: Tensor) -> Tree:
        s["w"].data = s["w"].data.contiguous()
        s["k"].squeeze_()
        return s["w"] + s["k"].resize_(3, 3) + b

    torch.testing.assert_close(
        fdp.data_parallel(step, check_replication=False)(state(), batch(0)), step(state(), batch(0))
    )


def test_the_methods_of_torch_are_its_own_again() -> None:
    """Also for other threads, and after a trace that failed."""
    watched = [
        (torch.Tensor, "data"),
        (torch.Tensor, "numpy"),
        (torch.UntypedStorage, "resize_"),
        (torch.Tensor, "__dlpack__"),
    ]
    before = [getattr(owner, name) for owner, name in watched] + [torch.utils.swap_tensors, torch._C._swap_tensor_impl]
    for name in ("swap_tensors", "closed over, numpy"):
        with pytest.raises(fdp.FdpError):
            fdp.data_parallel(REFUSED[name][0], check_replication=False)(state(), batch(0))
    after = [getattr(owner, name) for owner, name in watched] + [torch.utils.swap_tensors, torch._C._swap_tensor_impl]
    assert all(one is two for one, two in zip(before, after, strict=True))


# --- memory that several tensors lie in ---------------------------------------------------------------------------


def accumulates(s: Tree, b: Tensor) -> Tree:
    return {"w": s["w"] * 2 + fdp.pmean(b), "v": s["v"] + s["w"]}


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("shift", [0, 2])
def test_views_of_one_numpy_array(warm: bool, compiled: bool, shift: int) -> None:
    """Each has a storage of its own, and they share bytes; also with one array that goes on behind the other."""
    step = fdp.data_parallel(accumulates, donate_argnums=0, compile=compiled)
    if warm:
        s = {"w": torch.zeros(4), "v": torch.zeros(4)}
        for _ in range(3):
            s = step(s, torch.ones(4))
    array = np.arange(8, dtype=np.float32)
    one, two = torch.from_numpy(array[:4]), torch.from_numpy(array[shift : shift + 4])
    assert one.untyped_storage()._cdata != two.untyped_storage()._cdata
    fresh = torch.ones(4)
    for s, b in (({"w": one, "v": two}, fresh), ({"w": one, "v": fresh}, two), ({"w": two, "v": fresh}, one)):
        expected = accumulates(cloned(s), b.clone())
        same(step(s, b), expected)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_batch_in_the_middle_of_state_that_stays_where_it_is(start: int) -> None:
    """The state is recognised by its addresses; the batch lies in it at one call, and begins nowhere that it does."""
    array = np.arange(8, dtype=np.float32)
    s = {"w": torch.from_numpy(array[:4]), "v": torch.from_numpy(array[4:])}
    step = fdp.data_parallel(accumulates, donate_argnums=0)
    for _ in range(4):
        s = step(s, torch.ones(4))
    inside = torch.from_numpy(array[start : start + 4])
    expected = accumulates(cloned(s), inside.clone())
    same(step(s, inside), expected)
    assert step.traces == 2


def test_a_closed_over_tensor_is_one_memory_though_memory_is_collected_meanwhile() -> None:
    def step(w: Tensor, b: Tensor) -> Tensor:
        total = TABLE.sum()
        gc.collect()
        row = TABLE[0]
        gc.collect()
        row.add_(b)
        gc.collect()
        return w + total + TABLE.sum()

    with pytest.raises(fdp.PurityError, match=r"TABLE: aten\.add_"):
        fdp.data_parallel(step, check_replication=False)(torch.ones(3), torch.ones(3))


def test_a_closed_over_view_of_the_array_that_is_donated() -> None:
    array = np.arange(8, dtype=np.float32)
    anchor = torch.from_numpy(array[2:6])
    step = fdp.data_parallel(lambda w, b: w * 2 + anchor + fdp.pmean(b), donate_argnums=0)
    w = step(torch.zeros(4), torch.ones(4))  # right as long as it lies elsewhere
    step(w, torch.ones(4))
    with pytest.raises(fdp.PurityError, match="anchor lies in the memory of w"):
        step(torch.from_numpy(array[:4]), torch.ones(4))
    with pytest.raises(fdp.PurityError, match="anchor lies in the memory of w"):
        fdp.data_parallel(lambda w, b: w + anchor, donate_argnums=0)(torch.from_numpy(array[:4]), torch.ones(4))


def test_what_does_not_cover_its_memory_leaves_the_rest() -> None:
    """Nine elements of three windows lie on five of six places: the sixth is what it was."""

    def step(w: Tensor, b: Tensor) -> Tensor:
        v = b * 1
        v.unfold(0, 3, 2)[:2].copy_(w.expand(2, 3))
        return v

    with pytest.raises(fdp.ReplicationError):
        fdp.data_parallel(step)(torch.ones(1), torch.arange(6.0))

    def whole(w: Tensor, b: Tensor) -> Tensor:
        v = b.view(2, 3).t() * 1
        v.t().copy_(w.expand(2, 3))
        return v

    assert fdp.data_parallel(whole)(torch.ones(1), torch.arange(6.0)).tolist() == [[1.0, 1.0]] * 3


# --- what a step returned goes in again ----------------------------------------------------------------------------

RETURNED: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda x: torch._neg_view(x),
    "imaginary part of a conjugate": lambda x: torch.complex(x, x + 1).conj().imag,
    "zeros": lambda x: torch._efficientzerotensor(x.shape) if x.sum() is None else torch._efficientzerotensor((4,)),
    "expanded": lambda x: x.sum().expand(4),
    "flipped view": lambda x: x.view(2, 2).t().reshape(4),
}


@pytest.mark.parametrize("name", list(RETURNED))
@pytest.mark.parametrize("donate", [(), 0], ids=["kept", "donated"])
def test_returned_state_goes_in_again(name: str, donate: Any) -> None:
    def train(s: Tree, b: Tensor) -> Tree:
        return {"x": RETURNED[name](s["x"] + fdp.pmean(b)), "y": RETURNED[name](s["x"])}

    def plain(s: Tree, b: Tensor) -> Tree:
        return {"x": RETURNED[name](s["x"] + b), "y": RETURNED[name](s["x"])}

    step = fdp.data_parallel(train, donate_argnums=donate)
    ours = {"x": torch.arange(4.0), "y": torch.zeros(4)}
    expected = cloned(ours)
    for call in range(3):
        ours, expected = step(ours, torch.full((4,), float(call))), plain(expected, torch.full((4,), float(call)))
        same(ours, expected)
        expected = optree.tree_map(lambda x: x + 0, expected)


def test_zeros_without_memory_do_not_go_in() -> None:
    step = fdp.data_parallel(lambda w, b: w + fdp.pmean(b), donate_argnums=0)
    for _ in range(2):
        step(torch.zeros(3), torch.ones(3))
    with pytest.raises(fdp.TraceError, match="w: zeros that take no memory; pass a clone"):
        step(torch._efficientzerotensor((3,)), torch.ones(3))


def test_what_a_failed_trace_runs_by_itself_leaves_no_trace() -> None:
    """Whose fault a failure is, the step itself shows, run as it is: on nothing that anybody keeps."""

    def step(w: Tensor, b: Tensor) -> Tensor:
        TABLE.add_(1)
        return w.set_(b.untyped_storage())

    before = TABLE.clone()
    with pytest.raises(fdp.TraceError):
        fdp.data_parallel(step)(torch.ones(3), torch.ones(3))
    assert torch.equal(TABLE, before)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_complex_state_that_is_conjugated(compiled: bool) -> None:
    step = fdp.data_parallel(
        lambda s, b: {"z": (s["z"] * 2).conj()}, donate_argnums=0, check_replication=False, compile=compiled
    )
    s = {"z": torch.tensor([1 + 1j, 2 - 1j])}
    for _ in range(2):
        s = step(s, torch.ones(1))
    assert s["z"].tolist() == [4 + 4j, 8 - 4j] and not s["z"].is_conj()


# --- collectives whose result has no meaning ------------------------------------------------------------------------


def test_the_mean_of_counters_names_all_of_them_and_the_line() -> None:
    """In one screen: the way through the tracer is not part of it."""
    apply, params, buffers = fdp.from_module(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))

    def train(params: Tree, buffers: Tree, x: Tensor) -> Tree:
        out, new = apply(params, buffers, x)
        return fdp.pmean(out.sum()), fdp.pmean(new)

    with pytest.raises(fdp.ArgumentError) as caught:
        fdp.data_parallel(train)(params, buffers, torch.randn(4, 3))
    text = str(caught.value)
    assert "0.num_batches_tracked" in text and "1.num_batches_tracked" in text
    assert re.search(r"in step 'train', test_memory_changes.py:\d+ in train", text)
    assert "fdp.pmax" in text.splitlines()[-1]
    frames = caught.traceback
    assert not any("proxy_tensor" in str(frame.path) for frame in frames)
    assert frames[-1].name == "train"


# --- the documents ----------------------------------------------------------------------------------------------------


def test_the_table_in_the_documents_names_each_test() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs" / "memory-changes.md").read_text()
    rows = [line.rsplit("|", 2)[1] for line in page.splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    known = {*RIGHT, *DONATED, *REFUSED}
    assert named == known, (named - known, known - named)


def test_operators_in_place_that_turn_a_tensor_are_all_known() -> None:
    """torch tags most of them; a new one would be refused by the trace, which is safe, and should be a view."""
    from fdp.trace.reshapes import _VIEWS

    tagged = {
        name
        for name in dir(torch.ops.aten)
        if hasattr(packet := getattr(torch.ops.aten, name), "overloads")
        and any(torch.Tag.inplace_view in getattr(packet, each).tags for each in packet.overloads())
    }
    assert tagged <= {*_VIEWS, "set_", "resize_", "resize_as_"}
    for name in _VIEWS:
        there, back = getattr(torch.ops.aten, name), getattr(torch.ops.aten, name.removesuffix("_"))
        assert all(each in back.overloads() or "int" in back.overloads() for each in there.overloads())


def test_arrays_that_are_copied_are_constants() -> None:
    array = np.arange(3, dtype=np.float32)
    step = fdp.data_parallel(lambda w, b: w + torch.tensor(array) + torch.as_tensor(array).mul(2))
    for _ in range(2):
        assert step(torch.ones(3), torch.ones(3)).tolist() == [1.0, 4.0, 7.0]


def test_views_of_a_closed_over_tensor_that_come_as_a_list() -> None:
    table = torch.randn(4, 4)

    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        return state + batch.sum() * table.chunk(2)[1].sum(), table.split(2)[0] * 2

    x = torch.randn(3)
    found = fdp.data_parallel(step, batch_argnums=())(torch.ones(2), x)
    torch.testing.assert_close(found, step(torch.ones(2), x))
