"""Optimizers in the form of Optax: against torch's classes and plain loops, traced, wrapped, on bad input."""

from __future__ import annotations

import re
from typing import Any

import lion_pytorch
import optree
import pytest
import torch
from samples import exhaustive
from torch import Tensor

import fdp
from fdp.errors import ArgumentError
from fdp.optim import (
    GradientTransformation,
    Optimizer,
    apply_updates,
    averaged,
    chain,
    clipped,
    from_torch,
    from_transform,
    loss_scaled,
    partition,
    skip_nonfinite,
)

tree_map: Any = optree.tree_map


def lion(lr: float, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0) -> GradientTransformation:
    def update(grads: Any, state: Any, params: Any) -> Any:
        def move(p: Tensor, g: Tensor, m: Tensor) -> Tensor:
            return p * (1.0 - lr * decay) - p - lr * (m * betas[0] + (1.0 - betas[0]) * g).sign()

        updates = tree_map(move, params, grads, state)
        return updates, tree_map(lambda g, m: m * betas[1] + (1.0 - betas[1]) * g, grads, state)

    return GradientTransformation(lambda params: tree_map(torch.zeros_like, params), update)


def scale(factor: float) -> GradientTransformation:
    """Needs no parameters, and says so."""
    return GradientTransformation(
        lambda params: (), lambda grads, state: (tree_map(lambda g: factor * g, grads), state)
    )


def decayed(rate: float) -> Any:
    """Takes parameters as TorchOpt's functions do, by name, and would change its arguments if it may."""

    class Decayed:
        @staticmethod
        def init(params: Any) -> Any:
            return {"count": torch.zeros((), dtype=torch.int64)}

        @staticmethod
        def update(grads: Any, state: Any, *, params: Any = None, inplace: bool = True) -> Any:
            assert not inplace
            return tree_map(lambda g, p: g + rate * p, grads, params), {"count": state["count"] + 1}

    return Decayed


def momentum(decay: float) -> GradientTransformation:
    def update(grads: Any, state: Any, params: Any) -> Any:
        state = tree_map(lambda m, g: decay * m + g, state, grads)
        return state, state

    return GradientTransformation(lambda params: tree_map(torch.zeros_like, params), update)


def sgd(lr: float) -> Any:
    return from_transform(chain(decayed(0.01), momentum(0.9), scale(-lr)))


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"w": torch.randn(4, 3, generator=generator), "b": torch.randn(3, generator=generator)}


def gradient(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 + number)
    return {name: torch.randn(p.shape, generator=generator) for name, p in start().items()}


def by_class(cls: Any, **hyperparameters: Any) -> dict[str, Tensor]:
    params = {name: torch.nn.Parameter(p) for name, p in start().items()}
    optimizer = cls(params.values(), **hyperparameters)
    for number in range(6):
        for name, grad in gradient(number).items():
            params[name].grad = grad
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def run(optimizer: Optimizer, way: str) -> dict[str, Any]:
    def step(state: Any, grads: Any) -> Any:
        params, opt = optimizer.update(fdp.pmean(grads), state["opt"], state["params"])
        return {"params": params, "opt": opt}

    call: Any = step
    if way != "eager":
        call = fdp.data_parallel(step, donate_argnums=0, batch_argnums=(), compile=way == "compiled")
    state = {"params": start(), "opt": optimizer.init(start())}
    for number in range(6):
        state = call(state, gradient(number))
    return state


@pytest.mark.parametrize("way", ["eager", "traced", pytest.param("compiled", marks=exhaustive)])
@pytest.mark.parametrize(
    ("optimizer", "cls", "hyperparameters"),
    [
        (sgd(0.1), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (
            from_transform(lion(0.1, decay=0.2)),
            lion_pytorch.Lion,
            {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.2},
        ),
    ],
    ids=["SGD", "Lion"],
)
def test_a_transformation_does_what_the_class_does(optimizer: Any, cls: Any, hyperparameters: Any, way: str) -> None:
    expected, found = by_class(cls, **hyperparameters), run(optimizer, way)["params"]
    for name, p in expected.items():
        torch.testing.assert_close(found[name], p, rtol=1e-6, atol=1e-6)


def test_wrappers_take_it_like_any_other() -> None:
    optimizer = averaged(skip_nonfinite(clipped(sgd(0.1), max_norm=1.0)), decay=0.5)
    state = run(optimizer, "traced")
    assert sorted(state["opt"]) == ["average", "average_count", "skipped", "transformation"]
    assert state["opt"]["transformation"][0]["count"] == 6
    parts = {"w": sgd(0.1), "b": from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)}
    found = run(partition({"w": "w", "b": "b"}, parts), "traced")["params"]
    for name, p in by_class(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01).items():
        torch.testing.assert_close(found[name], p, rtol=1e-6, atol=1e-6)
    assert "scale" in loss_scaled(sgd(0.1)).init(start())


def test_a_state_that_begins_with_the_parameters_does_not_share_their_memory() -> None:
    kept = GradientTransformation(lambda params: {"z": params}, lambda grads, state, params: (grads, state))
    params = start()
    opt_state = from_transform(kept).init(params)
    for name, z in opt_state["transformation"]["z"].items():
        assert z.data_ptr() != params[name].data_ptr() and torch.equal(z, params[name])


def test_apply_updates_keeps_the_dtype_and_what_has_no_update() -> None:
    params = {"half": torch.tensor([1.0], dtype=torch.bfloat16), "still": torch.tensor([2.0])}
    new = apply_updates(params, {"half": torch.tensor([0.00390625]), "still": None})
    # 1.00390625 lies between two numbers of bfloat16: it is rounded once, after the addition.
    assert new["half"].dtype is torch.bfloat16 and new["half"].item() == 1.0
    assert new["still"] is params["still"]


def take(init: Any, update: Any) -> None:
    run(from_transform((init, update)), "eager")


def update(**changes: Any) -> None:
    grads = {name: grad for name, grad in {**start(), **changes}.items() if isinstance(grad, (Tensor, type(None)))}
    sgd(0.1).update(grads, sgd(0.1).init(start()), start())


def nothing(params: Any) -> Any:
    return ()


BAD: dict[str, tuple[Any, str]] = {
    "an optimizer": (lambda: from_transform(sgd(0.1)), "makes parameters"),
    "a class": (lambda: from_transform(torch.optim.SGD), "pass the class to fdp.optim.from_torch"),
    "a number": (lambda: chain(scale(1.0), 3), "init and update, not the int 3"),
    "two arguments": (lambda: sgd(0.1).update(start(), sgd(0.1).init(start())), "takes the parameters as well"),
    "other state": (lambda: sgd(0.1).update(start(), {}, start()), "must have the key 'transformation' alone"),
    "no gradient": (lambda: update(b=None), "grads['b'] is None"),
    "other gradients": (lambda: update(b="left out"), "params['b'] has no gradient"),
    "a count": (lambda: take(lambda p: {"count": 0}, lambda g, s, p: (g, s)), "state['count'] is the int 0"),
    "no pair": (lambda: take(nothing, lambda g, s, p: g), "not a pair"),
    "too few": (lambda: take(nothing, lambda g, s, p: ({"w": g["w"]}, s)), "params['b'] has no update"),
    "a shape": (lambda: take(nothing, lambda g, s, p: (tree_map(Tensor.sum, g), s)), "updates['b'] is"),
    "a new dtype": (
        lambda: take(lambda p: {"m": torch.zeros(())}, lambda g, s, p: (g, {"m": s["m"].double()})),
        "state['m'] was a torch.float32 tensor",
    ),
    "a structure": (lambda: take(nothing, lambda g, s, p: (g, g)), "unlike the one"),
    "of a chain": (lambda: chain(scale(1.0)).update(start(), (), start()), "the state of chain is a tuple of 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    make, says = BAD[case]
    with pytest.raises(ArgumentError, match=rf"{re.escape(says)}(.|\n)*Remedy: |Remedy: {re.escape(says)}"):
        make()
