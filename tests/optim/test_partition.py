"""Parameter groups: `partition` against one `torch.optim` class with groups, and against two classes."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from samples import exhaustive
from torch import Tensor

import fdp
from fdp.errors import ArgumentError
from fdp.optim import Optimizer, averaged, clipped, from_torch, loss_scaled, partition

Affine = collections.namedtuple("Affine", ["weight", "bias"])


@optree.dataclasses.dataclass(namespace="")
class Scale:
    by: Tensor


def same_bits(a: Any, b: Any) -> bool:
    a, b = optree.tree_leaves(a), optree.tree_leaves(b)
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def parameters() -> dict[str, Any]:
    return {
        "1.weight": torch.randn(4, 3),
        "1.bias": torch.randn(4),
        "0.weight": torch.randn(3, 3),
        "0.bias": torch.randn(3),
        "steps": torch.tensor(3),
    }


def decay(path: str, leaf: Tensor) -> str:
    return "rest" if path.endswith("bias") else "decay"


def step_of(optimizer: Optimizer, donate: bool) -> Any:
    @fdp.data_parallel(donate_argnums=0 if donate else ())
    def step(state: Any, batch: Tensor) -> Any:
        def loss_fn(p: Any) -> Tensor:
            x = batch
            for k in range(2):
                x = (x @ p[f"{k}.weight"].T + p[f"{k}.bias"]).tanh()
            return x.square().mean()

        grads = fdp.grad(loss_fn)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}

    return step


GROUPS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (torch.optim.AdamW, {"fused": True}, {"weight_decay": 0.3, "lr": 0.01}),
    (torch.optim.SGD, {"momentum": 0.9, "foreach": False}, {"weight_decay": 0.3, "lr": 0.02}),
    (torch.optim.Adafactor, {"foreach": False}, {"weight_decay": 0.3, "lr": 0.01}),
]


@pytest.mark.parametrize("donate", [pytest.param(False, marks=exhaustive), True])
@pytest.mark.parametrize(("cls", "both", "first"), GROUPS, ids=lambda v: getattr(v, "__name__", None))
def test_parts_of_one_class_have_the_bits_of_its_groups(
    cls: Any, both: dict[str, Any], first: dict[str, Any], donate: bool
) -> None:
    rest = {"lr": 0.04, "weight_decay": 0.0}
    given = {k: v for k, v in both.items() if v is not False and k != "fused"}
    route = {"fused": False} if cls is torch.optim.SGD else {}
    optimizer = partition(
        decay,
        {"decay": from_torch(cls, **given, **route, **first), "rest": from_torch(cls, **given, **route, **rest)},
    )
    params = parameters()
    hand = {name: p.clone().requires_grad_(p.is_floating_point()) for name, p in params.items()}
    weights, biases = ([hand[f"{k}.{kind}"] for k in range(2)] for kind in ("weight", "bias"))
    reference = cls([{"params": weights, **first}, {"params": biases, **rest}], **both)
    state = {"params": params, "opt": optimizer.init(params)}
    step = step_of(optimizer, donate)
    for k in range(4):
        if k == 2:
            reference.param_groups[1]["lr"] = 0.5
            state["opt"]["parts"]["rest"]["lr"] = torch.tensor(0.5, dtype=torch.float64)
        batch = torch.randn(5, 3)
        x = batch
        for layer in range(2):
            x = (x @ hand[f"{layer}.weight"].T + hand[f"{layer}.bias"]).tanh()
        reference.zero_grad()
        x.square().mean().backward()
        reference.step()
        state = step(state, batch)
        assert same_bits(state["params"], {name: p.detach() for name, p in hand.items()})


def test_muon_for_matrices_and_adamw_for_the_rest() -> None:
    optimizer = partition(
        lambda path, leaf: "matrices" if leaf.ndim == 2 else "rest",
        {"matrices": from_torch(torch.optim.Muon, lr=0.1), "rest": from_torch(torch.optim.AdamW, lr=0.1)},
    )
    params = parameters()
    by_tree = partition(
        {name: "matrices" if p.ndim == 2 else "rest" for name, p in params.items()},
        {"matrices": from_torch(torch.optim.Muon, lr=0.1), "rest": from_torch(torch.optim.AdamW, lr=0.1)},
    )
    hand = {name: p.clone() for name, p in params.items()}
    muon = torch.optim.Muon([hand["0.weight"], hand["1.weight"]], lr=0.1)
    adamw = torch.optim.AdamW([hand["0.bias"], hand["1.bias"]], lr=0.1, fused=True)
    opt_state = optimizer.init(params)
    for k in range(3):
        grads = {name: torch.randn_like(p) if p.ndim else None for name, p in params.items()}
        if k == 1:
            grads["0.weight"] = grads["1.bias"] = None
        for name, p in hand.items():
            p.grad = None if grads[name] is None else grads[name].clone()
        muon.step()
        adamw.step()
        assert same_bits(by_tree.update(grads, opt_state, params), optimizer.update(grads, opt_state, params))
        params, opt_state = optimizer.update(grads, opt_state, params)
        assert same_bits(params, hand)


def test_paths_are_keys_joined_by_dots() -> None:
    params = {
        "net": [Affine(torch.ones(2), torch.ones(1)), (torch.ones(3), None)],
        "0.bias": torch.ones(1),
        7: Scale(torch.ones(2)),
        "count": torch.tensor(1),
    }
    seen = {}

    def label(path: str, leaf: Tensor) -> int:
        seen[path] = leaf.shape
        return 1

    optimizer = partition(label, {1: from_torch(torch.optim.SGD), "none": from_torch(torch.optim.SGD)})
    opt_state = optimizer.init(params)
    assert set(seen) == {"net.0.weight", "net.0.bias", "net.1.0", "0.bias", "7.by"}
    new, _ = optimizer.update(
        optree.tree_map(lambda p: torch.ones_like(p) if p.ndim else None, params), opt_state, params
    )
    assert optree.tree_structure(new) == optree.tree_structure(params)
    assert seen["net.1.0"] == (3,)
    partition(lambda path, leaf: seen.update(alone=path) or 1, {1: from_torch(torch.optim.SGD)}).init(torch.ones(2))
    assert seen["alone"] == ""


def test_wrappers_around_a_partition_see_all_of_it() -> None:
    sgd = from_torch(torch.optim.SGD, lr=1.0)
    parts = partition(decay, {"decay": sgd, "rest": sgd})
    params = parameters()
    grads = {name: torch.randn_like(p) if p.ndim else None for name, p in params.items()}

    def wrap(optimizer: Optimizer) -> Optimizer:
        return loss_scaled(averaged(clipped(optimizer, 0.1), 0.5), init_scale=4.0)

    whole, split = wrap(sgd), wrap(parts)
    (expected, whole_state), (got, split_state) = (
        optimizer.update(grads, optimizer.init(params), params) for optimizer in (whole, split)
    )
    assert same_bits(got, expected) and same_bits(split_state["average"], whole_state["average"])
    assert sorted(split_state) == ["average", "average_count", "growth_tracker", "parts", "scale"]


def test_an_unknown_label_is_refused_with_every_leaf_that_has_it() -> None:
    sgd = from_torch(torch.optim.SGD)
    params = parameters()
    optimizer = partition(lambda path, leaf: None if path == "0.bias" else path[2:], {"weight": sgd})
    with pytest.raises(ArgumentError) as caught:
        optimizer.init(params)
    assert str(caught.value).splitlines() == [
        "partition has optimizers for ['weight'], and leaves with other labels:",
        "  params['0.bias']: the NoneType None",
        "  params['1.bias']: the str 'bias'",
        "Remedy: return one of these keys for every leaf.",
    ]
    with pytest.raises(ArgumentError, match=r"params\['0.bias'\]: the list \[1\]"):
        partition(lambda path, leaf: [1], {"weight": sgd}).init(params)


@dataclass
class NotATree:
    x: int


def test_refusals_of_partition() -> None:
    sgd = from_torch(torch.optim.SGD)
    params = parameters()
    for bad in ({}, [sgd], sgd):
        with pytest.raises(ArgumentError, match="partition takes a dict of optimizers, not"):
            partition(decay, bad)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="partition wraps an Optimizer, not the class"):
        partition(decay, {"decay": torch.optim.SGD})  # type: ignore[dict-item]
    for tree in ({"0.bias": "decay"}, "decay", NotATree(1)):
        with pytest.raises(ArgumentError, match="tree of labels does not have the structure of the parameters"):
            partition(tree, {"decay": sgd}).init(params)
    with pytest.raises(ArgumentError, match=r"a loss scale of its own(.|\n)*loss_scaled\(partition"):
        partition(decay, {"decay": loss_scaled(sgd), "rest": sgd}).init(params)
    optimizer = partition(decay, {"decay": sgd, "rest": sgd})
    opt_state = optimizer.init(params)
    grads: dict[str, Any] = {name: torch.ones_like(p) for name, p in params.items()}
    with pytest.raises(ArgumentError, match=r"grads\['steps'\] is a torch.int64(.|\n)*use None"):
        optimizer.update(grads, opt_state, params)
    with pytest.raises(ArgumentError, match=r"params\['0.bias'\] has no gradient"):
        optimizer.update({"0.weight": None}, opt_state, params)
    for state in (opt_state["parts"], {"parts": {"decay": {}}}, {"parts": 3}, None):
        with pytest.raises(
            ArgumentError, match=r"opt_state must be \{'parts': one state for each of \['decay', 'rest'"
        ):
            optimizer.update(grads, state, params)
    grads["steps"] = None
    grads["0.bias"] = torch.ones(9)
    with pytest.raises(ArgumentError, match=r"grads\['0.bias'\] is a torch.float32 tensor of shape \(9,\)"):
        optimizer.update(grads, opt_state, params)
    assert repr(optimizer) == f"partition({{'decay': {sgd!r}, 'rest': {sgd!r}}})"
