"""A `torch.optim` class by hand, and by `from_torch`, on the same parameters and gradients."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import optree
import torch
from bits import same_leaves
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_optimizers import optim_db

from fdp.optim import Optimizer

STEPS, NEW_LR_AT, NEW_LR = 5, 3, 0.037
REFUSED = {torch.optim.LBFGS, torch.optim.SparseAdam}
CAPTURABLE_ONLY = {torch.optim.ASGD, torch.optim.RAdam, torch.optim.Rprop}


def numbers(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    return optree.tree_map(lambda v: float(v) if isinstance(v, Tensor) else v, hyperparameters)


def by_hand(
    cls: type, params: dict[str, Tensor], data: list[dict[str, Tensor]], hyperparameters: dict[str, Any]
) -> tuple[Any, Any]:
    """The class used as in any training script: a Python float as lr, changed on the way."""
    params = {name: p.detach().clone() for name, p in params.items()}
    optimizer = cls(list(params.values()), **hyperparameters)
    # On a CPU the class runs its capturable code under torch.compile only.
    capturable = hyperparameters.get("capturable")
    compiling = torch.compiler._compile_session_context if capturable else contextlib.nullcontext
    for step, grads in enumerate(data):
        if step == NEW_LR_AT:
            optimizer.param_groups[0]["lr"] = NEW_LR
        for name, p in params.items():
            p.grad = grads[name].clone()
        with compiling():
            optimizer.step()
    return params, {name: dict(optimizer.state[p]) for name, p in params.items()}


def trace(update: Any, *args: Any) -> torch.fx.GraphModule:
    with torch.compiler._compile_session_context():
        return make_fx(update, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


def by_fdp(optimizer: Optimizer, params: Any, data: list[Any], traced: bool) -> tuple[Any, Any]:
    """The same steps through the pure pair; every step checks that its inputs stay as they are."""
    opt_state, update = optimizer.init(params), optimizer.update
    if traced:
        update = trace(update, data[0], opt_state, params)
    for step, grads in enumerate(data):
        if step == NEW_LR_AT:
            opt_state["lr"] = torch.tensor(NEW_LR, dtype=torch.float64)
        inputs = (grads, opt_state, params)
        before = optree.tree_map(torch.clone, inputs)
        result = update(*inputs)
        assert same_leaves(inputs, before)
        params, opt_state = result
    for state in opt_state["state"].values():
        state.pop("started", None)
    return params, opt_state["state"]


def sample(dtype: torch.dtype, ndim_2_only: bool = False) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    params = {"w": torch.randn(3, 5, dtype=dtype), "v": torch.randn(16, 4, dtype=dtype)}
    if not ndim_2_only:
        params |= {"scalar": torch.randn((), dtype=dtype), "b": torch.randn(7, dtype=dtype)}
    return params, [{name: torch.randn_like(p) for name, p in params.items()} for _ in range(STEPS)]


def equivalent(cls: type, given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The keyword arguments with which the class itself takes the way that from_torch takes."""
    accepted, result = inspect.signature(cls).parameters, numbers(given)
    if any(result.get(k) is not None for k in ("fused", "foreach", "capturable")):
        return {"foreach": False, **result} if "foreach" in accepted else result
    tensors = any(isinstance(leaf, Tensor) for k in given if k != "lr" for leaf in optree.tree_leaves(given[k]))
    sgd_momentum = cls is torch.optim.SGD and result.get("momentum")
    late = sgd_momentum and result.get("dampening")
    broken = sgd_momentum and dtype in (torch.bfloat16, torch.float16)
    if "fused" in accepted and dtype.is_floating_point and not (tensors or late or broken):
        return {**result, "fused": True}
    if cls in CAPTURABLE_ONLY:
        result["capturable"] = True
    return {**result, "foreach": False} if "foreach" in accepted else result


CLASSES = [info.optim_cls for info in optim_db if info.optim_cls not in REFUSED]


def tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
