"""Every differentiable operator that torch ships samples for: its gradient through a traced step is autograd's.

For each float32 operator of `op_db` a step takes the tensors of a sample, those that autograd follows as parameters,
and returns the outputs, a weighted sum of them, and its gradients. The reference is plain autograd on the same tensors
with the same random seed. Two calls of one step, with samples drawn from two seeds: data of the first call that got
into the graph as a constant shows in the second. An operator is right, or refused by an `FdpError` that ends with a
remedy; nothing else.

By default one sample an operator; FDP_ALL_SAMPLES=1 takes all, and forms (method, in-place) of each operator, and each
of them without the comparison at the first call, too (what the tracer gets wrong by itself).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import optree
import torch

import fdp

CHUNKS = 12
ALL = bool(os.environ.get("FDP_ALL_SAMPLES"))

RIGHT, REFUSED, WRONG, SKIPPED = "right", "refused", "wrong", "skipped"


@dataclass(frozen=True)
class Sample:
    """An operator's call, with its tensors apart: those that autograd follows, the others, and what puts them back."""

    params: list[torch.Tensor]
    others: list[torch.Tensor]
    whole: Callable[[list[torch.Tensor], list[torch.Tensor]], Any]
    post: Callable[[Any], Any]


def operators() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    found = {}
    for info in op_db:
        if info.supports_autograd and torch.float32 in info.supported_backward_dtypes("cpu"):
            found[info.formatted_name] = info
    return found


def apart(sample: Any) -> Sample:
    leaves, spec = optree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)), none_is_leaf=True)
    kinds = ["other" if not isinstance(x, torch.Tensor) else "param" if x.requires_grad else "tensor" for x in leaves]

    def whole(params: list[torch.Tensor], others: list[torch.Tensor]) -> Any:
        sources = {"param": iter(params), "tensor": iter(others), "other": iter([])}
        return optree.tree_unflatten(
            spec, [x if k == "other" else next(sources[k]) for x, k in zip(leaves, kinds, strict=True)]
        )

    return Sample(
        [x.detach() for x, k in zip(leaves, kinds, strict=True) if k == "param"],
        [x for x, k in zip(leaves, kinds, strict=True) if k == "tensor"],
        whole,
        sample.output_process_fn_grad,
    )


def draw(info: Any, seed: int) -> list[Sample]:
    torch.manual_seed(seed)
    drawn: Iterator[Any] = info.sample_inputs("cpu", torch.float32, requires_grad=True)
    return [apart(s) for s in drawn]


def geometry(sample: Sample) -> Any:
    return [
        (x.shape, x.dtype, x.layout, x.stride() if x.layout == torch.strided else ())
        for x in [*sample.params, *sample.others]
    ]


def weighted(out: Any) -> torch.Tensor:
    """Fixed weights, so that no two elements of an output can stand for each other."""
    total = torch.zeros(())
    for leaf in optree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            weights = torch.linspace(-1, 1.5, leaf.numel()).reshape(leaf.shape)
            if leaf.is_complex():
                leaf = leaf.real + 0.5 * leaf.imag
            total = total + (leaf.float() * weights).sum()
    return total


def called(function: Callable[..., Any], sample: Sample, params: Any, others: Any) -> tuple[torch.Tensor, Any]:
    given, args, kwargs = sample.whole(params, others)
    out = function(given, *args, **kwargs)
    leaves = [x for x in optree.tree_leaves(out) if isinstance(x, torch.Tensor)]
    return weighted(sample.post(out)), leaves


def by_hand(function: Callable[..., Any], sample: Sample, data: Sample) -> Any:
    params = [p.clone().requires_grad_() for p in data.params]
    torch.manual_seed(3)
    loss, out = called(function, sample, params, data.others)
    grads: Any = [None] * len(params)
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, params, allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params, strict=True)]
    return loss.detach(), grads, [x.detach() for x in out]


def verdict(function: Callable[..., Any], calls: list[Sample], **options: Any) -> tuple[str, str]:
    """Whether a step around an operator computes what autograd computes, on all of the data."""
    first = calls[0]

    def operator_step(params: Any, others: Any) -> Any:
        (loss, out), grads = fdp.value_and_grad(lambda p: called(function, first, p, others), has_aux=True)(params)
        return loss, grads, out

    step = fdp.data_parallel(operator_step, check_replication=False, **options)
    for number, data in enumerate(calls):
        try:
            expected = by_hand(function, first, data)
        except Exception as error:
            return SKIPPED, f"by hand: {error}"
        torch.manual_seed(3)
        try:
            got = step(data.params, data.others)
        except fdp.FdpError as error:
            text = str(error)
            return (
                REFUSED if text.splitlines()[-1].startswith("Remedy: ") else WRONG
            ), f"{type(error).__name__}: {text}"
        except Exception:
            return WRONG, f"call {number}\n{traceback.format_exc()}"
        try:
            torch.testing.assert_close(got, tuple(expected), rtol=1e-4, atol=1e-5, equal_nan=True)
        except AssertionError as error:
            return WRONG, f"call {number}: {error}"
    if step.traces > 1:
        return RIGHT, "two geometries"
    return RIGHT, ""
