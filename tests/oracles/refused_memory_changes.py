"""Steps that change tensors out of the dispatcher's sight, or under another name, and that are refused."""

# ruff: noqa: E501
from __future__ import annotations

import numpy as np
import torch
from memory_changes import PLACES, TABLE, Case, Running, Tensor, Tree
from torch import nn

import fdp

COUNT, LARGE, PARAMETER = torch.zeros(()), torch.zeros(2**17), nn.Parameter(torch.ones(3))
ARRAY = np.zeros(3, dtype=np.float32)
SHARED = torch.from_numpy(ARRAY)
MODULE = Running().requires_grad_(False)
LINEAR = nn.Linear(3, 3).requires_grad_(False)


def writes_to_an_array(s: Tree, b: Tensor) -> Tree:
    ARRAY[0] += 1
    return s["w"] + SHARED


def turned_beside_a_view(s: Tree, b: Tensor) -> Tree:
    def loss(w: Tensor) -> Tensor:
        h, k = (h := w * 2), h[:]
        h.t_()
        return (k * b).sum()

    return fdp.grad(loss)(s["w"])


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
    "argument.data = of another dtype": (
        lambda s, b: (setattr(s["w"], "data", b.half()), s["w"])[1], PURITY, "memory of another kind", r"s\['w'\]", "w.half()"
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
    "dlpack": (lambda s, b: torch.from_dlpack(s["w"]).add_(1), TRACE, "DLPack hands out", "lambda", "x.detach()"),
    "to_dlpack": (
        lambda s, b: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(s["w"])), TRACE, "DLPack hands out", "", ""
    ),
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
    "closed over, unsqueeze_, and what the old shape cannot do": (
        lambda s, b: (COUNT.unsqueeze_(0), COUNT.detach()[:] * 1)[1], PURITY, GIVES, "COUNT: ", "make a view"
    ),
    "closed over, unsqueeze_, and a collective that the old shape cannot have": (
        lambda s, b: (COUNT.unsqueeze_(0), fdp.psum_scatter(COUNT, 0))[1], PURITY, GIVES, "COUNT: ", "make a view"
    ),
    "closed over, t_, and what cannot be traced": (
        lambda s, b: (TABLE.t_(), b * int(b.sum()))[1], PURITY, GIVES, "TABLE: ", "make a view"
    ),
    "closed over, resize_, and what the old shape cannot do": (
        lambda s, b: (COUNT.resize_(4), fdp.pmean(COUNT[:2]))[1], PURITY, GIVES, "COUNT: ", "make a view"
    ),
    "closed over, out= that grows, and what the old shape cannot do": (
        lambda s, b: (torch.mul(b[0], 2, out=COUNT), COUNT[:1])[1], PURITY, GIVES, "COUNT: ", "make a view"
    ),
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
    "turned beside a view": (
        turned_beside_a_view, TRACE, "that shares memory with a view, and is differentiated", "aten.t_", "h = h.t()"
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
