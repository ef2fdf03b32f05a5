"""An `nn.Module` as a pure function of its parameters and buffers."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fdp.errors import ArgumentError, build_message
from fdp.nn.batch_norm import synchronised_forward
from fdp.nn.meta_copy import MetaCopy
from fdp.pytorch.dynamo import uncompiled_module
from fdp.pytorch.recomputation import Recompute, recomputed_by, unselected
from fdp.pytorch.registries import has_gradient_hooks, tensor_registries
from fdp.tracebacks import hiding_frames

_TABLES, _LISTS = (dict, collections.OrderedDict, collections.defaultdict, set), (list, collections.deque)
_REFUSED = {
    "DataParallel": "which splits batches itself",
    "DistributedDataParallel": "which averages gradients through hooks that a pure function does not call",
    "FullyShardedDataParallel": "which holds a part of each parameter",
    "FSDPModule": "which holds a part of each parameter",
    "ScriptModule": "whose compiled code cannot be given other parameters",
}

_READS = "_fdp_module"
"""The attribute of an `apply` that holds what it keeps of the module."""

Apply = Callable[..., tuple[Any, dict[str, Tensor]]]


@hiding_frames
def from_module(module: nn.Module) -> tuple[Apply, dict[str, Tensor], dict[str, Tensor]]:
    """Take a module apart into a pure function, the parameters that train, and everything else it holds.

    `apply` runs the module with the tensors that it is given; the module's own tensors and attributes stay as
    they are, and so do the arguments: BatchNorm's new statistics are in `new_buffers`. (But `Embedding(max_norm=...)`,
    whose operator shortens rows of its weight in place, does so to the weight that it is given; a step refuses that,
    unless the weight is donated.) It reads
    `module.training` and other attributes at every call (in a step: when it is traced), so `module.eval()` works
    as usual. It does not keep the module's own tensors in memory: they go when you let go of the module, as in
    `from_module(Model())` or with `del module`. (Not so for a module that refers to itself from a lambda or a bound
    hook, or has parametrizations, which do so: that one is kept.)
    Modules wrapped by `torch.compile` run uncompiled inside of it, since the step around them is what gets
    compiled. Threads must not share one `apply`.

    Args:
        module: any `nn.Module`, also with tied parameters or buffers (which appear once, under their first
            name) and with parametrizations.

    Returns:
        `(apply, params, buffers)`.
        `apply(params, buffers, *args, **kwargs) -> (output, new_buffers)`.
        `params`: name to a detached copy of each parameter that requires a gradient; so does the copy.
        `buffers`: name to a detached copy of each buffer, and of each frozen parameter
        (`requires_grad=False`). In `new_buffers` a buffer is a new tensor, and a frozen parameter is the one
        that went in.

    Raises:
        ArgumentError: not a module; a parameter that does not exist yet, or has hooks; a data-parallel wrapper; from
            `apply`: other names than the module's, where it would otherwise use tensors of its own; a module that
            was given other parts after it was taken apart.

    Example:
        >>> apply, params, buffers = from_module(torch.nn.BatchNorm1d(2))
        >>> sorted(params), sorted(buffers)
        (['bias', 'weight'], ['num_batches_tracked', 'running_mean', 'running_var'])
        >>> output, new_buffers = apply(params, buffers, torch.ones(4, 2))
        >>> new_buffers["running_mean"], buffers["running_mean"]
        (tensor([0.1000, 0.1000]), tensor([0., 0.]))

    References:
        `torch.func.functional_call`, which this builds on.
    """
    module = _plain(module)
    kind, meta_copy = type(module).__name__, MetaCopy(module)
    own, own_buffers = dict(module.named_parameters()), dict(module.named_buffers())
    names, buffer_names = own.keys() | own_buffers.keys(), frozenset(own_buffers)
    params = {name: p.detach().clone().requires_grad_() for name, p in own.items() if p.requires_grad}
    buffers = {name: p.detach().clone() for name, p in own.items() if not p.requires_grad}
    buffers.update({name: b.detach().clone() for name, b in own_buffers.items()})
    del module, own, own_buffers  # of which `apply` keeps nothing

    @hiding_frames
    def apply(
        params: dict[str, Tensor], buffers: dict[str, Tensor], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        _refuse_other_names(kind, names, params, buffers)
        # A buffer is copied whether or not the module changes it: batch_norm changes its statistics without
        # telling their version counters. Frozen parameters can be large, and no operation does that to them.
        tensors = {**params, **{name: b.clone() if name in buffer_names else b for name, b in buffers.items()}}
        stand_in = meta_copy.follow()
        fixed = {name: tensor for name, tensor in tensors.items() if name not in buffer_names}
        with _isolated(stand_in), recomputed_by(_again(stand_in, fixed, buffer_names)):
            output = torch.func.functional_call(stand_in, tensors, args, kwargs, tie_weights=True)
        # functional_call writes what the module assigned (`self.buffer = value`) back into `tensors`.
        new = {name: _as_state(tensors[name]) if name in buffer_names else b for name, b in buffers.items()}
        return output, new

    vars(apply)[_READS] = meta_copy
    return apply, params, buffers


def module_read_by(function: object) -> MetaCopy | None:
    """The module whose attributes a function reads at each call: of an `apply`; None for another function."""
    found: MetaCopy | None = vars(function).get(_READS)
    return found


def _as_state(buffer: Tensor) -> Tensor:
    # A buffer computed from parameters would carry this step's graph into the next one.
    return buffer.detach() if isinstance(buffer, Tensor) and buffer.requires_grad else buffer


def _plain(module: object) -> nn.Module:
    """The module without the wrapper of torch.compile, if it can be a pure function."""
    if not isinstance(module, nn.Module):
        kind = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        remedy = "pass an instance, as in from_module(Model())."
        raise ArgumentError(build_message(f"from_module takes an nn.Module, not {kind}.", remedy=remedy))
    while "OptimizedModule" in _torch_kinds(module):
        module = uncompiled_module(module)
    for name, part in module.named_modules():
        wrappers = sorted(_torch_kinds(part) & _REFUSED.keys())
        if wrappers:
            where = f"the part {name!r} of {type(module).__name__}" if name else "the module"
            what = f"from_module cannot take {where}, a {wrappers[0]}, {_REFUSED[wrappers[0]]}."
            inner = "module.module" if hasattr(part, "module") else "the module that it was made from"
            raise ArgumentError(build_message(what, remedy=f"pass {inner}."))
    lazy = [name for name, t in [*module.named_parameters(), *module.named_buffers()] if is_lazy(t)]
    if lazy:
        what = f"{type(module).__name__} has tensors whose shape is not known yet:"
        raise ArgumentError(build_message(what, lazy, "run one forward first, then call from_module."))
    hooked = [name for name, p in module.named_parameters() if has_gradient_hooks(p)]
    if hooked:
        what = f"{type(module).__name__} has parameters with hooks, which copies do not have:"
        raise ArgumentError(build_message(what, hooked, "change gradients in the step, between grad and update."))
    result: nn.Module = module
    return result


def _torch_kinds(module: object) -> set[str]:
    """Which of torch's own classes it is an instance of; by name, because importing some takes seconds."""
    return {c.__name__ for c in type(module).__mro__ if c.__module__.startswith("torch.")}


def _refuse_other_names(
    kind: str, names: AbstractSet[str], params: dict[str, Tensor], buffers: dict[str, Tensor]
) -> None:
    """Refuse missing or unknown names: for a missing tensor the module's own would be used silently, and never
    train."""
    given, both = params.keys() | buffers.keys(), params.keys() & buffers.keys()
    if given == names and not both:
        return
    offenders = [f"{name!r} is missing" for name in sorted(names - given)]
    offenders += [f"{name!r} is not a name of the module" for name in sorted(given - names)]
    offenders += [f"{name!r} is in both" for name in sorted(both)]
    remedy = "pass all names that from_module gave; a name may move from params to buffers, or back."
    raise ArgumentError(build_message(f"params and buffers do not fit {kind}:", offenders, remedy))


def _again(stand_in: nn.Module, params: dict[str, Tensor], buffer_names: AbstractSet[str]) -> Recompute:
    """Recompute checkpointed parts of the module with the tensors that it was called with.

    By then the call is over, and the module has others again.
    """

    def again(function: Callable[..., Any], preserve: bool) -> tuple[Callable[..., Any], bool]:
        # As they are at this point of the forward pass, which may have changed them, and may yet.
        with unselected():
            buffers = {name: b.clone() for name, b in stand_in.named_buffers() if name in buffer_names}

        def recompute(*args: Any, **kwargs: Any) -> Any:
            # What it makes of buffers has been returned by the forward pass already.
            with unselected():
                tensors = {**params, **{name: b.clone() for name, b in buffers.items()}}
            given = {f"module.{name}": tensor for name, tensor in tensors.items()}
            with _isolated(stand_in), recomputed_by(again):
                return torch.func.functional_call(_Calls(stand_in, function), given, args, kwargs, tie_weights=True)

        return recompute, preserve

    return again


class _Calls(nn.Module):
    """Calls a function that uses a module."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.function = module, (function,)  # not as a part, should it be one of the module's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function[0](*args, **kwargs)


def _converted(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Convert a part of a module for the rest of a call, as `part.to(dtype)` inside of a forward does.

    torch would change the tensors that it finds in place, which fake ones do not allow; these are replaced. So the
    conversion is part of the function, and gradients go back through it.
    (This relies on `to`, `float` and the like all calling `_apply`.)
    """
    if recurse:
        for child in module.children():
            child._apply(fn)
    for registry in tensor_registries(module):
        for name, tensor in registry.items():
            if tensor is not None:
                registry[name] = fn(tensor)
    return module


@contextlib.contextmanager
def _isolated(module: nn.Module) -> Iterator[None]:
    """Undo changes that a call makes to the module's attributes, and run compiled parts uncompiled.

    RNNs cache their weights in a list, `weight_norm` sets the attribute that it computes, modules register
    buffers: inside a trace all of these would leave fake tensors behind. The models of Hugging Face register hooks at
    their first call, and note in an attribute that they have.
    """
    parts = list(module.modules())
    before = [(vars(m), dict(vars(m)), [(held, list(_items(held))) for held in _containers(m)]) for m in parts]
    for m in parts:
        # Private to torch: what `Module.compile` made of the module's `__call__`.
        if vars(m).get("_compiled_call_impl") is not None:
            vars(m)["_compiled_call_impl"] = None
        if "OptimizedModule" in _torch_kinds(m):
            vars(m)["forward"] = uncompiled_module(m)
        if isinstance(m, nn.SyncBatchNorm) and type(m).forward is nn.SyncBatchNorm.forward:
            vars(m)["forward"] = functools.partial(synchronised_forward, m)
        if type(m)._apply is nn.Module._apply:
            vars(m)["_apply"] = functools.partial(_converted, m)
    try:
        yield
    finally:
        for attributes, saved, containers in before:
            attributes.clear()
            attributes.update(saved)
            for now, then in containers:
                now.clear()
                (now.extend if isinstance(now, _LISTS) else now.update)(then)


def _containers(module: nn.Module) -> list[Any]:
    """The dicts in which a module holds its sub-modules, hooks and tensors."""
    return [value for value in vars(module).values() if type(value) in (*_TABLES, *_LISTS)]


def _items(container: object) -> Any:
    return container.items() if isinstance(container, dict) else container
