"""Collectives and gradients outside of a step, in a world of one: values, transposes, dtypes, transforms.

And the same functions inside a step, for a world of two in which the other rank holds what this one holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from bits import same_bits
from fake_ranks import fake_group
from samples import exhaustive
from torch.autograd import gradcheck, gradgradcheck

import fdp
from fdp.context.axis import current_axis, inside_step, step_axis

Collective = Callable[[Any], Any]
DOUBLE = torch.float64

SAME_SHAPE: dict[str, Collective] = {
    "psum": fdp.psum,
    "pmean": fdp.pmean,
    "pmax": fdp.pmax,
    "pmin": fdp.pmin,
    "broadcast": fdp.broadcast,
    "weighted pmean": lambda tree: fdp.pmean(tree, weight=2.0),
}
COLLECTIVES = {**SAME_SHAPE, "all_gather": lambda tree: optree.tree_map(lambda x: x[0], fdp.all_gather(tree))}
DIFFERENTIABLE = {k: v for k, v in COLLECTIVES.items() if k not in ("pmax", "pmin")}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g, dtype=DOUBLE)
    if dtype.is_complex:
        return torch.complex(x, torch.randn(shape, generator=g, dtype=DOUBLE)).to(dtype)
    return (x * 10).to(dtype) if dtype.is_floating_point else (x.abs() * 10).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


# --- values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(COLLECTIVES))
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + COMPLEX, ids=str)
@pytest.mark.parametrize("shape", [(), pytest.param((3,), marks=exhaustive), (2, 0), (2, 3)], ids=str)
def test_one_rank_gets_its_own_value_as_a_new_tensor(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = values(dtype, *shape)
    before = x.clone()
    mean, order = "pmean" in name, name in ("pmax", "pmin")
    if (mean and not (dtype.is_floating_point or dtype.is_complex)) or (order and dtype.is_complex):
        with pytest.raises(fdp.ArgumentError, match=str(dtype)):
            COLLECTIVES[name](x)
        return
    found = COLLECTIVES[name](x)
    assert found.dtype == dtype and found.shape == shape
    if name == "weighted pmean":
        torch.testing.assert_close(found, x)
    else:
        assert same_bits(bits(found), bits(x))
    if x.numel():
        found.zero_()
        assert torch.equal(x, before), "the result is the argument's own memory"


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "offset", "conjugate", "negative"])
@pytest.mark.parametrize("name", list(DIFFERENTIABLE))
def test_tensors_in_any_layout(layout: str, name: str) -> None:
    base = values(torch.complex64 if layout in ("conjugate", "negative") else torch.float32, 4, 6)
    x = {
        "transposed": lambda: base.t(),
        "strided": lambda: base[::2, ::3],
        "expanded": lambda: base[:1].expand(3, 6),
        "offset": lambda: base[1:, 2:],
        "conjugate": lambda: base.conj(),
        "negative": lambda: base.conj().imag,
    }[layout]()
    torch.testing.assert_close(COLLECTIVES[name](x), x.clone())


def test_a_gathered_value_has_a_new_first_dimension() -> None:
    assert fdp.all_gather(torch.ones(2, 3)).shape == (1, 2, 3)
    assert fdp.all_gather(torch.tensor(5)).tolist() == [5]
    assert fdp.all_gather(torch.tensor([True, False])).tolist() == [[True, False]]
    assert fdp.broadcast(torch.tensor([True, False])).tolist() == [True, False]


def test_trees_keep_their_structure() -> None:
    tree = {"a": [torch.ones(2), (torch.zeros(3), None)], "b": torch.ones(())}
    for collective in COLLECTIVES.values():
        assert optree.tree_structure(collective(tree)) == optree.tree_structure(tree)
    for empty in ({}, [], (), None):
        assert fdp.psum(empty) == empty


@pytest.mark.parametrize(("number", "dtype"), [(3, torch.int64), (2.5, torch.float32), (1 + 2j, torch.complex64)])
def test_numbers_become_tensors(number: Any, dtype: torch.dtype) -> None:
    for collective in (fdp.psum, fdp.broadcast):
        found = collective({"n": number})["n"]
        assert (found.item(), found.dtype, found.shape) == (number, dtype, ())
    assert fdp.all_gather([number])[0].tolist() == [number]


def test_a_number_keeps_all_the_bits_that_python_gave_it() -> None:
    """As a weight: the number of samples of a large job does not fit into float32."""
    assert fdp.psum(2**40 + 1).item() == 2**40 + 1
    out = fdp.pmean(torch.tensor(1.0, dtype=DOUBLE), weight=2**40 + 1)
    assert out.item() == 1.0


def test_the_axis_of_a_world_of_one() -> None:
    index = fdp.axis_index()
    assert (index.item(), index.dtype, index.shape, fdp.axis_size()) == (0, torch.int64, (), 1)
    axis = current_axis()
    assert (axis.name, axis.size, axis.rank, axis.group.process_group, inside_step()) == ("eager", 1, 0, None, False)
    with step_axis("equal ranks", fake_group(4, 3)):
        assert (fdp.axis_index().item(), fdp.axis_size(), inside_step()) == (3, 4, True)
        with step_axis("equal ranks", fake_group(2, 1)):
            assert (fdp.axis_index().item(), fdp.axis_size()) == (1, 2)
        assert fdp.axis_size() == 4
    assert fdp.axis_size() == 1 and not inside_step()


def test_per_rank_inside_of_a_step_gives_the_same_values() -> None:
    tree = {"a": torch.ones(2), "n": 3, "flag": True, "x": 0.5, "none": None}
    with step_axis("identity", fake_group(1, 0)):
        found = fdp.per_rank(tree)
    assert found["a"].tolist() == [1.0, 1.0] and found["a"] is not tree["a"] and found["none"] is None
    assert [found[k].item() for k in ("n", "flag", "x")] == [3, True, 0.5]
    assert found["flag"].dtype == torch.bool


# --- weighted means ----------------------------------------------------------------------------------


WEIGHTS = [3, 0.25, torch.tensor(2), torch.tensor(0.5, dtype=DOUBLE), torch.tensor(True)]


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=str)
def test_one_ranks_weighted_mean_is_its_value(weight: Any, dtype: torch.dtype) -> None:
    x = values(dtype, 3)
    found = fdp.pmean({"x": x}, weight=weight)["x"]
    assert found.dtype == dtype
    torch.testing.assert_close(found, x)


def test_weights_of_zero_and_below() -> None:
    assert fdp.pmean(torch.ones(2), weight=0).isnan().all()
    assert fdp.pmean(torch.ones(2), weight=-2.0).tolist() == [1.0, 1.0]


def test_a_weight_does_not_change_what_integers_may_do() -> None:
    with pytest.raises(fdp.ArgumentError, match="is not an integer"):
        fdp.pmean(torch.ones(2, dtype=torch.int32), weight=2)


# --- transposes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(DIFFERENTIABLE))
@pytest.mark.parametrize("dtype", [DOUBLE, torch.complex128], ids=str)
def test_gradients_and_their_gradients(name: str, dtype: torch.dtype) -> None:
    x = values(dtype, 2, 3).requires_grad_()
    assert gradcheck(lambda x: COLLECTIVES[name](x * x), x)
    assert gradgradcheck(lambda x: COLLECTIVES[name](x * x * x), x)


def test_a_weighted_mean_is_differentiable_in_both() -> None:
    x, weight = values(DOUBLE, 3).requires_grad_(), torch.tensor(1.5, dtype=DOUBLE, requires_grad=True)
    assert gradcheck(lambda x, w: fdp.pmean(x * x, weight=w * w), (x, weight))


@pytest.mark.parametrize("world", [2, 5])
def test_transposes_in_a_larger_world(world: int) -> None:
    """Each rank holds what this one holds: the transpose of a sum over N is N-fold, that of a mean is not."""
    with step_axis("equal ranks", fake_group(world)):
        x = torch.arange(3.0, requires_grad=True)
        weights = torch.tensor([1.0, 2.0, 3.0])
        for collective, times in ((fdp.psum, world), (fdp.pmean, 1), (fdp.broadcast, world)):
            (grad,) = torch.autograd.grad((collective(x) * weights).sum(), x)
            assert grad.tolist() == (times * weights).tolist()
        gathered = fdp.all_gather(x)
        assert gathered.shape == (world, 3)
        (grad,) = torch.autograd.grad((gathered[0] * weights).sum(), x)
        assert grad.tolist() == (world * weights).tolist()
    with step_axis("equal ranks", fake_group(world, 1)):
        for collective, expected in ((fdp.broadcast, [0.0] * 3), (lambda x: fdp.all_gather(x)[0], [0.0] * 3)):
            (grad,) = torch.autograd.grad((collective(x) * weights).sum(), x)
            assert grad.tolist() == expected  # of root 0, and of the piece of rank 0


@pytest.mark.parametrize("collective", [fdp.pmax, fdp.pmin])
def test_a_maximum_has_no_derivative(collective: Collective) -> None:
    x = torch.ones(2, requires_grad=True)
    found = collective(x)
    with pytest.raises(fdp.FdpError, match="has no derivative here"):
        found.sum().backward()
    assert collective(x.detach()).tolist() == [1.0, 1.0]


def test_integers_pass_through_a_differentiated_function() -> None:
    n = torch.tensor([1, 2])
    grad = fdp.grad(lambda x: (x * fdp.psum(n)).sum())(torch.ones(2))
    assert grad.tolist() == [1.0, 2.0]


# --- vmap and other transforms -----------------------------------------------------------------------


@pytest.mark.parametrize("name", list(DIFFERENTIABLE))
@pytest.mark.parametrize("dim", [0, 1])
def test_vmap(name: str, dim: int) -> None:
    x = values(torch.float32, 3, 4)
    found = torch.vmap(lambda row: COLLECTIVES[name](row * 2), in_dims=dim, out_dims=dim)(x)
    torch.testing.assert_close(found, x * 2)


def test_vmap_of_a_gathered_value() -> None:
    x = values(torch.float32, 3, 4)
    assert same_bits(torch.vmap(fdp.all_gather)(x), x[:, None])
    assert same_bits(torch.vmap(fdp.all_gather, in_dims=1)(x), x.t()[:, None].contiguous())
    nested = torch.vmap(torch.vmap(fdp.all_gather))(x)
    assert same_bits(nested, x[..., None])


@pytest.mark.parametrize("name", list(DIFFERENTIABLE))
def test_functional_transforms(name: str) -> None:
    collective = COLLECTIVES[name]
    x = values(DOUBLE, 3)

    def cubes(x: torch.Tensor) -> torch.Tensor:
        return (collective(x) ** 3).sum()

    first, second = 3 * x**2, torch.diag(6 * x)
    torch.testing.assert_close(torch.func.grad(cubes)(x), first)
    torch.testing.assert_close(torch.func.jacrev(torch.func.grad(cubes))(x), second)
    rows = torch.vmap(torch.func.grad(cubes))(torch.stack([x, 2 * x]))
    torch.testing.assert_close(rows, torch.stack([first, 4 * first]))
    torch.testing.assert_close(torch.func.vjp(collective, x)[1](x)[0], x)


# --- value_and_grad ----------------------------------------------------------------------------------


def test_values_and_gradients_of_a_tree() -> None:
    params = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3), "unused": torch.ones(2), "k": 2, "none": None}

    def loss(params: Any, x: torch.Tensor, *, scale: float) -> Any:
        return (params["w"] ** params["k"] * x * params["n"]).sum() * scale

    value, grads = fdp.value_and_grad(loss)(params, torch.tensor([1.0, 10.0]), scale=2.0)
    assert value.item() == 246.0 and not value.requires_grad
    assert grads["w"].tolist() == [12.0, 240.0] and grads["unused"].tolist() == [0.0, 0.0]
    assert grads["n"] is None and grads["k"] is None and grads["none"] is None
    assert list(grads) == list(params) and not grads["w"].requires_grad
    assert same_bits(fdp.grad(loss)(params, torch.tensor([1.0, 10.0]), scale=2.0)["w"], grads["w"])
    assert not params["w"].requires_grad


def test_several_arguments_and_auxiliary_outputs() -> None:
    def loss(a: torch.Tensor, b: Any, c: torch.Tensor) -> Any:
        return (a * b["b"] * c).sum(), {"product": a * c, "note": "kept", "number": 3}

    a, b, c = torch.tensor([1.0]), {"b": torch.tensor([2.0])}, torch.tensor([3.0])
    (value, aux), grads = fdp.value_and_grad(loss, argnums=(0, 1), has_aux=True)(a, b, c)
    assert (value.item(), aux["product"].item(), aux["note"], aux["number"]) == (6.0, 3.0, "kept", 3)
    assert isinstance(grads, tuple) and grads[0].item() == 6.0 and grads[1]["b"].item() == 3.0
    only, aux = fdp.grad(loss, argnums=-1, has_aux=True)(a, b, c)
    assert only.item() == 2.0 and aux["note"] == "kept" and not aux["product"].requires_grad
    (single,), _ = fdp.grad(loss, argnums=[2], has_aux=True)(a, b, c)
    assert single.item() == 2.0


def test_complex_parameters() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    grad = fdp.grad(lambda z: (z.abs() ** 2).sum())(z)
    torch.testing.assert_close(grad, 2 * z)
    assert grad.dtype == torch.complex64
    inside = fdp.data_parallel(lambda z, b: fdp.grad(lambda z: (z.abs() ** 2).sum())(z) * fdp.pmean(b))
    torch.testing.assert_close(inside(z, torch.tensor(1 + 0j)), 2 * z)


def test_a_loss_that_depends_on_no_parameter_has_zero_gradients() -> None:
    value, grads = fdp.value_and_grad(lambda p: torch.tensor(2.0))({"w": torch.ones(2)})
    assert value.item() == 2.0 and grads["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("layout", ["transposed", "channels last", "strided", "expanded"])
def test_a_gradient_lies_in_memory_as_its_parameter_does(layout: str) -> None:
    """So that optimizers and buckets need no copy; where the parameter is not dense, contiguous."""
    x = {
        "transposed": lambda: torch.randn(3, 4).t(),
        "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "strided": lambda: torch.randn(4, 6)[:, ::2],
        "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    }[layout]()
    grad = fdp.grad(lambda p: (p**2).sum())(x)
    torch.testing.assert_close(grad, 2 * x)
    dense = layout in ("transposed", "channels last")
    assert grad.stride() == (x.stride() if dense else torch.empty(x.shape).stride())


def test_gradients_of_gradients() -> None:
    """Through the mean over ranks, which is the identity for one: MAML's inner step, a gradient penalty."""
    w, x = torch.tensor([1.0, -2.0], dtype=DOUBLE), torch.tensor([0.5, 3.0], dtype=DOUBLE)

    def inner(w: torch.Tensor) -> torch.Tensor:
        return ((w * x) ** 3).sum()

    def outer(w: torch.Tensor) -> torch.Tensor:
        return (w - 0.1 * fdp.grad(inner)(w)).square().sum()

    plain = torch.func.grad(lambda w: (w - 0.1 * torch.func.grad(inner)(w)).square().sum())(w)
    torch.testing.assert_close(fdp.grad(outer)(w), plain)
    torch.testing.assert_close(torch.func.grad(outer)(w), plain)
    step = fdp.data_parallel(lambda w, b: fdp.grad(outer)(w) * fdp.pmean(b))
    torch.testing.assert_close(step(w, torch.ones(1)), plain)
    third = fdp.grad(lambda w: fdp.grad(lambda w: fdp.grad(lambda w: (w**4).sum())(w).sum())(w).sum())(w)
    torch.testing.assert_close(third, 24 * w)


def test_gradient_of_a_gradient_through_pmean() -> None:
    w = torch.tensor([1.0, 2.0], dtype=DOUBLE)

    def loss(w: torch.Tensor) -> torch.Tensor:
        return (fdp.pmean(w**2) ** 2).sum()

    once = fdp.grad(lambda w: fdp.grad(loss)(w).sum())(w)
    torch.testing.assert_close(once, 12 * w**2)


def test_vmap_of_gradients() -> None:
    w, rows = torch.tensor([1.0, 2.0]), torch.arange(6.0).view(3, 2)

    def loss(w: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return (w * row).sum() ** 2

    expected = torch.stack([2 * (w * row).sum() * row for row in rows])
    torch.testing.assert_close(torch.vmap(fdp.grad(loss), in_dims=(None, 0))(w, rows), expected)
    values, grads = torch.vmap(fdp.value_and_grad(loss), in_dims=(None, 0))(w, rows)
    torch.testing.assert_close(grads, expected)
    torch.testing.assert_close(values, torch.stack([loss(w, row) for row in rows]))
    step = fdp.data_parallel(lambda w, b: torch.vmap(fdp.grad(loss), in_dims=(None, 0))(w, b))
    torch.testing.assert_close(step(w, rows), expected)


def test_what_plain_autograd_can_do_and_the_functional_cannot() -> None:
    """An autograd.Function without setup_context, checkpointing, saved-tensor hooks, backward of a frozen leaf."""
    from torch.utils.checkpoint import checkpoint

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grad * 2 * x

    def loss(w: torch.Tensor) -> torch.Tensor:
        return Twice.apply(checkpoint(torch.sin, w, use_reentrant=False)).sum()

    w = torch.tensor([0.5, 1.0])
    expected = 2 * w.sin() * w.cos()
    torch.testing.assert_close(fdp.grad(loss)(w), expected)
    step = fdp.data_parallel(lambda w, b: fdp.grad(loss)(w) * fdp.pmean(b))
    torch.testing.assert_close(step(w, torch.ones(1)), expected)


def test_names_and_documentation_of_the_function_are_kept() -> None:
    def my_loss(p: torch.Tensor) -> torch.Tensor:
        """Doc of my_loss."""
        return p.sum()

    for made in (fdp.grad(my_loss), fdp.value_and_grad(my_loss)):
        assert made.__name__ == "my_loss" and made.__doc__ == "Doc of my_loss."
