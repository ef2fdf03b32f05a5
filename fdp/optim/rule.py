"""One class as a rule: its implementation for each parameter, its first state, and its step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from fdp import pytree
from fdp.errors import ArgumentError
from fdp.optim.argument_checks import (
    check_gradient,
    check_state,
    checked_hyperparameters,
    mismatch,
    names,
    optimizer_error,
    remake,
    ships_with_torch,
    trains,
    value_text,
)
from fdp.optim.first_state import NoFirstState, first_values
from fdp.optim.kept_elsewhere import changed_since, kept_elsewhere
from fdp.optim.tracing import compiling_flag, make_comparisons_traceable, number_of, numbers_of_tensors
from fdp.pytree import Tree
from fdp.state.containers import Container, bare, containers_of

_HALF = (torch.bfloat16, torch.float16)
_FUSED_DTYPES = (torch.float32, torch.float64, *_HALF)
_FUSED_DEVICES = ("cpu", "cuda")
_FUSED_ON_CPUS_ALONE = (optim.Adagrad,)
OWN_PAIR = "write it as a transformation for fdp.optim.from_transform, or as Optimizer(init, update) of two functions."
"""The remedy for a class that keeps what no tensor of a parameter's state holds."""

_CAPTURABLE_ONLY = (optim.ASGD, optim.RAdam, optim.Rprop)


@dataclass(frozen=True)
class Rule:
    """One class with its hyperparameters: its implementation for each parameter, and the two functions."""

    cls: type[optim.Optimizer]
    constants: dict[str, Any]  # what the constructor is called with
    defaults: dict[str, Any]  # what the constructor made of it
    held: dict[str, Tree]  # the hyperparameters that live in the state: their first values
    explicit: dict[str, bool]

    def refuse_inexact_routes(self) -> None:
        """Refuse flags that select code with other bits than the class's, or code that no graph can represent."""
        name, flags = self.cls.__name__, self.explicit
        if flags.get("fused") and (len(self.held) > 1 or self.dampened):
            why = "takes Python numbers, not tensors" if len(self.held) > 1 else "dampens every gradient or none"
            raise optimizer_error(f"the kernel of {name}(fused=True) {why}.", "leave fused out.")
        if flags.get("capturable") is False and issubclass(self.cls, _CAPTURABLE_ONLY):
            what = f"{name}(capturable=False) asks Python `if` about a tensor's value: no graph can hold that."
            raise optimizer_error(what, "leave capturable out.")
        if flags.get("foreach") and issubclass(self.cls, optim.Adafactor):
            what = f"{name}(foreach=True) takes lists of numbers: no graph can hold those."
            raise optimizer_error(what, "leave foreach out.")
        if flags.get("foreach") and "capturable" in self.defaults and not flags.get("capturable"):
            what = f"{name}(foreach=True) without capturable takes lists of numbers: no graph can hold those."
            raise optimizer_error(what, "leave foreach out, or add capturable=True.")

    @property
    def dampened(self) -> bool:
        """Whether this is SGD with a momentum that dampens every gradient but the first."""
        return self.has_momentum and bool(self.defaults["dampening"])

    @property
    def has_momentum(self) -> bool:
        return issubclass(self.cls, optim.SGD) and bool(self.defaults["momentum"])

    def miscomputed(self, p: Tensor) -> bool:
        """Whether torch's fused kernel is wrong: SGD on a CPU, whose half-precision momentum it loses."""
        return self.has_momentum and p.device.type == "cpu" and p.dtype in _HALF

    def route(self, p: Tensor) -> dict[str, bool]:
        """The `fused`, `foreach` and `capturable` of the parameter group that `p` belongs to."""
        devices = _FUSED_DEVICES[:1] if issubclass(self.cls, _FUSED_ON_CPUS_ALONE) else _FUSED_DEVICES
        fits = p.dtype in _FUSED_DTYPES and p.device.type in devices and not self.miscomputed(p)
        flags = {
            "fused": fits and len(self.held) == 1 and not self.dampened and not self.explicit,
            "foreach": False,
            # A class that is not torch's own may ask `if` about tensors too, unless it is capturable.
            "capturable": issubclass(self.cls, _CAPTURABLE_ONLY) or not ships_with_torch(self.cls),
            **self.explicit,
        }
        return {k: v for k, v in flags.items() if k in self.defaults}

    def build(self, params: list[Tensor]) -> optim.Optimizer:
        """An instance with one group for each dtype and device, as the fused and foreach kernels require."""
        groups: dict[Any, list[Tensor]] = {}
        # Adafactor takes its eps from the dtype of the first parameter of a group, and has no kernels for lists.
        together = issubclass(self.cls, optim.Adafactor)
        for i, p in enumerate(params):
            groups.setdefault(i if self.dampened else together or (p.device, p.dtype), []).append(p)
        return self.cls([{"params": ps, **self.route(ps[0])} for ps in groups.values()], **self.constants)

    def init(self, params: Tree) -> Tree:
        """Make the state that the class has before its first step."""
        containers = containers_of(*pytree.flatten(params, none_is_leaf=True))
        leaves, spec = pytree.flatten(bare(params), none_is_leaf=True)
        named = zip(leaves, names(params, "params"), containers, strict=True)
        states = [self._first_state(p, name, container) if trains(p) else {} for p, name, container in named]
        hyper = {name: pytree.map_leaves(_tensor, value) for name, value in self.held.items()}
        return {**hyper, "state": spec.unflatten(states)}

    @torch.no_grad()
    def _first_state(self, p: Tensor, name: str, container: Container) -> dict[str, Any]:
        """Let the class make its own state lazily, as at its first step, without taking the step.

        What belongs to a parameter that is each rank's own is so, too.
        """
        p = p.detach().clone()
        if self.explicit.get("fused") and self.miscomputed(p):
            what = f"the fused SGD kernel loses the momentum of {name}, {value_text(p)}: its results are noise."
            raise optimizer_error(what, "leave fused out.")
        state = self._made_by_itself(p, name) if has_first_state(self.cls) else self._made_in_a_step(p, name)
        if self.has_momentum:
            # torch has no buffer before the first step and starts it with the gradient. Negative zero is what
            # can be added to any number, a negative zero too, without changing a bit.
            state["momentum_buffer"] = torch.full_like(p, complex(-0.0, -0.0) if p.is_complex() else -0.0)
        if self.dampened:
            # The first gradient is not dampened, later ones are: a factor of the dampening, 0 and then 1.
            state["started"] = torch.zeros((), dtype=torch.float64, device="cpu")
        for key, value in state.items():
            if not isinstance(value, Tensor):
                what = f"{self.cls.__name__} keeps {key!r} of {name} as {value_text(value)}, not a tensor."
                raise optimizer_error(what, "use a class that keeps its state in tensors.")
        return {key: container.beside(value) for key, value in state.items()}

    def _made_by_itself(self, p: Tensor, name: str) -> dict[str, Any]:
        try:
            optimizer: Any = self.build([p])
            p.grad = torch.zeros_like(p)
            lists = len(inspect.signature(optimizer._init_group).parameters) - 1
            optimizer._init_group(optimizer.param_groups[0], *([] for _ in range(lists)))
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            what = f"{self.cls.__name__} refuses the parameter {name}, {value_text(p)}: {error}."
            raise optimizer_error(what, "give each optimizer the part of the parameters that it supports.") from error
        return dict(optimizer.state[p])

    def _made_in_a_step(self, p: Tensor, name: str) -> dict[str, Any]:
        try:
            return first_values(self.build, self._take, p)
        except ArgumentError:
            raise
        except NoFirstState as error:
            what = f"{self.cls.__name__} has no exact pure form: {error}. (Seen with {name}, {value_text(p)}.)"
            raise optimizer_error(what, OWN_PAIR) from error
        except Exception as error:  # whatever a class that is not torch's may raise
            why = f"{type(error).__name__}: {error}"
            what = f"a first step of {self.cls.__name__} raises with {name}, {value_text(p)}: {why}."
            raise optimizer_error(what, OWN_PAIR) from error

    def update(self, grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """Take one step; every argument stays as it is."""
        leaves, spec = pytree.flatten(params, none_is_leaf=True)
        hyper = checked_hyperparameters(self.cls, self.held, opt_state, self._kernel_device(leaves))
        grad_leaves, grad_spec = pytree.flatten(grads, none_is_leaf=True)
        if grad_spec != spec:
            raise mismatch(grads, params)
        try:
            states: list[Any] = spec.flatten_up_to(opt_state["state"])
        except ValueError as error:
            what = f"opt_state['state'] does not mirror params: {error}."
            raise optimizer_error(what, remake(self.cls)) from error
        live = [i for i, g in enumerate(grad_leaves) if g is not None]
        if not live:
            return params, opt_state
        for i in live:
            check_gradient(i, params, leaves[i], grad_leaves[i])
            fused_kernel = self.route(leaves[i]).get("fused", False)
            check_state(self.cls, i, params, leaves[i], states[i], self.dampened, fused_kernel)

        copies = [leaves[i].detach().clone() for i in live]
        with torch.no_grad(), numbers_of_tensors():
            optimizer = self.build(copies)
            fused = {p for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
            for p, i in zip(copies, live, strict=True):
                g, state = grad_leaves[i].detach(), {k: v.clone() for k, v in states[i].items()}
                state.pop("started", None)
                if p in fused:
                    g, state = _in_layout_of(p, g), {k: _in_layout_of(p, v) for k, v in state.items()}
                # The foreach code of SGD and others works on the gradients in place.
                p.grad, optimizer.state[p] = g.clone() if self.explicit.get("foreach") else g, state
            self._set(optimizer, hyper, [states[i].get("started") for i in live])
            self._step(optimizer, copies, lambda n: names(params, "opt_state['state']")[live[n]])
            for p, i in zip(copies, live, strict=True):
                late = {"started": torch.ones_like(states[i]["started"])} if self.dampened else {}
                leaves[i], states[i] = p, {**optimizer.state[p], **late}
        return spec.unflatten(leaves), {**opt_state, "state": spec.unflatten(states)}

    def _kernel_device(self, leaves: list[Any]) -> torch.device | None:
        """The device of all parameters, if fused kernels update all of them, which read the learning rate there."""
        trained = [p for p in leaves if isinstance(p, Tensor) and trains(p)]
        devices = {p.device for p in trained}
        fused = len(devices) == 1 and all(self.route(p).get("fused") for p in trained)
        return devices.pop() if fused else None

    def _set(self, optimizer: optim.Optimizer, hyper: dict[str, Tree], started: list[Any]) -> None:
        """Put hyperparameters into the groups: the tensor lr for fused kernels, numbers for other code."""
        numbers: dict[str, Any] = {}
        for n, group in enumerate(optimizer.param_groups):
            if group.get("fused"):
                # lr alone. The kernel reads it as a double from the CPU, and as a float from a device.
                group.update({k: v if v.device.type == "cpu" else v.float() for k, v in hyper.items()})
                continue
            if not numbers:  # once for all groups: each item() is an operation of the graph
                numbers = {k: pytree.map_leaves(number_of, v, self.held[k]) for k, v in hyper.items()}
            group.update(numbers)
            if self.dampened:
                group["dampening"] = started[n].item() * group["dampening"]  # a group for each parameter

    def _take(self, optimizer: optim.Optimizer) -> None:
        """`step()` without the profiler's wrapper, whose marks would be operations of the graph.

        What it keeps must be in the state of parameters: the instance ends with the update.
        """
        step: Any = type(optimizer).step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        before = None if ships_with_torch(self.cls) else kept_elsewhere(optimizer)
        with compiling_flag(any(group.get("capturable") for group in optimizer.param_groups)):
            step(optimizer)
        if changed := [] if before is None else changed_since(before, optimizer):
            what = f"a step of {self.cls.__name__} changes {', '.join(changed)}, which is no state of a parameter."
            raise optimizer_error(what, OWN_PAIR)

    def _step(self, optimizer: optim.Optimizer, params: list[Tensor], name: Callable[[int], str]) -> None:
        """A step with state that came in."""
        given = [set(optimizer.state[p]) for p in params]
        missing: KeyError | None = None
        if issubclass(self.cls, optim.Adafactor):
            make_comparisons_traceable()
        try:
            self._take(optimizer)
        except KeyError as error:
            if all(error.args[0] in keys for keys in given):
                raise
            missing = error
        for n, p in enumerate(params):
            # A class makes state that it does not find, silently and from zero: not the state that came in.
            if set(optimizer.state[p]) != given[n] or (missing and missing.args[0] not in given[n]):
                wants = f"asks for {missing}" if missing else f"keeps {sorted(optimizer.state[p])}"
                what = f"{name(n)} has the entries {sorted(given[n])}, but {self.cls.__name__} {wants}."
                raise optimizer_error(what, remake(self.cls)) from missing


def has_first_state(cls: type[optim.Optimizer]) -> bool:
    """Whether the state of a class before its first step can be made by itself.

    (This relies on `_init_group(group, *lists)` of the classes of torch: it makes what state is missing for parameters
    that have a gradient, and appends what a step needs to the lists.)
    """
    return hasattr(cls, "_init_group")


def _in_layout_of(p: Tensor, t: Tensor) -> Tensor:
    """`t` itself if its strides are those of `p`, else a copy that has them."""
    same = t.shape != p.shape or t.stride() == p.stride()  # a step count has another shape
    return t if same else torch.empty_like(p, dtype=t.dtype).copy_(t)


def _tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device="cpu")
