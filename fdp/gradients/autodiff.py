"""value_and_grad and grad over pytrees: plain autograd inside, the mean over ranks outside.

Plain autograd is used wherever it can be, because it takes what `torch.func.grad` refuses (an
`autograd.Function` without `setup_context`, activation checkpointing) and draws the random numbers that an
ordinary training loop draws. Under a `torch.func` transform (`vmap`, an outer `torch.func.grad`) the functional
route is taken, since plain autograd cannot see through those.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar

import torch

from fdp import pytree
from fdp.collectives.operators import in_forward_mode
from fdp.context.accumulating import (
    AccumulationContext,
    Pending,
    current_accumulation,
    refuse_while_accumulating,
)
from fdp.context.labelled import label_of
from fdp.errors import ArgumentError, ReplicationError, build_message
from fdp.gradients.mean_over_ranks import average, refuse_sparse
from fdp.pytorch.dynamo import breaks_graph
from fdp.pytorch.tensors import is_transformed, place_of, under_transform
from fdp.pytree import leaf_names
from fdp.state.containers import LABELS, containers_of
from fdp.tracebacks import hiding_frames

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_BREAK_REASON = (
    "fdp.value_and_grad differentiates as PyTorch runs; in a step under fdp.data_parallel(compile=True) it becomes "
    "part of one graph"
)
"""What Dynamo says where it is in a function under `torch.compile`."""


@breaks_graph(_BREAK_REASON)
def value_and_grad(
    fn: Callable[Arguments, Result], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[Arguments, tuple[Result, Any]]:
    """Make a function that returns the value of `fn` and its gradient, averaged across ranks.

    Args:
        fn: a function whose result is a 0-dim floating-point tensor (with `has_aux`, a pair of it and a
            pytree). Whatever plain autograd can differentiate may happen inside.
        argnums: the positional argument, or arguments, to differentiate with respect to; each a pytree.
        has_aux: whether `fn` returns `(value, aux)`.

    Returns:
        A function of the arguments of `fn` that returns `(value, grads)`, or `((value, aux), grads)`. `value`
        and `aux` are this rank's own; `grads` has the structure of the argument (a tuple of such for several
        `argnums`), the shapes and dtypes of its leaves, and is the mean over ranks. A leaf that is not
        floating point or complex has None there, a leaf that the value does not depend on has zeros.

    Raises:
        ArgumentError: `fn` returns no 0-dim floating-point tensor; there is nothing to differentiate; a
            gradient is sparse.
        ReplicationError: what is to be differentiated with respect to is labelled state, which is each rank's own.

    Example:
        >>> value, grads = value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
        >>> value, grads
        (tensor(5.), {'w': tensor([2., 4.])})

    References:
        JAX, `jax.value_and_grad`. Li et al., PyTorch Distributed (VLDB 2020), section 3.2.
    """
    if not callable(fn):
        raise ArgumentError(
            build_message(
                f"fdp.value_and_grad was given {type(fn).__name__}, not a function.",
                remedy="pass the loss as a function of the parameters.",
            )
        )
    numbers = _positions(argnums)

    @breaks_graph(_BREAK_REASON)
    @functools.wraps(fn)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        name = getattr(fn, "__name__", type(fn).__name__)
        chosen = [_positional(name, args, number) for number in numbers]
        trees = tuple(args[number] for number in chosen)
        leaves, spec = pytree.flatten(trees)
        differentiable = [_is_differentiable(leaf) for leaf in leaves]
        if not any(differentiable):
            raise ArgumentError(
                build_message(
                    f"the argument of {name!r} that value_and_grad was to differentiate has no floating-point leaf.",
                    remedy="pass argnums of the parameters; integer tensors and Python numbers get no gradient.",
                )
            )
        sources = [leaf for leaf, yes in zip(leaves, differentiable, strict=True) if yes]

        def call(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Any]:
            it = iter(inputs)
            full = [next(it) if yes else leaf for leaf, yes in zip(leaves, differentiable, strict=True)]
            new_args: list[Any] = list(args)
            for number, tree in zip(chosen, pytree.unflatten(spec, full), strict=True):
                new_args[number] = tree
            return _split_aux(name, fn(*new_args, **kwargs), has_aux)

        pairs = zip(chosen, trees, strict=True)
        labels = [label for number, tree in pairs for label in leaf_names(tree, _parameter_name(fn, number))]
        _refuse_labelled(leaves, spec, labels)
        names = _chosen(labels, differentiable)
        accumulation, found = current_accumulation(), list[Any]()
        if accumulation is not None:
            value, aux, found = _grad_accumulated(call, sources, names, accumulation)
        else:
            value, aux, local = (_grad_functional if under_transform() else _grad_plain)(call, sources)
            found = [average(g, source, name) for g, source, name in zip(local, sources, names, strict=True)]
        reduced = iter(found)
        grads = pytree.unflatten(spec, [next(reduced) if yes else None for yes in differentiable])
        return ((value, aux) if has_aux else value), (grads[0] if isinstance(argnums, int) else grads)

    return wrapped


@breaks_graph(_BREAK_REASON)
def grad(
    fn: Callable[Arguments, Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[Arguments, Any]:
    """Make a function that returns the gradient of `fn`, averaged across ranks.

    Args:
        fn: as for `value_and_grad`.
        argnums: as for `value_and_grad`.
        has_aux: as for `value_and_grad`.

    Returns:
        A function of the arguments of `fn` that returns `grads`, or `(grads, aux)`.

    Raises:
        ArgumentError: as for `value_and_grad`.

    Example:
        >>> grad(lambda w: (w ** 3).sum())(torch.tensor([1.0, 2.0]))
        tensor([ 3., 12.])

    References:
        JAX, `jax.grad`.
    """
    both = value_and_grad(fn, argnums, has_aux)

    @hiding_frames
    @functools.wraps(fn)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


def _positions(argnums: object) -> tuple[int, ...]:
    """The positions of the arguments to differentiate with respect to."""
    numbers = tuple(argnums) if isinstance(argnums, (list, tuple)) else (argnums,)
    if not numbers or not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise ArgumentError(
            build_message(
                f"argnums={argnums!r}.",
                remedy="pass the position of the argument to differentiate with respect to, or a tuple of positions.",
            )
        )
    return numbers


def _chosen(items: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    return [item for item, yes in zip(items, mask, strict=True) if yes]


def _is_differentiable(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _refuse_labelled(leaves: Sequence[Any], spec: pytree.Spec, names: Sequence[str]) -> None:
    """Refuse parameters that are each rank's own: a mean of gradients that ranks take at other places is a mistake."""
    offenders = []
    for leaf, container, name in zip(leaves, containers_of(leaves, spec), names, strict=True):
        if _is_differentiable(leaf) and (container is LABELS or (path := label_of(leaf)) is not None):
            offenders.append(f"{name}: labelled" if container is LABELS else f"{name}: {path}, which is labelled")
    if offenders:
        raise ReplicationError(
            build_message(
                "fdp.value_and_grad or fdp.grad, which average over ranks, was asked for gradients at parameters that "
                "are each rank's own.",
                offenders,
                remedy="for each rank's own gradient use torch.func.grad_and_value or torch.func.grad, which take the "
                "same function; for the mean, average that with fdp.pmean.",
            )
        )


def _positional(name: str, args: tuple[Any, ...], number: int) -> int:
    if not -len(args) <= number < len(args):
        raise ArgumentError(
            build_message(
                f"argnums={number}, but {name!r} was called with {len(args)} positional arguments.",
                remedy="pass what is to be differentiated by position.",
            )
        )
    return number % len(args)


def _parameter_name(fn: Callable[..., Any], number: int) -> str:
    try:
        return list(inspect.signature(fn).parameters)[number]
    except (TypeError, ValueError, IndexError):
        return f"arg{number}"


def _split_aux(name: str, out: Any, has_aux: bool) -> tuple[torch.Tensor, Any]:
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise ArgumentError(
            build_message(
                f"{name!r} was differentiated with has_aux=True and returned {type(out).__name__}.",
                remedy="return (loss, aux).",
            )
        )
    value, aux = out if has_aux else (out, None)
    if not isinstance(value, torch.Tensor) or value.dim() != 0 or not value.is_floating_point():
        got = (
            f"a {value.dtype} tensor of shape {tuple(value.shape)}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
        )
        raise ArgumentError(
            build_message(
                f"{name!r} was differentiated and returned {got}; the gradient of a 0-dim floating-point tensor "
                "is defined.",
                remedy="reduce the loss to a scalar, for instance with .mean(); return other values with has_aux=True.",
            )
        )
    return value, aux


def _grad_functional(
    call: Callable[..., tuple[torch.Tensor, Any]], sources: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Any, Sequence[torch.Tensor]]:
    # torch.func takes tensors alone as its auxiliary output, and knows other containers than optree does.
    structure: list[Any] = []

    def with_value(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        value, aux = call(inputs)
        leaves, spec = pytree.flatten(aux)
        structure[:] = [leaves, spec]
        return value, [value, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]

    grads, tensors = torch.func.grad(with_value, has_aux=True)(list(sources))
    value, *rest = tensors
    leaves, spec = structure
    unwrapped = iter(rest)
    aux = [next(unwrapped) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return value, pytree.unflatten(spec, aux), grads


def _grad_accumulated(
    call: Callable[..., tuple[torch.Tensor, Any]],
    sources: Sequence[torch.Tensor],
    labels: Sequence[str],
    accumulation: AccumulationContext,
) -> tuple[torch.Tensor, Any, list[Pending]]:
    """Add this microbatch's gradients to their totals, each as soon as it exists."""
    if under_transform():
        refuse_while_accumulating("fdp.value_and_grad, under a transform of torch.func,")
    with accumulation.differentiating(sources, labels) as totals:

        def receive(index: int, grad: torch.Tensor) -> torch.Tensor:
            refuse_sparse(grad, labels[index])
            with torch.no_grad():
                totals[index].total.add_(grad.detach())
            return totals[index].total

        def value_first(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Any]:
            value, aux = call(inputs)
            accumulation.add_value(value)
            return value, aux

        value, aux, _ = _grad_plain(value_first, sources, accumulation.scale, receive)
    accumulation.values.append(value)
    return value, aux, totals


def _grad_plain(
    call: Callable[..., tuple[torch.Tensor, Any]],
    sources: Sequence[torch.Tensor],
    scale: float = 1.0,
    receive: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, Any, Sequence[torch.Tensor]]:
    """Differentiate by plain autograd.

    Args:
        call: what is to be differentiated, of tensors in the place of `sources`.
        sources: with respect to what.
        scale: gradients are this many times as large.
        receive: takes the index and the gradient of each source that the value depends on, as soon as it is there.
    """
    # Inside an outer differentiation the leaves are part of its graph: differentiate with respect to a view, so
    # that the outer one can go on through it, and keep the graph of the gradient.
    outer = torch.is_grad_enabled() and any(source.requires_grad for source in sources)
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        inputs = [
            source.view_as(source) if outer and source.requires_grad else _fresh_leaf(source) for source in sources
        ]
        there = [_place(leaf) for leaf in inputs]
        value, aux = call(inputs)
        _follow(sources, inputs, there)
        if not value.requires_grad:
            return value, aux, [torch.zeros_like(source) for source in sources]
        keep = outer or _reaches_other_leaves(value, inputs)
        if receive is not None:
            for index, tensor in enumerate(inputs):
                tensor.register_hook(functools.partial(receive, index))
        first = None if scale == 1.0 else torch.full((), scale, dtype=value.dtype, device=value.device)
        found = torch.autograd.grad(value, inputs, first, create_graph=keep, allow_unused=True)
    grads = [torch.zeros_like(source) if grad is None else grad for grad, source in zip(found, sources, strict=True)]
    if not keep:
        value, aux = pytree.map_leaves(
            lambda x: _detached(x) if isinstance(x, torch.Tensor) and x.requires_grad else x, (value, aux)
        )
    return value, aux, grads


def _fresh_leaf(source: torch.Tensor) -> torch.Tensor:
    return (source.clone() if source.is_inference() else _detached(source)).requires_grad_()


def _place(x: torch.Tensor) -> Any:
    """The memory of a tensor, which `x.data = y` replaces. None where that is not allowed anyway."""
    return None if x.layout != torch.strided or is_transformed(x) else place_of(x)


def _follow(sources: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], there: Sequence[Any]) -> None:
    """Give a parameter the value that the function gave to the leaf in its place, by `.data =`.

    Other changes in place reach the parameter by themselves: the leaf is its memory.
    """
    for source, leaf, before in zip(sources, inputs, there, strict=True):
        if before is not None and _place(leaf) != before:
            source.data = leaf.detach()


def _detached(x: torch.Tensor) -> torch.Tensor:
    """Detach from reverse mode, but not from forward mode, as `detach` would."""
    if not in_forward_mode():
        return x.detach()
    tangent = torch.autograd.forward_ad.unpack_dual(x).tangent
    detached = x.detach()
    return detached if tangent is None else torch.autograd.forward_ad.make_dual(detached, tangent.detach())


def _reaches_other_leaves(value: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the value also depends on a tensor that an outer transform may differentiate with respect to."""
    own = {id(tensor) for tensor in inputs}
    seen, pending = set(), [value.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in own:
            return True
        pending.extend(parent for parent, _ in node.next_functions)
    return False
