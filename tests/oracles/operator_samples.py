"""The samples that torch ships for its operators, as calls of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

DRAWS = {"bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "uniform"}
"""Operators with random results."""
MANY_RESULTS_ARE_RIGHT = ("empty", "new_empty", "resize", "rand", "svd", "pca_lowrank", "linalg", "fft", "ops.aten")
"""Beginnings of the names of operators whose results are not determined, or whose kernels inductor calls anyway."""

ROUNDS_ELSEWHERE = ("cross", "grid_sampler", "nn_functional_grid_sample")
"""Beginnings of the names of operators of sixteen bits whose kernels round between their operations."""

TOLERANCE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 1e-2), torch.float16: (3e-3, 2e-3)}
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@dataclass(frozen=True)
class Call:
    name: str
    of: Callable[[list[Tensor]], list[Tensor]]
    tensors: list[Tensor]
    due: list[Tensor]


def call_of(info: Any, sample: Any) -> Call | None:
    leaves, spec = optree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)), none_is_leaf=True)
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def of(tensors: list[Tensor]) -> list[Tensor]:
        given = dict(zip(places, tensors, strict=True))
        first, args, kwargs = optree.tree_unflatten(spec, [given.get(at, leaf) for at, leaf in enumerate(leaves)])
        return [x for x in optree.tree_leaves(info.op(first, *args, **kwargs)) if isinstance(x, Tensor)]

    tensors = [leaves[at].detach().clone() for at in places]
    try:
        due = of([x.clone() for x in tensors])
    except Exception:  # a sample that torch itself refuses
        return None
    plain = all(x.layout is torch.strided and x.dtype != torch.complex32 for x in (*tensors, *due))
    return Call(info.formatted_name, of, tensors, due) if plain else None


def calls(dtype: torch.dtype, of_each: int | None) -> list[Call]:
    """So many samples of each operator, or all."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = []
    for info in op_db:
        random = info.name in DRAWS or "dropout" in info.name or "fractional" in info.name or "rrelu" in info.name
        if dtype not in info.dtypes or random or info.name.startswith(MANY_RESULTS_ARE_RIGHT):
            continue
        torch.manual_seed(0)
        drawn = info.sample_inputs_func(info, "cpu", dtype, False)
        samples = [sample for sample in drawn if not sample.kwargs.get("dropout_p")]
        count = of_each or len(samples)
        chosen = samples[:: max(1, len(samples) // max(1, count))][:count]
        found += [call for sample in chosen if (call := call_of(info, sample)) is not None]
    return found


def same(one: Tensor, two: Tensor, dtype: torch.dtype) -> bool:
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    rounds = one.is_floating_point() or one.is_complex()
    # Results of more bits may be computed from sixteen.
    relative, absolute = TOLERANCE.get(dtype, TOLERANCE.get(one.dtype, (1e-8, 1e-9))) if rounds else (0, 0)
    return torch.allclose(one, two, rtol=relative, atol=absolute, equal_nan=True)


def agree(call: Call, results: list[Tensor], dtype: torch.dtype, rounds_elsewhere: tuple[str, ...]) -> bool:
    """Whether results are those of the call; of sixteen bits, those of some operators are not compared."""
    if dtype in (torch.float16, torch.bfloat16) and call.name.startswith(rounds_elsewhere):
        return True
    return all(same(one, two, dtype) for one, two in zip(results, call.due, strict=True))
