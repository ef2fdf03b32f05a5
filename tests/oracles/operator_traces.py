"""Traces of operators with out variants, and of their gradients, on torch's own samples."""

from __future__ import annotations

import warnings
from typing import Any

import optree
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db

from fdp.emit.memory import out_variants


def graphs_of(op: Any, limit: int) -> list[tuple[fx.GraphModule, list[torch.Tensor]]]:
    """Traces of an operator and of its gradient on some of torch's own samples."""
    found = []
    dtype = torch.float32 if op.supports_dtype(torch.float32, "cpu") else torch.int64
    # Not op.sample_inputs, which looks at the whole stack for the name of the test.
    for sample in op.sample_inputs_func(op, "cpu", dtype, op.supports_autograd and dtype.is_floating_point):
        if len(found) == limit:
            break
        leaves, spec = optree.tree_flatten((sample.input, sample.args, sample.kwargs), none_is_leaf=True)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(t.layout != torch.strided or t.is_conj() or t.is_neg() for t in tensors):
            continue

        def run(*given: torch.Tensor, leaves: Any = leaves, spec: Any = spec, sample: Any = sample) -> Any:
            it = iter(given)
            first, args, kwargs = spec.unflatten([next(it) if isinstance(x, torch.Tensor) else x for x in leaves])
            out = op(first, *args, **kwargs)
            made = [x for x in optree.tree_leaves(out) if isinstance(x, torch.Tensor)]
            inputs = [x for x in given if x.requires_grad]
            sums = [x.sum() for x in made if x.requires_grad and x.is_floating_point()]
            if inputs and sums:
                made += [g for g in torch.autograd.grad(sum(sums), inputs, allow_unused=True) if g is not None]
            return made

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
        except Exception:  # what cannot be traced has no form either
            continue
        found.append((graph, tensors))
    return found


NAMED_OTHERWISE = {
    "where": ["where"],
    "addmm": ["addmm", "nn.functional.linear"],
    "nll_loss_forward": ["nn.functional.nll_loss", "nn.functional.cross_entropy"],
    "mse_loss_backward": ["nn.functional.mse_loss"],
    "native_batch_norm": ["nn.functional.batch_norm"],
    "max_pool2d_with_indices": ["nn.functional.max_pool2d"],
    "avg_pool2d": ["nn.functional.avg_pool2d"],
    "threshold": ["nn.functional.threshold", "nn.functional.relu"],
    "_softmax": ["softmax"],
    "linalg_vector_norm": ["linalg.vector_norm"],
}


def operators_to_try() -> list[Any]:
    names = {n for group in NAMED_OTHERWISE.values() for n in group}
    plain = set(out_variants._WRITES_IN_PLACE)
    named = [op for op in op_db if op.name in plain | names or op.name.removeprefix("nn.functional.") in plain]
    return [op for op in named if any(op.supports_dtype(dtype, "cpu") for dtype in (torch.float32, torch.int64))]
