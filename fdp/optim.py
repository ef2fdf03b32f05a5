"""Any `torch.optim` class as a pure pair of functions, `init` and `update`.

`update` builds an instance of the class on copies of the parameters, hands it the gradients and the state
that came in as arguments, lets it take one step, and returns what it left behind. So the arithmetic is
torch's own, and what a trace records is the kernels that the class itself launches. There are three ways
through a class; the first that fits is taken, unless `fused=`, `foreach=` or `capturable=` says otherwise:

- fused: one kernel for all parameters of a dtype and device (Adam, AdamW, SGD, Adagrad).
- plain: the single-tensor code that the class runs by default on a CPU. Its scalars come from
  `Tensor.item()`, which a trace records as a number that each replay reads anew, so they are Python floats in
  both worlds.
- capturable: for classes whose plain code asks Python `if` about a tensor's value (ASGD, RAdam, Rprop).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor, optim

from fdp.errors import ArgumentError, build_message
from fdp.pytree import Tree

_HALF = (torch.bfloat16, torch.float16)
_FUSED_DTYPES = (torch.float32, torch.float64, *_HALF)
_FUSED_DEVICES = ("cpu", "cuda")
_ROUTES = ("fused", "foreach", "capturable")
_CAPTURABLE_ONLY = (optim.ASGD, optim.RAdam, optim.Rprop)
_REFUSED: dict[type, tuple[str, str]] = {
    optim.LBFGS: (
        "its step calls a closure as often as the values of the loss ask for, so one step is not one graph",
        "use a first-order class such as torch.optim.AdamW, or run LBFGS outside of the step.",
    ),
    optim.SparseAdam: (
        "it takes sparse gradients only, and gradients of a traced step are dense",
        "use torch.optim.Adam, and embeddings with sparse=False.",
    ),
    optim.Adafactor: (
        "its step size is chosen by Python comparisons of tensor values, which a graph cannot hold",
        "use torch.optim.AdamW, or write init and update as two functions and make an Optimizer of them.",
    ),
}


@dataclass(frozen=True)
class Optimizer:
    """A pair of pure functions that hold no state of their own.

    Args:
        init: `init(params) -> opt_state`.
        update: `update(grads, opt_state, params) -> (params, opt_state)`.
        summary: what `print` shows.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    summary: str = field(default="Optimizer(init, update)", compare=False)

    def __repr__(self) -> str:
        return self.summary


def from_torch(cls: type[optim.Optimizer], **hyperparameters: Any) -> Optimizer:
    """Make a pure `(init, update)` pair of a `torch.optim` class, with the same bits as the class itself.

    `lr` lives in the optimizer's state as a 0-dim float64 tensor on the CPU, `opt_state["lr"]`, and so does
    every float hyperparameter that is given as a 0-dim tensor, `weight_decay=torch.tensor(0.1)` or
    `betas=(torch.tensor(0.9), torch.tensor(0.999))`: a schedule changes them there without a retrace.
    Hyperparameters given as Python numbers are constants of the optimizer. A tensor other than `lr` must be
    positive, now and later (the classes leave out a term whose factor is zero), and selects the plain code
    (fused kernels take numbers). ASGD and Rprop also read `lr` in `init`, into `eta` and `step_size`; Rprop
    never again.

    The result is bit for bit that of the class with the same `fused`, `foreach` and `capturable`. Where the
    fused kernel is chosen for you, that is `cls(..., fused=True)`; pass `fused=False` for the bits of the
    class's default on a CPU. Gradients are copied to the layout of their parameter before a fused kernel
    reads them, because the CPU kernels assume equal strides without a check.

    Args:
        cls: a class, not an instance. LBFGS, SparseAdam and Adafactor are refused.
        hyperparameters: the keyword arguments of `cls` other than the parameters.

    Returns:
        An `Optimizer`. `opt_state` is `{"lr": tensor, <tensor hyperparameters>, "state": tree}`; `tree`
        mirrors the parameters with a dict of tensors in place of each. A parameter whose gradient is `None`
        is returned as it is, and so is its state. New parameters are detached. `update` changes none of its
        arguments.

    Raises:
        ArgumentError: the class has no exact route, or refuses its hyperparameters; later, from `init` and
            `update`: trees that do not match, named by key path.

    Example:
        >>> optimizer = from_torch(torch.optim.SGD, lr=0.5)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> opt_state = optimizer.init(params)
        >>> params, opt_state = optimizer.update({"w": torch.tensor([1.0, 1.0])}, opt_state, params)
        >>> params["w"]
        tensor([0.5000, 1.5000])
        >>> opt_state["lr"] = opt_state["lr"] * 0.1    # a schedule

    References:
        DeepMind et al., The DeepMind JAX Ecosystem, 2020 (Optax: optimizers as pairs of pure functions).
    """
    if not (isinstance(cls, type) and issubclass(cls, optim.Optimizer)):
        hint = "pass the class itself, as in from_torch(torch.optim.AdamW, lr=1e-3)."
        raise _refusal(f"from_torch takes a torch.optim class, not {_describe(cls)}.", hint)
    for refused, (reason, remedy) in _REFUSED.items():
        if issubclass(cls, refused):
            raise _refusal(f"{cls.__name__} has no exact pure form: {reason}.", remedy)
    if hyperparameters.get("differentiable"):
        what = f"{cls.__name__}(differentiable=True) differentiates its step, but update is without autograd."
        raise _refusal(what, "leave differentiable out, or write the update in torch operations.")
    if not hasattr(cls, "_init_group"):
        what = f"{cls.__name__} has no _init_group, so its state before the first step cannot be made exactly."
        raise _refusal(what, "write init and update as two functions and make an Optimizer of them.")

    given = {name: _floats(name, value) for name, value in hyperparameters.items() if _holds_tensor(value)}
    constants = {**hyperparameters, **given}
    try:
        # 2-D, because Muon refuses anything else; every other class takes any shape.
        defaults = cls([torch.zeros(1, 1)], **constants).defaults
    except (TypeError, ValueError, RuntimeError) as error:
        accepted = ", ".join(list(inspect.signature(cls.__init__).parameters)[2:])
        what = f"{cls.__name__} refuses its hyperparameters: {error}."
        raise _refusal(what, f"it takes {accepted}.") from error
    held = {name: value for name, value in {"lr": defaults.get("lr"), **given}.items() if value is not None}
    explicit = {k: hyperparameters[k] for k in _ROUTES if hyperparameters.get(k) is not None}
    rule = _Rule(cls, constants, defaults, held, explicit)
    rule.refuse_inexact_routes()
    fixed = ", ".join(f"{k}={v!r}" for k, v in hyperparameters.items() if k not in held) or "none"

    # Functions, not the bound methods: make_fx counts the arguments of a bound method wrongly.
    def init(params: Tree) -> Tree:
        return rule.init(params)

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        return rule.update(grads, opt_state, params)

    summary = f"Optimizer({cls.__name__}, in the state: {', '.join(held)}, constant: {fixed})"
    return Optimizer(init, update, summary)


@dataclass(frozen=True)
class _Rule:
    """One class with its hyperparameters: the way through it for each parameter, and the two functions."""

    cls: type[optim.Optimizer]
    constants: dict[str, Any]  # what the constructor is called with
    defaults: dict[str, Any]  # what the constructor made of it
    held: dict[str, Tree]  # the hyperparameters that live in the state: their first values
    explicit: dict[str, bool]

    def refuse_inexact_routes(self) -> None:
        name, flags = self.cls.__name__, self.explicit
        if flags.get("fused") and (len(self.held) > 1 or self.dampened):
            why = "takes Python numbers, not tensors" if len(self.held) > 1 else "dampens every gradient or none"
            raise _refusal(f"the kernel of {name}(fused=True) {why}.", "leave fused out.")
        if flags.get("capturable") is False and issubclass(self.cls, _CAPTURABLE_ONLY):
            what = f"{name}(capturable=False) asks Python `if` about a tensor's value: no graph can hold that."
            raise _refusal(what, "leave capturable out.")
        if flags.get("foreach") and "capturable" in self.defaults and not flags.get("capturable"):
            what = f"{name}(foreach=True) without capturable takes lists of numbers: no graph can hold those."
            raise _refusal(what, "leave foreach out, or add capturable=True.")

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
        fits = p.dtype in _FUSED_DTYPES and p.device.type in _FUSED_DEVICES and not self.miscomputed(p)
        flags = {
            "fused": fits and len(self.held) == 1 and not self.dampened and not self.explicit,
            "foreach": False,
            # A class that is not torch's own may ask `if` about tensors too, unless it is capturable.
            "capturable": issubclass(self.cls, _CAPTURABLE_ONLY) or not _ships_with_torch(self.cls),
            **self.explicit,
        }
        return {k: v for k, v in flags.items() if k in self.defaults}

    def build(self, params: list[Tensor]) -> optim.Optimizer:
        """An instance with one group for each dtype and device, as the fused and foreach kernels require."""
        groups: dict[Any, list[Tensor]] = {}
        for i, p in enumerate(params):
            groups.setdefault(i if self.dampened else (p.device, p.dtype), []).append(p)
        return self.cls([{"params": ps, **self.route(ps[0])} for ps in groups.values()], **self.constants)

    def init(self, params: Tree) -> Tree:
        """Make the state that the class has before its first step."""
        leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
        named = zip(leaves, _names(params, "params"), strict=True)
        states = [self._first_state(p, name) if _trains(p) else {} for p, name in named]
        hyper = {name: optree.tree_map(_tensor, value) for name, value in self.held.items()}
        return {**hyper, "state": spec.unflatten(states)}

    @torch.no_grad()
    def _first_state(self, p: Tensor, name: str) -> dict[str, Tensor]:
        """Let the class make its own state lazily, as at its first step, without taking the step."""
        p = p.detach().clone()
        if self.explicit.get("fused") and self.miscomputed(p):
            what = f"the fused SGD kernel loses the momentum of {name}, {_describe(p)}: its results are noise."
            raise _refusal(what, "leave fused out.")
        try:
            optimizer: Any = self.build([p])
            p.grad = torch.zeros_like(p)
            lists = len(inspect.signature(optimizer._init_group).parameters) - 1
            optimizer._init_group(optimizer.param_groups[0], *([] for _ in range(lists)))
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            what = f"{self.cls.__name__} refuses the parameter {name}, {_describe(p)}: {error}."
            raise _refusal(what, "give each optimizer the part of the parameters that it supports.") from error
        state = dict(optimizer.state[p])
        if self.has_momentum:
            # torch has no buffer before the first step and starts it with the gradient. Negative zero is what
            # can be added to any number, a negative zero too, without changing a bit.
            state["momentum_buffer"] = torch.full_like(p, complex(-0.0, -0.0) if p.is_complex() else -0.0)
        if self.dampened:
            # The first gradient is not dampened, later ones are: a factor of the dampening, 0 and then 1.
            state["started"] = torch.zeros((), dtype=torch.float64)
        for key, value in state.items():
            if not isinstance(value, Tensor):
                what = f"{self.cls.__name__} keeps {key!r} of {name} as {_describe(value)}, not a tensor."
                raise _refusal(what, "use a class that keeps its state in tensors.")
        return state

    def update(self, grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """Take one step; every argument stays as it is."""
        hyper = self._hyperparameters(opt_state)
        leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
        grad_leaves, grad_spec = optree.tree_flatten(grads, none_is_leaf=True)
        if grad_spec != spec:
            raise _mismatch(grads, params)
        try:
            states: list[Any] = spec.flatten_up_to(opt_state["state"])
        except ValueError as error:
            what = f"opt_state['state'] does not mirror params: {error}."
            raise _refusal(what, self._remake) from error
        live = [i for i, g in enumerate(grad_leaves) if g is not None]
        if not live:
            return params, opt_state
        for i in live:
            self._check(i, params, leaves[i], grad_leaves[i], states[i])

        copies = [leaves[i].detach().clone() for i in live]
        with torch.no_grad(), _numbers_of_tensors():
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
            self._step(optimizer, copies, lambda n: _names(params, "opt_state['state']")[live[n]])
            for p, i in zip(copies, live, strict=True):
                late = {"started": torch.ones_like(states[i]["started"])} if self.dampened else {}
                leaves[i], states[i] = p, {**optimizer.state[p], **late}
        return spec.unflatten(leaves), {**opt_state, "state": spec.unflatten(states)}

    def _set(self, optimizer: optim.Optimizer, hyper: dict[str, Tree], started: list[Any]) -> None:
        """Put hyperparameters into the groups: the tensor lr for fused kernels, numbers for other code."""
        numbers: dict[str, Any] = {}
        for n, group in enumerate(optimizer.param_groups):
            if group.get("fused"):
                group.update(hyper)  # lr alone; the kernel reads it as a double
                continue
            if not numbers:  # once for all groups: each item() is an operation of the graph
                numbers = {k: optree.tree_map(_number, v, self.held[k]) for k, v in hyper.items()}
            group.update(numbers)
            if self.dampened:
                group["dampening"] = started[n].item() * group["dampening"]  # a group for each parameter

    def _step(self, optimizer: optim.Optimizer, params: list[Tensor], name: Callable[[int], str]) -> None:
        """`step()` without the profiler's wrapper, whose marks would be operations of the graph."""
        step: Any = type(optimizer).step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        given = [set(optimizer.state[p]) for p in params]
        missing: KeyError | None = None
        with _compiling(any(group.get("capturable") for group in optimizer.param_groups)):
            try:
                step(optimizer)
            except KeyError as error:
                if all(error.args[0] in keys for keys in given):
                    raise
                missing = error
        for n, p in enumerate(params):
            # A class makes state that it does not find, silently and from zero: not the state that came in.
            if set(optimizer.state[p]) != given[n] or (missing and missing.args[0] not in given[n]):
                wants = f"asks for {missing}" if missing else f"keeps {sorted(optimizer.state[p])}"
                what = f"{name(n)} has the entries {sorted(given[n])}, but {self.cls.__name__} {wants}."
                raise _refusal(what, self._remake) from missing

    @property
    def _remake(self) -> str:
        return f"make opt_state with init(params) of this {self.cls.__name__}, and keep its structure."

    def _hyperparameters(self, opt_state: Tree) -> dict[str, Tree]:
        expected = {*self.held, "state"}
        if not isinstance(opt_state, dict) or set(opt_state) != expected:
            found = sorted(map(str, opt_state)) if isinstance(opt_state, dict) else _describe(opt_state)
            raise _refusal(f"opt_state must have the keys {sorted(expected)}, but is {found}.", self._remake)
        for name, first in self.held.items():
            root, value = f"opt_state[{name!r}]", opt_state[name]
            if optree.tree_structure(first) != optree.tree_structure(value):
                what = f"{root} no longer has the structure of {first!r}, which it was made from."
                raise _refusal(what, self._remake)
            for where, t in zip(_names(value, root), optree.tree_leaves(value), strict=True):
                if not isinstance(t, Tensor):
                    # A number would be frozen into the graph, and every new value would trace again.
                    what = f"{where} is {_describe(t)}, not a tensor: every new value would need a new trace."
                    number = t if isinstance(t, (int, float)) else "value"
                    raise _refusal(what, f"{where} = torch.tensor({number}, dtype=torch.float64)")
                if t.dim() or not t.is_floating_point() or t.device.type != "cpu":
                    what = f"{where} must be a 0-dim floating point tensor on the CPU, but is {_describe(t)}."
                    raise _refusal(what, f"{where} = value.reshape(()).double().cpu()")
        return {name: opt_state[name] for name in self.held}

    def _check(self, i: int, params: Tree, p: Any, g: Any, state: Any) -> None:
        """Refuse what torch would take silently (kernels that do not look) or name badly."""
        if not isinstance(g, Tensor) or not _trains(p):
            what = f"{_names(params, 'grads')[i]} is {_describe(g)} for a parameter that is {_describe(p)}."
            raise _refusal(what, "use None for a parameter that is not trained.")
        if g.layout != torch.strided or (g.shape, g.dtype, g.device) != (p.shape, p.dtype, p.device):
            what = f"{_names(params, 'grads')[i]} is {_describe(g)}, but the parameter is {_describe(p)}."
            raise _refusal(what, "pass the gradients of these params, dense and of their dtype.")
        where = "opt_state['state']"
        ours = isinstance(state, dict) and all(isinstance(v, Tensor) for v in state.values())
        if not ours or (self.dampened and "started" not in state):
            what = f"{_names(params, where)[i]} is {_describe(state)}, not what {self.cls.__name__} made."
            raise _refusal(what, self._remake)
        fused = self.route(p).get("fused")
        for key, value in state.items() if _ships_with_torch(self.cls) else ():
            # The fused kernels read as many elements as the parameter has, of its type, and look at neither.
            if value.dim() and (value.shape != p.shape or (fused and value.dtype != p.dtype)):
                what = f"{_names(params, where)[i]}[{key!r}] is {_describe(value)}, not like {_describe(p)}."
                raise _refusal(what, self._remake)


@contextlib.contextmanager
def _compiling(flag: bool) -> Iterator[None]:
    """Set what `torch.compiler.is_compiling()` says.

    Under it capturable code skips its check for an accelerator, and plain code does tensor arithmetic where
    it would use Python floats. So capturable needs it on, also in eager; plain needs it off, also in a trace.
    """
    before = torch.compiler._is_compiling_flag
    if before == flag:
        yield
        return
    torch.compiler._is_compiling_flag = flag
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def _numbers_of_tensors() -> Iterator[None]:
    """Let `Tensor.item()` be traced, as a number that has no value yet, where the tracer would refuse it.

    Elsewhere in a step it would be a branch frozen by mistake; here it is meant, and nothing branches on it.
    """
    mode = torch._guards.detect_fake_mode()
    before = mode is not None and mode.allow_scalar_outputs
    if mode is None or before:
        yield
        return
    mode.allow_scalar_outputs = True
    try:
        yield
    finally:
        mode.allow_scalar_outputs = before


def _in_layout_of(p: Tensor, t: Tensor) -> Tensor:
    """`t` itself if its strides are those of `p`, else a copy that has them."""
    same = t.shape != p.shape or t.stride() == p.stride()  # a step count has another shape
    return t if same else torch.empty_like(p, dtype=t.dtype).copy_(t)


def _trains(p: Any) -> bool:
    return isinstance(p, Tensor) and (p.is_floating_point() or p.is_complex())


def _ships_with_torch(cls: type) -> bool:
    return cls.__module__.startswith("torch.optim")


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in optree.tree_leaves(value))


def _floats(name: str, value: Tree) -> Tree:
    """The numbers in a hyperparameter that was given as a tensor, or as a tuple of them."""

    def convert(leaf: Any) -> float:
        if isinstance(leaf, Tensor) and (leaf.numel() != 1 or not leaf.is_floating_point()):
            what = f"{name} is {_describe(leaf)}, but a hyperparameter is one floating point number."
            raise _refusal(what, f"{name}=torch.tensor(value, dtype=torch.float64)")
        if name != "lr" and float(leaf) == 0:
            # The classes ask `if weight_decay != 0` and leave the term out: a graph is made for one of both.
            what = f"{name} is a tensor that starts at 0, where the classes leave its term out of the graph."
            raise _refusal(what, "start with a small positive value, or give the number 0.")
        return float(leaf)

    return optree.tree_map(convert, value)


def _tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _number(value: Tensor, first: float) -> float:
    """The value as a float; in a trace, as a symbol that each replay reads from the tensor anew."""
    number = value.item()
    if isinstance(number, torch.SymFloat) and first > 0:
        torch._check(number > 0)  # so that `if weight_decay != 0` has an answer while it is only a symbol
    return number


def _refusal(what: str, remedy: str) -> ArgumentError:
    return ArgumentError(build_message(what, remedy=remedy))


def _mismatch(grads: Tree, params: Tree) -> ArgumentError:
    have, want = _names(grads, ""), _names(params, "")
    offenders = [f"params{name} has no gradient" for name in want if name not in have]
    offenders += [f"grads{name} has no parameter" for name in have if name not in want]
    if not offenders:  # the same paths, through containers of other types
        specs = (optree.tree_structure(tree, none_is_leaf=True) for tree in (grads, params))
        offenders = [f"{name}: {spec}" for name, spec in zip(("grads", "params"), specs, strict=True)]
    remedy = "pass the gradients that fdp.value_and_grad gives for these params; None where there is none."
    return ArgumentError(build_message("The trees grads and params do not match.", offenders, remedy))


def _names(tree: Tree, root: str) -> list[str]:
    return [accessor.codify(root) for accessor in optree.tree_accessors(tree, none_is_leaf=True)]


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f", {value.layout}"
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}{layout}"
    return f"the {'class' if isinstance(value, type) else type(value).__name__} {value!r:.60}"
