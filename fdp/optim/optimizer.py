"""The public interface: `Optimizer`, and `from_torch`, which makes one from a class or refuses the class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from fdp import pytree
from fdp.optim.argument_checks import optimizer_error, value_text
from fdp.optim.rule import OWN_PAIR, Rule
from fdp.pytorch.dynamo import breaks_graph
from fdp.pytorch.parts import require
from fdp.pytree import Tree
from fdp.tracebacks import hiding_frames

_ROUTES = ("fused", "foreach", "capturable")
_REFUSED: dict[type, tuple[str, str]] = {
    optim.LBFGS: (
        "its step calls a closure as often as the values of the loss ask for, so one step is not one graph",
        "use a first-order class such as torch.optim.AdamW, or run LBFGS outside of the step.",
    ),
    optim.SparseAdam: (
        "it takes sparse gradients only, and gradients of a traced step are dense",
        "use torch.optim.Adam, and embeddings with sparse=False.",
    ),
}


_LEFT_OUT: Any = object()
"""Parameters may be any tree, None as well."""

_BREAK_REASON = (
    "the update of an fdp optimizer becomes part of the graph of a step: call it in a step under "
    "fdp.data_parallel(compile=True)"
)


@dataclass(frozen=True, eq=False)
class Optimizer:
    """A pair of pure functions that hold no state of their own.

    Args:
        init: `init(params) -> opt_state`.
        update: `update(grads, opt_state, params) -> (params, opt_state)`.
        summary: what `print` shows.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    summary: str = "Optimizer(init, update)"

    def __post_init__(self) -> None:
        object.__setattr__(self, "update", _with_params(self.update))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Optimizer) and self._functions() == other._functions()

    def __hash__(self) -> int:
        return hash(self._functions())

    def _functions(self) -> tuple[Any, Any]:
        """Those that it was made of: `update` is a new function around the given one."""
        return self.init, self.update.__wrapped__  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return self.summary


def _with_params(update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]) -> Callable[..., tuple[Tree, Tree]]:
    """`update`, which says what is missing where it is called as Optax's may be."""

    @functools.wraps(update)
    @hiding_frames
    def checked(grads: Tree, opt_state: Tree, params: Tree = _LEFT_OUT) -> tuple[Tree, Tree]:
        if params is _LEFT_OUT:
            what = "update takes the parameters as well, and returns new ones. (That of Optax returns what is added.)"
            raise optimizer_error(what, "params, opt_state = optimizer.update(grads, opt_state, params).")
        return update(grads, opt_state, params)

    return checked


@hiding_frames
def from_torch(cls: type[optim.Optimizer], **hyperparameters: Any) -> Optimizer:
    """Make a pure `(init, update)` pair of a `torch.optim` class, with the same bits as the class itself.

    `lr` lives in the optimizer's state as a 0-dim float64 tensor on the CPU, `opt_state["lr"]`, and so does
    every float hyperparameter that is given as a 0-dim tensor, `weight_decay=torch.tensor(0.1)` or
    `betas=(torch.tensor(0.9), torch.tensor(0.999))`: a schedule changes them there without a retrace.
    Hyperparameters given as Python numbers are constants of the optimizer. A tensor other than `lr` must be
    positive, now and later (the classes leave out a term whose factor is zero), and selects the plain code
    (fused kernels take numbers). Where fused kernels do all updates, `lr` may also be on the device of the
    parameters, as in a step that is recorded as a CUDA graph; they read it there as float32. ASGD and Rprop also
    read `lr` in `init`, into `eta` and `step_size`; Rprop never again.

    The result is bit for bit that of the class with the same `fused`, `foreach` and `capturable`. Where the
    fused kernel is chosen for you, that is `cls(..., fused=True)`; pass `fused=False` for the bits of the
    class's default on a CPU. Gradients and state are copied to the layout of their parameter before a fused
    kernel reads them, because the CPU kernels assume equal strides without a check; so new state lies as its
    parameter does.

    Args:
        cls: a class, not an instance. LBFGS and SparseAdam are refused.
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
    require("fdp.optim.from_torch")
    if not (isinstance(cls, type) and issubclass(cls, optim.Optimizer)):
        hint = "pass the class itself, as in from_torch(torch.optim.AdamW, lr=1e-3)."
        raise optimizer_error(f"from_torch takes a torch.optim class, not {value_text(cls)}.", hint)
    for refused, (reason, remedy) in _REFUSED.items():
        if issubclass(cls, refused):
            raise optimizer_error(f"{cls.__name__} has no exact pure form: {reason}.", remedy)
    if hyperparameters.get("differentiable"):
        what = f"{cls.__name__}(differentiable=True) differentiates its step, but update is without autograd."
        raise optimizer_error(what, "leave differentiable out, or write the update in torch operations.")
    if cls.step is optim.Optimizer.step:
        raise optimizer_error(f"{cls.__name__} has no step.", OWN_PAIR)

    given = {name: _floats(name, value) for name, value in hyperparameters.items() if _holds_tensor(value)}
    constants = {**hyperparameters, **given}
    try:
        # 2-D, because Muon refuses anything else; every other class takes any shape.
        defaults = cls([torch.zeros(1, 1, device="cpu")], **constants).defaults
    except (TypeError, ValueError, RuntimeError) as error:
        accepted = ", ".join(list(inspect.signature(cls.__init__).parameters)[2:])
        what = f"{cls.__name__} refuses its hyperparameters: {error}."
        raise optimizer_error(what, f"it takes {accepted}.") from error
    held = {name: value for name, value in {"lr": defaults.get("lr"), **given}.items() if value is not None}
    explicit = {k: hyperparameters[k] for k in _ROUTES if hyperparameters.get(k) is not None}
    rule = Rule(cls, constants, defaults, held, explicit)
    rule.refuse_inexact_routes()
    fixed = ", ".join(f"{k}={v!r}" for k, v in hyperparameters.items() if k not in held) or "none"

    # Behind one more function: `torch.compile` looks through the wrapper of what it is given itself.
    run_init = breaks_graph(_BREAK_REASON)(rule.init)
    run_update = breaks_graph(_BREAK_REASON)(rule.update)

    # Functions, not the bound methods: make_fx counts the arguments of a bound method wrongly.
    @hiding_frames
    def init(params: Tree) -> Tree:
        return run_init(params)

    @hiding_frames
    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        return run_update(grads, opt_state, params)

    summary = f"Optimizer({cls.__name__}, in the state: {', '.join(held)}, constant: {fixed})"
    return Optimizer(init, update, summary)


def _holds_tensor(value: object) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.leaves_of(value))


def _floats(name: str, value: Tree) -> Tree:
    """The numbers in a hyperparameter that was given as a tensor, or as a tuple of them."""

    def convert(leaf: Any) -> float:
        if isinstance(leaf, Tensor) and (leaf.numel() != 1 or not leaf.is_floating_point()):
            what = f"{name} is {value_text(leaf)}, but a hyperparameter is one floating point number."
            raise optimizer_error(what, f"{name}=torch.tensor(value, dtype=torch.float64)")
        if name != "lr" and float(leaf) == 0:
            # The classes ask `if weight_decay != 0` and leave the term out: a graph is made for one of both.
            what = f"{name} is a tensor that starts at 0, where the classes leave its term out of the graph."
            raise optimizer_error(what, "start with a small positive value, or give the number 0.")
        return float(leaf)

    return pytree.map_leaves(convert, value)
