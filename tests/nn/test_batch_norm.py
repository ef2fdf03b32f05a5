"""Synchronised batch normalisation on real ranks is nn.BatchNorm of one process with all samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples import exhaustive
from torch import Tensor, nn

import fdp
from fdp.nn.batch_norm import _Moments, _Normalised

DOUBLE = torch.float64


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch, spread over ranks: `sizes` samples on each."""

    sizes: tuple[int, ...]
    rest: tuple[int, ...] = (3,)
    dtype: torch.dtype = DOUBLE
    param_dtype: torch.dtype | None = None
    layout: str = ""
    mean: float = 0.0
    momentum: float = 0.1
    affine: bool = True
    tracked: bool = True
    inactive: tuple[int, ...] = ()


TWO = [
    Case((4, 4)),
    Case((3, 5), (2, 4)),
    Case((2, 3), (3, 2, 2), layout="channels last"),
    Case((2, 2), (2, 2, 1, 3), momentum=1.0),
    Case((1, 1)),
    Case((1, 0), (2, 3)),
    Case((0, 5), (3, 2, 2), affine=False),
    Case((4, 6), tracked=False),
    Case((30, 10), (2, 4), torch.float32, mean=1e4),
    Case((30, 10), (2, 4), DOUBLE, mean=1e8),
    Case((4, 6), (3, 2, 2), torch.bfloat16, torch.float32),
    Case((4, 6), (3, 2, 2), torch.bfloat16),
    Case((4, 6), (3, 2, 2), torch.float16, torch.float32, layout="transposed"),
    Case((4, 6), (3, 2), inactive=(0,)),
]
THREE = [Case((1, 4, 2), (2, 3)), Case((0, 0, 3)), Case((2, 2, 3), (2, 2), inactive=(1, 2)), Case((0, 7, 0), mean=50.0)]
EXACTNESS = {DOUBLE: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def shards(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """What each rank holds, and the weights of its outputs in the loss; the same on every rank."""
    g = torch.Generator().manual_seed(3)
    made = []
    for kind in range(2):
        tensors = []
        for size in case.sizes:
            x = torch.randn((size, *case.rest), generator=g, dtype=DOUBLE)
            x = (x * (1 + kind) + case.mean * (1 - kind)).to(case.dtype)
            if case.layout == "channels last":
                x = x.contiguous(memory_format=torch.channels_last)
            if case.layout == "transposed":
                x = x.transpose(0, -1).contiguous().transpose(0, -1)
            tensors.append(x)
        made.append(tensors)
    return made[0], made[1]


def parameters(case: Case) -> dict[str, Any]:
    c, dtype = case.rest[0], case.param_dtype or case.dtype
    stats = DOUBLE if case.dtype == DOUBLE else torch.float32
    return {
        "running_mean": torch.linspace(-1, 1, c, dtype=stats) + case.mean if case.tracked else None,
        "running_var": torch.linspace(1, 2, c, dtype=stats) if case.tracked else None,
        "weight": torch.linspace(0.5, 2, c).to(dtype).requires_grad_() if case.affine else None,
        "bias": torch.linspace(-1, 0, c).to(dtype).requires_grad_() if case.affine else None,
    }


def one_process(case: Case) -> tuple[list[Tensor], list[Tensor], list[Tensor], dict[str, Any]]:
    """F.batch_norm of all samples that count, in doubles: each rank's y and dL/dx, dL/dparameters, buffers."""
    xs, weights = shards(case)
    p = {
        name: v if v is None else v.detach().double().requires_grad_(v.requires_grad)
        for name, v in parameters(case).items()
    }
    xs = [x.double().requires_grad_() for x in xs]
    counting = [x for rank, x in enumerate(xs) if rank not in case.inactive]
    whole = torch.cat(counting)
    one = whole.numel() == case.rest[0]  # which F.batch_norm refuses, and fdp sees as one number on all ranks
    if one:
        var, mean = torch.var_mean(whole, [0, *range(2, whole.dim())], correction=0)
    else:
        F.batch_norm(whole.detach(), p["running_mean"], p["running_var"], training=True, momentum=case.momentum)
        var, mean = torch.var_mean(whole, [0, *range(2, whole.dim())], correction=0)
    shape = (1, -1, *[1] * (whole.dim() - 2))
    ys = []
    for x in xs:
        y = (x - mean.reshape(shape)) * torch.rsqrt(var + 1e-5).reshape(shape)
        ys.append(y if not case.affine else y * p["weight"].reshape(shape) + p["bias"].reshape(shape))
    if not case.inactive and not one:
        expected = F.batch_norm(whole, None, None, p["weight"], p["bias"], True)
        torch.testing.assert_close(torch.cat(ys), expected, rtol=1e-6, atol=1e-6)
    loss = sum((y.square() * w.double()).sum() for y, w in zip(ys, weights, strict=True))
    sources = [*xs, *([p["weight"], p["bias"]] if case.affine else [])]
    grads = torch.autograd.grad(loss, sources)
    return [y.detach() for y in ys], list(grads[: len(xs)]), list(grads[len(xs) :]), p


def near(found: Tensor, expected: Tensor, case: Case, what: str) -> None:
    # Of numbers about 1e8 +- 1 half of the digits are the 1e8.
    relative = max(EXACTNESS[case.dtype], 10 * abs(case.mean) * torch.finfo(case.dtype).eps)
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    gap = float((found.double() - expected).abs().max()) if expected.numel() else 0.0
    assert gap <= relative * scale, f"{case}: {what} is off by {gap}"


def check_cases(cases: list[Case]) -> None:
    rank = dist.get_rank()
    for case in cases:
        ys, dxs, dps, buffers = one_process(case)
        x, w = (tensors[rank].requires_grad_(i == 0) for i, tensors in enumerate(shards(case)))
        p = parameters(case)
        active = torch.tensor(float(rank not in case.inactive)) if case.inactive else None
        y, mean, var = fdp.sync_batch_norm(x, **p, momentum=case.momentum, active=active)
        assert y.dtype == x.dtype and y.shape == x.shape
        assert y.stride() == x.stride() or case.layout == "" or not y.numel(), case
        near(y, ys[rank], case, "y")
        sources = [x, *([p["weight"], p["bias"]] if case.affine else [])]
        dx, *local = torch.autograd.grad((y.double().square() * w.double()).sum(), sources)
        near(dx, dxs[rank], case, "dx")
        for found, expected in zip(fdp.psum([d.double() for d in local]), dps, strict=True):
            near(found, expected, case, "a parameter's gradient")
        if not case.tracked:
            assert mean is None and var is None
            continue
        fdp.assert_replicated((mean, var))
        assert mean.dtype == p["running_mean"].dtype and not mean.requires_grad
        if sum(n for r, n in enumerate(case.sizes) if r not in case.inactive) * torch.Size(case.rest[1:]).numel() > 1:
            near(mean, buffers["running_mean"].detach(), case, "running_mean")
            near(var, buffers["running_var"].detach(), case, "running_var")


def test_it_is_batch_norm_of_all_samples_on_two_ranks() -> None:
    ranks.run(2, check_cases, TWO)


@exhaustive
def test_it_is_batch_norm_of_all_samples_on_three_ranks() -> None:
    ranks.run(3, check_cases, THREE)


# --- transforms, messages, a world of one --------------------------------------------------------------------------


def second_order() -> None:
    """A gradient penalty through the normalisation: the derivative of a derivative crosses ranks, too."""
    rank, case = dist.get_rank(), Case((3, 5), (2, 3))
    xs, ws = shards(case)

    def penalty(y: list[Tensor], x: list[Tensor]) -> Tensor:
        loss = sum((a**3 * w).sum() for a, w in zip(y, ws if len(y) > 1 else [ws[rank]], strict=True))
        return sum(g.square().sum() + g.prod(0).sum() for g in torch.autograd.grad(loss, x, create_graph=True))

    own = xs[rank].clone().requires_grad_()
    found = torch.autograd.grad(penalty([fdp.sync_batch_norm(own, None, None)[0]], [own]), own)[0]
    whole = [x.requires_grad_() for x in xs]
    ys = F.batch_norm(torch.cat(whole), None, None, training=True).split([3, 5])
    expected = torch.autograd.grad(penalty(list(ys), whole), whole)[rank]
    torch.testing.assert_close(found, expected)


def forward_mode() -> None:
    """A tangent, and one of a gradient, of ranks with two samples and one; in a step, and outside."""
    g = torch.Generator().manual_seed(0)
    x, tangent = (torch.randn(3, 2, generator=g, dtype=DOUBLE) for _ in range(2))
    weight, bias, own = torch.ones(2, dtype=DOUBLE) * 3, torch.ones(2, dtype=DOUBLE), slice(0, 2)
    if dist.get_rank():
        own = slice(2, 3)

    def here(x: Tensor, weight: Tensor) -> Tensor:
        return fdp.psum(fdp.sync_batch_norm(x, None, None, weight, bias)[0].pow(3).sum(0))

    def whole(x: Tensor, weight: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, weight, bias, True).pow(3).sum(0)

    def tangents(f: Any, x: Tensor, tangent: Tensor, weight: Tensor) -> Any:
        of_grad = torch.func.jvp(lambda w: torch.func.grad(lambda w: f(x, w).square().sum())(w), (weight,), (weight,))
        return torch.func.jvp(f, (x, weight), (tangent, weight)), of_grad

    expected = tangents(whole, x, tangent, weight)
    step = fdp.data_parallel(lambda weight, batch: per_rank_second(tangents(here, *batch, weight)))
    for found in (tangents(here, x[own], tangent[own], weight), step(weight, (x[own], tangent[own]))):
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(fdp.pmean(found[1]), expected[1])


def per_rank_second(pair: Any) -> Any:
    return pair[0], fdp.per_rank(pair[1])


# torch's own decompositions for forward mode, at their first use.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_tangents_are_those_of_one_process() -> None:
    ranks.run(2, forward_mode)


def ensemble() -> None:
    """Under vmap, and a local torch.func.grad inside of it, with one message for all members."""
    rank = dist.get_rank()
    xs = torch.randn(2, 4, 5, 3, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return (fdp.sync_batch_norm(x, None, None, weight)[0] ** 3).sum()

    weights = torch.arange(1.0, 13.0, dtype=DOUBLE).reshape(4, 3)
    found = torch.vmap(torch.func.grad(loss, argnums=(0, 1)))(xs[rank], weights)
    one_by_one = [torch.func.grad(loss, argnums=(0, 1))(x, w) for x, w in zip(xs[rank], weights, strict=True)]
    torch.testing.assert_close(found, tuple(torch.stack(parts) for parts in zip(*one_by_one, strict=True)))


def messages() -> list[tuple[str, str, tuple[int, ...]]]:
    apply, params, buffers = fdp.from_module(nn.SyncBatchNorm(3))

    def step(state: Any, x: Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            y, new = apply(params, state["buffers"], x)
            return y.square().mean(), new

        grads, new = fdp.grad(loss_fn, has_aux=True)(state["params"])
        return {"params": grads, "buffers": new}

    trace = fdp.data_parallel(step).trace({"params": params, "buffers": buffers}, torch.randn(4, 3))
    return [(r.op, r.kind, r.shape) for r in trace.reductions if r.kind != "gradient"]


def test_derivatives_of_derivatives_and_ensembles() -> None:
    ranks.run(2, second_order)
    ranks.run(2, ensemble)
    # One message forward; none back, since the gradient of the input is not asked for.
    assert ranks.run(2, messages)[0] == [("all_gather", "value", (7,))]


def test_its_parts_are_differentiated_twice_rightly() -> None:
    x = torch.randn(4, 2, 3, dtype=DOUBLE, requires_grad=True)
    mean, scale, bias = (torch.randn(2, dtype=DOUBLE, requires_grad=True) for _ in range(3))
    for fn, inputs in ((_Moments.apply, (x,)), (_Normalised.apply, (x, mean, scale, bias))):
        assert torch.autograd.gradcheck(fn, inputs) and torch.autograd.gradgradcheck(fn, inputs)


def test_in_a_world_of_one_it_is_batch_norm() -> None:
    x, mean, var = torch.randn(5, 3, 2, dtype=DOUBLE), torch.zeros(3, dtype=DOUBLE), torch.ones(3, dtype=DOUBLE)
    for training in (True, False):
        kept = mean.clone(), var.clone()
        y, new_mean, new_var = fdp.sync_batch_norm(x, mean, var, training=training, momentum=0.3)
        torch.testing.assert_close(y, F.batch_norm(x, *kept, training=training, momentum=0.3))
        torch.testing.assert_close((new_mean, new_var), kept)
        assert mean.tolist() == [0.0] * 3 and var.tolist() == [1.0] * 3
    empty = fdp.sync_batch_norm(x[:0], mean, var)
    assert empty[0].shape == (0, 3, 2) and torch.equal(empty[1], mean) and torch.equal(empty[2], var)


@pytest.mark.parametrize(
    ("x", "options", "text"),
    [
        (torch.ones(3), {}, r"a torch.float32 tensor of shape \[3\].\nRemedy: pass floating-point numbers of shape"),
        (torch.ones(3, 0), {}, r"shape \[3, 0\]"),
        (torch.ones(3, 2, dtype=torch.int64), {}, "a torch.int64 tensor"),
        (torch.ones(1, 2), {}, r"one number a channel, \[1, 2\], which have no variance"),
        (torch.ones(3, 2), {"active": torch.ones(3)}, r"`active` of shape \[3\]"),
        (torch.ones(3, 2), {"active": 1.0}, "`active` of type float"),
        (
            torch.ones(3, 2),
            {"running_var": torch.ones(1)},
            r"2 channels, .*\n  running_var: shape \[1\]\nRem",
        ),
        (torch.ones(3, 2), {"weight": torch.ones(3), "training": False}, r"weight: shape \[3\]"),
    ],
)
def test_what_has_no_meaning_is_refused(x: Tensor, options: dict[str, Any], text: str) -> None:
    with pytest.raises(fdp.ArgumentError, match=text):
        fdp.sync_batch_norm(x, **{"running_mean": None, "running_var": None, **options})
