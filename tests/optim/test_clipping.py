"""Clipping by the global norm against `torch.nn.utils.clip_grad_norm_`, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import optree
import pytest
import torch
from bits import same_leaves
from torch import Tensor

import fdp
from fdp.errors import ArgumentError
from fdp.optim import clip_by_global_norm, clipped, from_torch, global_norm, loss_scaled


def gradients(scale: float = 1.0) -> dict[str, Any]:
    return {
        "nested": [torch.randn(3, 4) * scale, (torch.randn(()) * scale, None)],
        "half": torch.randn(5).bfloat16() * scale,
        "half of nothing": torch.tensor(0.3).half() * scale,
        "double": torch.randn(2, 2, dtype=torch.float64) * scale,
        "complex": torch.randn(3, dtype=torch.complex64) * scale,
        "empty": torch.zeros(0, 2),
    }


def clipped_by_class(grads: Any, max_norm: float, norm_type: float = 2.0) -> tuple[Any, Tensor]:
    leaves, spec = optree.tree_flatten(grads)
    params = [torch.zeros_like(g) for g in leaves]
    for p, g in zip(params, leaves, strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    return spec.unflatten([p.grad for p in params]), norm


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-30, 1e30])
def test_clipping_has_the_bits_of_torch(norm_type: float, scale: float) -> None:
    grads = gradients(scale)
    if norm_type == math.inf:
        del grads["empty"]  # torch has no largest element of nothing
    before = optree.tree_map(torch.clone, grads)
    expected, norm = clipped_by_class(grads, 0.7, norm_type)
    for run in (clip_by_global_norm, fdp.data_parallel(clip_by_global_norm, static_argnums=(1, 2), batch_argnums=())):
        got, got_norm = run(grads, 0.7, norm_type)
        assert same_leaves(got, expected) and same_leaves(got_norm, norm)
        assert same_leaves(grads, before)
    assert same_leaves(global_norm(grads, norm_type), norm)
    by_tensor, _ = clip_by_global_norm(grads, torch.tensor(0.5), norm_type)
    assert same_leaves(by_tensor, clipped_by_class(grads, 0.5, norm_type)[0])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_does_what_it_does_in_torch(bad: float) -> None:
    grads = {"a": torch.tensor([1.0, bad]), "b": torch.ones(3)}
    expected, norm = clipped_by_class(grads, 1.0)
    got, got_norm = clip_by_global_norm(grads, 1.0)
    assert same_leaves(got, expected) and same_leaves(got_norm, norm)
    assert not got_norm.isfinite()


def test_no_gradients_have_the_norm_zero() -> None:
    nothing: dict[str, None] = {"a": None}
    assert clip_by_global_norm(nothing, 1.0) == (nothing, torch.zeros(()))
    assert same_leaves(global_norm([]), torch.nn.utils.get_total_norm([]))


# torch says it to itself, when it first imports what forward mode needs.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_it_can_be_differentiated_and_batched() -> None:
    grads = {"a": torch.randn(4, 3), "b": torch.randn(4)}

    def plain(tree: Any) -> Any:
        norm = torch.cat([leaf.reshape(-1) for leaf in tree.values()]).norm()
        factor = (0.5 / (norm + 1e-6)).clamp(max=1.0)
        return {name: leaf * factor for name, leaf in tree.items()}, norm

    def loss(run: Any) -> Any:
        return lambda tree: run(tree)[0]["a"].sin().sum() + run(tree)[1] ** 2

    ours = lambda tree: clip_by_global_norm(tree, 0.5)  # noqa: E731
    torch.testing.assert_close(torch.func.grad(loss(ours))(grads), torch.func.grad(loss(plain))(grads))
    step = fdp.data_parallel(lambda tree: fdp.grad(loss(ours))(tree), batch_argnums=())
    torch.testing.assert_close(step(grads), torch.func.grad(loss(plain))(grads))
    tangents = optree.tree_map(torch.ones_like, grads)
    torch.testing.assert_close(
        torch.func.jvp(loss(ours), (grads,), (tangents,)), torch.func.jvp(loss(plain), (grads,), (tangents,))
    )
    # Every sample by itself, as DP-SGD has it.
    each, norms = torch.vmap(ours)(grads)
    for k in range(4):
        one, norm = ours({name: leaf[k] for name, leaf in grads.items()})
        torch.testing.assert_close(({name: leaf[k] for name, leaf in each.items()}, norms[k]), (one, norm))


@pytest.mark.parametrize("donate", [False, True])
def test_an_optimizer_clips_before_it_updates(donate: bool) -> None:
    inner = from_torch(torch.optim.AdamW, lr=0.1)
    optimizer = clipped(inner, max_norm=0.3)
    assert repr(optimizer) == f"clipped({inner!r}, max_norm=0.3)"
    start = {"b": torch.randn(3), "frozen": torch.arange(3), "w": torch.randn(3, 4)}
    hand = {name: p.clone() for name, p in start.items()}
    reference = torch.optim.AdamW([hand["b"], hand["w"]], lr=0.1, fused=True)

    @fdp.data_parallel(donate_argnums=0 if donate else ())
    def step(state: Any, batch: Tensor) -> Any:
        grads = fdp.grad(lambda p: (p["w"] @ batch).square().sum() + p["b"].sin().sum())(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}

    params = {name: p.clone().requires_grad_(p.is_floating_point()) for name, p in start.items()}
    state = {"params": params, "opt": optimizer.init(params)}
    for _ in range(3):
        batch = torch.randn(4)
        leaves = {name: p.detach().clone().requires_grad_() for name, p in hand.items() if name != "frozen"}
        ((leaves["w"] @ batch).square().sum() + leaves["b"].sin().sum()).backward()
        for name, leaf in leaves.items():
            hand[name].grad = leaf.grad
        torch.nn.utils.clip_grad_norm_([hand["b"], hand["w"]], 0.3)
        reference.step()
        state = step(state, batch)
        assert same_leaves(state["params"], hand)


def test_refusals_of_clipping() -> None:
    grads = {"w": torch.ones(2), "n": torch.tensor(3), "s": torch.ones(3).to_sparse(), "x": 3.0}
    with pytest.raises(ArgumentError) as caught:
        clip_by_global_norm(grads, 1.0)
    lines = str(caught.value).splitlines()
    assert lines[0] == "clip_by_global_norm takes dense tensors of floating point numbers."
    assert [line.split(" is ")[0].strip() for line in lines[1:-1]] == ["grads['n']", "grads['s']", "grads['x']"]
    with pytest.raises(ArgumentError, match=r"global_norm takes dense(.|\n)*tree\['n'\] is a torch.int64"):
        global_norm(grads)
    for bad in (0, -1.0, math.nan, True, "1", None, torch.ones(2), torch.tensor(1)):
        with pytest.raises(ArgumentError, match="takes max_norm as a positive number or a 0-dim tensor, not"):
            clip_by_global_norm({}, bad)  # type: ignore[arg-type]
    for bad in (0, -2.0, "2", None, math.nan):
        with pytest.raises(ArgumentError, match=r"takes norm_type as a positive number or math.inf, not"):
            global_norm({}, bad)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="clip_by_global_norm takes norm_type"):
            clip_by_global_norm({}, 1.0, bad)  # type: ignore[arg-type]
    inner = from_torch(torch.optim.AdamW)
    with pytest.raises(ArgumentError, match="clipped takes norm_type"):
        clipped(inner, 1.0, 0)
    with pytest.raises(ArgumentError, match="clipped takes max_norm as a positive number"):
        clipped(inner, 0.0)
    with pytest.raises(ArgumentError, match="a tensor would be a constant of every step's graph"):
        clipped(inner, torch.tensor(1.0))
    with pytest.raises(ArgumentError, match=r"still multiplied by the scale.\nRemedy: write loss_scaled\(clipped"):
        clipped(loss_scaled(inner), 1.0).init(torch.ones(2))
    with pytest.raises(ArgumentError, match="clipped wraps an Optimizer, not the class"):
        clipped(torch.optim.AdamW, 1.0)  # type: ignore[arg-type]
