"""Steps that change tensors out of the dispatcher's sight, or under another name, and that are right."""

# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch import nn

import fdp

Tensor = torch.Tensor
Tree = Any
Case = Callable[[Tree, Tensor], Tree]

WARNINGS = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]
"""What torch says of such changes."""


def state() -> Tree:
    return {"w": torch.arange(9.0).view(3, 3) + 1, "k": torch.arange(9.0).view(3, 3) * 2, "lr": torch.zeros(())}


def batch(call: int) -> Tensor:
    return torch.arange(9.0).view(3, 3) * 0.1 + call


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


def momentum_encoder(s: Tree, b: Tensor) -> Tree:
    """MoCo, as published."""
    s["k"].data = s["k"].data * 0.9 + s["w"].data * 0.1
    return {"w": s["w"] + b, "k": s["k"], "lr": s["lr"]}


def momentum_encoder_in_a_loss(s: Tree, b: Tensor) -> Tree:
    """As published, with a key encoder that is differentiated as well."""

    def loss(s: Tree) -> Tensor:
        s["k"].data = s["k"].data * 0.9 + s["w"].data * 0.1
        return ((s["w"] - s["k"].detach()) * b).square().sum()

    grads = fdp.grad(loss)(s)
    return {name: value - s["lr"] * grads[name] for name, value in s.items()}


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
        momentum_encoder, momentum_encoder_in_a_loss, momentum_encoder_that_is_not_returned, learning_rate_of_zero,
        old_and_new, exchanged_arguments, turned_by_data, turned_views,
    )
}  # fmt: skip
