"""Small models that each meet some of what an emitter decides, under optimizers and in loops."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from faulty_program import Program, Tree, indices, optimizer_of, registering

PROGRAMS: dict[str, Program] = {}
_program = registering(PROGRAMS)

_MLP = {"w1": (64, 300), "b1": (300,), "w2": (300, 600), "b2": (600,), "w3": (600, 3)}
_ADAMW, _ADAMW_STATE = optimizer_of(torch.optim.AdamW, _MLP, lr=0.012345678)


@_program({"params": _MLP, "opt": _ADAMW_STATE}, {"x": (8, 64), "y": (8, 3)}, cap=[0.02, 2], tolerance=1e-6)
def adamw(c: Any, s: Tree, b: Tree) -> Any:
    """A fused optimizer on donated state, several buckets, one of them large; local values beside averages."""

    def loss_fn(p: Tree) -> torch.Tensor:
        h = torch.relu(torch.addmm(p["b1"], b["x"], p["w1"]))
        h = torch.tanh(torch.addmm(p["b2"], h, p["w2"]))
        return F.mse_loss(h @ p["w3"], b["y"])

    loss, grads = c.value_and_grad(loss_fn)(s["params"])
    params, opt = _ADAMW.update(grads, s["opt"], s["params"])
    return {"params": params, "opt": opt}, [c.pmean(loss), loss * 2]


_SMALL = {"a": (6, 5), "b": (5,), "c": (5, 5), "d": (5,), "e": (5, 2)}


@_program({"p": _SMALL, "m": _SMALL}, {"x": (4, 6), "y": (4, 2)}, cap=0.00015)
def sgd(c: Any, s: Tree, b: Tree) -> Any:
    """New values made one by one, one bucket a gradient, clipped by a norm that all ranks share."""

    def loss_fn(p: Tree) -> torch.Tensor:
        h = torch.tanh(F.linear(b["x"], p["a"].t(), p["b"]))
        return F.mse_loss(torch.relu(F.linear(h, p["c"], p["d"])) @ p["e"], b["y"])

    loss, grads = c.value_and_grad(loss_fn)(s["p"])
    norm = c.pmax(sum((g * g).sum() for g in grads.values()) + loss)
    scale = torch.clamp(1.2345678 / (norm + 1e-6), max=1.0)
    momentum = {k: 0.987654321 * s["m"][k] + grads[k] * scale for k in grads}
    new = {k: s["p"][k] - 0.123456789 * momentum[k] for k in grads}
    return {"p": new, "m": momentum}, [norm, sum(x.sum() for x in s["p"].values())]


_EQUAL = {"a": (7, 7), "b": (7, 7), "c": (7, 7), "d": (7, 7)}


@_program({"p": _EQUAL, "m": _EQUAL, "n": {k: torch.zeros(()) for k in _EQUAL}}, {"x": (4, 7)}, cap=0.0008)
def foreach(c: Any, s: Tree, b: Tree) -> Any:
    """List operators over parameters of one shape, whose gradients come in another order than they are listed in."""

    def loss_fn(p: Tree) -> torch.Tensor:
        return (
            torch.tanh(torch.tanh(torch.tanh(b["x"] @ p["c"]) @ p["a"]) @ p["d"])
            @ p["b"]
            @ torch.ones(7).double()
            @ (torch.ones(4).double())
        )

    grads = c.grad(loss_fn)(s["p"])
    params, moments, counts = ([x.clone() for x in s[k].values()] for k in ("p", "m", "n"))
    torch._foreach_add_(counts, 1)
    torch._foreach_mul_(moments, 0.9)
    torch._foreach_add_(moments, list(grads.values()))
    scaled = torch._foreach_mul(moments, 0.1)
    torch._foreach_sub_(params, scaled)
    new = [dict(zip(_EQUAL, values, strict=True)) for values in (params, moments, counts)]
    return dict(zip(("p", "m", "n"), new, strict=True)), [torch._foreach_mul(params, 2.0)]


@_program({k: (7, 7) for k in "abcd"}, {"x": (4, 7)}, cap=0.0008)
def listed(c: Any, s: Tree, b: Tree) -> Any:
    """List operators that change what they are given, with gradients in another order than their parameters."""
    grads = c.grad(lambda p: torch.tanh(torch.tanh(b["x"] @ p["c"] @ p["a"]) @ p["d"] @ p["b"]).pow(3).sum())(s)
    new = [x.clone() for x in s.values()]
    torch._foreach_mul_(new, 0.9)
    torch._foreach_add_(new, list(grads.values()))
    return dict(zip(s, new, strict=True)), []


@_program({"e": (700, 200), "b": (700,)}, {"x": indices(700, 6, 3)}, donate=False)
def tied(c: Any, s: Tree, b: Tree) -> Any:
    """One weight at both ends: the sum of two large gradients, packed divided; also looked at before it is averaged."""

    def loss_fn(p: Tree) -> torch.Tensor:
        h = F.embedding(b["x"], p["e"]).mean(1)
        return F.cross_entropy(torch.addmm(p["b"], torch.tanh(h), p["e"].t()), b["x"][:, 0])

    loss, grads = c.value_and_grad(loss_fn)(s)
    return {k: s[k] - 0.5 * grads[k] for k in s}, [loss, grads["e"]]


_LOOP = {"w1": (200, 400), "b1": (400,), "w2": (400, 200)}


@_program(_LOOP, {"x": (6, 200)}, cap=0.7)
def accumulate(c: Any, s: Tree, b: Tree) -> Any:
    """Microbatches in a loop whose memory is inside of that of the step; products are added in place."""

    def loss_fn(p: Tree, batch: Tree) -> torch.Tensor:
        h = torch.tanh(torch.addmm(p["b1"], batch["x"], p["w1"]))
        return ((h * (c.axis_index() + 1)) @ p["w2"]).pow(2).mean()

    # It leaves a gap that the buckets, and most of what the loop needs, fit into.
    gone = torch.cat([s["w1"], s["w1"], s["w1"][:7]])
    across = torch.tanh(b["x"] @ gone[207:])
    loss, grads = c.accumulate(c.value_and_grad(loss_fn), 3)(s, b)
    return {k: s[k] - 0.5 * grads[k] for k in s}, [c.pmean(loss), across * 2 + across.sum()]


@_program(
    {
        "p": {"w": (5, 4), "g": torch.ones(4).double(), "h": torch.zeros(4).double()},
        "mean": torch.zeros(4).double(),
        "var": torch.ones(4).double(),
        "n": torch.tensor(0),
    },
    {"x": (6, 5)},
)
def batch_norm(c: Any, s: Tree, b: Tree) -> Any:
    """Running statistics are changed in place; of three results one is looked at later; one input is transposed."""
    mean, var, n = s["mean"].clone(), s["var"].clone(), s["n"].clone()
    n.add_(1)

    def loss_fn(p: Tree) -> torch.Tensor:
        y = F.batch_norm(b["x"] @ p["w"], mean, var, p["g"], p["h"], training=True)
        # Neither contiguous nor channels last.
        z = torch.tanh((y.t() @ b["x"]).reshape(2, 2, 5).transpose(0, 2))
        out, means, deviations = torch.ops.aten.native_batch_norm(z, None, None, None, None, True, 0.1, 1e-5)
        return (out * b["x"].t()[:, :2, None]).sum() + means.sum() * 2 + deviations.detach().sum() + y.pow(3).mean()

    loss, grads = c.value_and_grad(loss_fn)(s["p"])
    p = {k: s["p"][k] - 0.1 * grads[k] for k in grads}
    return {"p": p, "mean": c.pmean(mean), "var": c.pmean(var), "n": n}, [c.pmean(loss)]


@_program({"w": (2, 3, 3, 3), "v": (32, 4)}, {"x": (3, 3, 8, 8), "y": indices(4, 3)}, donate=False)
def convolution(c: Any, s: Tree, b: Tree) -> Any:
    """Operators with several results, and strided gradients."""

    def loss_fn(p: Tree) -> torch.Tensor:
        x = b["x"].to(memory_format=torch.channels_last)
        pooled = F.max_pool2d(F.relu(F.conv2d(x, p["w"], padding=1)), 2)
        return F.nll_loss(F.log_softmax(pooled.flatten(1) @ p["v"], -1), b["y"])

    loss, grads = c.value_and_grad(loss_fn)(s)
    values, found = F.max_pool2d(b["x"] * 2, 2, return_indices=True)
    total, weight = torch.ops.aten.nll_loss_forward(b["x"].flatten(1)[:, :4] * 3, b["y"], None, 1, -100)
    return {k: s[k] - 0.5 * grads[k] for k in s}, [loss, values.sum() + found.sum(), total * 2 + weight]
