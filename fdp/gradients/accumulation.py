"""Gradient accumulation: add up the gradients of microbatches, and average them over ranks once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from fdp import pytree
from fdp.context.accumulating import (
    AccumulationContext,
    Pending,
    current_accumulation,
    entered,
    memory_order,
    refuse_while_accumulating,
)
from fdp.context.axis import current_axis
from fdp.errors import ArgumentError, build_message
from fdp.gradients.mean_over_ranks import average
from fdp.pytorch.dynamo import breaks_graph
from fdp.pytorch.tensors import under_transform, version_of
from fdp.pytree import leaf_names

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_BREAK_REASON = (
    "fdp.accumulate differentiates as PyTorch runs; in a step under fdp.data_parallel(compile=True) it becomes part of "
    "one graph"
)


@breaks_graph(_BREAK_REASON)
def accumulate(
    grad_fn: Callable[Arguments, Result], microbatches: int, *, batch_argnums: int | Sequence[int] = -1
) -> Callable[Arguments, Result]:
    """Make a function that does for a batch what `grad_fn` does, in the memory of a microbatch.

    The batch is cut along the first dimension into microbatches of equal length, which `grad_fn` is called with one
    after the other. Their gradients are added up and averaged across ranks once, each as soon as the last microbatch's
    backward pass has made it. For a loss that is the mean over samples the result is that of the whole batch. In a
    traced step the graph holds the calculation twice, whatever the number of microbatches: once in a loop, and once for
    the last.

    Args:
        grad_fn: what `fdp.value_and_grad` or `fdp.grad` made, or a function that calls such and returns its results:
            each gradient as it is. It must not average anything over ranks itself.
        microbatches: their number, 1 or more; the length of the batch is a multiple of it.
        batch_argnums: the positional argument, or arguments, that are cut: pytrees of tensors with one first dimension.

    Returns:
        A function of the arguments of `grad_fn` that returns what it returns, with gradients averaged over microbatches
        and ranks, and the values that were differentiated averaged over microbatches. Any other tensor (what `has_aux`
        is for) is there once for each microbatch: those of shape `[*s]` are stacked to `[microbatches, *s]`.

    Raises:
        ArgumentError: the batch cannot be cut so; `grad_fn` returns no gradient, uses one before it is whole, or
            averages over ranks.

    Example:
        >>> def loss_fn(w, x):
        ...     return ((x @ w) ** 2).mean()
        >>> import fdp
        >>> w, x = torch.tensor([1.0, 2.0]), torch.arange(8.0).reshape(4, 2)
        >>> accumulate(fdp.value_and_grad(loss_fn), microbatches=2)(w, x)
        (tensor(166.), tensor([ 96., 118.]))
        >>> fdp.value_and_grad(loss_fn)(w, x)
        (tensor(166.), tensor([ 96., 118.]))

    References:
        Li et al., PyTorch Distributed (VLDB 2020), section 3.2.4, whose no_sync() does this for a loop.
    """
    _refuse_arguments(grad_fn, microbatches)

    @breaks_graph(_BREAK_REASON)
    @functools.wraps(grad_fn)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
        name = getattr(grad_fn, "__name__", type(grad_fn).__name__)
        _refuse_nesting(args, kwargs)
        moving, with_batch = _take_out(name, args, batch_argnums)
        length = _length(name, moving, microbatches)
        accumulation = AccumulationContext(1.0 / microbatches)
        sums = _Sums(name, microbatches, accumulation)

        def go_through(pieces: list[torch.Tensor], index: torch.Tensor | None) -> Any:
            accumulation.begin()
            return sums.add(grad_fn(*with_batch(pieces), **kwargs), index)

        count, leaves = microbatches - 1, list(moving.values())
        with entered(accumulation):
            # Behind each other along a new first dimension, from which one microbatch is taken at a time.
            rows = [_in_rows(x[: count * length], count, length) for x in leaves]

            def one(index: torch.Tensor) -> None:
                go_through([take(index) for take in rows], index)

            if count and current_axis().name == "traced":
                index = torch.ops.fdp.loop_begin.default(leaves[0], count)
                one(index)
                torch.ops.fdp.loop_end.default(index)
            else:
                for i in range(count):
                    one(torch.tensor([i], device=leaves[0].device))
            last = [x[count * length :] for x in leaves]
            versions = [version_of(x) for x in last]
            go_through(last, None)
            _refuse_changes(name, {label: version_of(x) for label, x in zip(moving, last, strict=True)}, versions)
        return sums.result()

    return wrapped


class _Sums:
    """The results of the microbatches so far.

    Args:
        name: of the function that is called with them.
        microbatches: their number.
        accumulation: where gradients and values are.
    """

    def __init__(self, name: str, microbatches: int, accumulation: AccumulationContext) -> None:
        self._name, self._microbatches, self._context = name, microbatches, accumulation
        self._spec: Any = None
        self._kinds: list[Any] = []
        self._sinks: list[Any] = []

    def add(self, out: object, index: torch.Tensor | None) -> None:
        """Add the results of a microbatch, by its number, or None for the last."""
        leaves, spec = pytree.flatten(out)
        self._refuse_lost_gradients(leaves)
        averages = [self._context.average_of(leaf) for leaf in leaves]
        kinds = [
            _microbatch_invariant(leaf, average is not None) for leaf, average in zip(leaves, averages, strict=True)
        ]
        if self._spec is None:
            self._spec, self._kinds = spec, kinds
            self._sinks = [
                self._sink(leaf) if average is None else average for leaf, average in zip(leaves, averages, strict=True)
            ]
        elif (spec, kinds) != (self._spec, self._kinds):
            raise ArgumentError(
                build_message(
                    f"{self._name!r} returned something else for one microbatch than for another.",
                    [f"{self._spec}: {self._kinds}", f"{spec}: {kinds}"],
                    remedy="return the same structure, shapes and constants for every microbatch.",
                )
            )
        with torch.no_grad():
            for leaf, average, sink in zip(leaves, averages, self._sinks, strict=True):
                if not isinstance(leaf, torch.Tensor) or average is not None:
                    continue
                if index is None:
                    sink[self._microbatches - 1 :].copy_(leaf.detach().unsqueeze(0))
                else:
                    sink.index_copy_(0, index, leaf.detach().unsqueeze(0))

    def result(self) -> Any:
        """The results of all microbatches, with gradients averaged over ranks."""
        leaves = [
            average(sink.total, sink.source, sink.label) if isinstance(sink, Pending) else sink for sink in self._sinks
        ]
        return pytree.unflatten(self._spec, leaves)

    def _sink(self, leaf: object) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.zeros((self._microbatches, *leaf.shape), dtype=leaf.dtype, device=leaf.device)

    def _refuse_lost_gradients(self, leaves: Sequence[Any]) -> None:
        returned = {id(leaf) for leaf in leaves if isinstance(leaf, Pending)}
        totals = [pending for call in self._context.totals for pending in call]
        if not totals:
            raise ArgumentError(
                build_message(
                    f"{self._name!r}, which fdp.accumulate called, has no gradients to add up.",
                    remedy="pass what fdp.value_and_grad or fdp.grad made, or a function that calls it.",
                )
            )
        lost = [pending.label for pending in totals if id(pending) not in returned]
        if lost or self._context.calls != len(self._context.totals):
            raise ArgumentError(
                build_message(
                    f"{self._name!r}, which fdp.accumulate called, does not return the gradients that it takes.",
                    lost,
                    remedy="return gradients as fdp.value_and_grad gives them, and clip or change those that "
                    "fdp.accumulate returns.",
                )
            )


def _microbatch_invariant(leaf: object, is_value: bool) -> Any:
    """The properties of a result that have to be the same for every microbatch."""
    if isinstance(leaf, Pending):
        return leaf.label
    if isinstance(leaf, torch.Tensor):
        return is_value, list(leaf.shape), leaf.dtype, leaf.device
    return leaf


def _refuse_arguments(grad_fn: object, microbatches: object) -> None:
    if not callable(grad_fn):
        raise ArgumentError(
            build_message(
                f"fdp.accumulate was given {type(grad_fn).__name__}, not a function.",
                remedy="pass what fdp.value_and_grad made: accumulate(fdp.value_and_grad(loss_fn), microbatches=4).",
            )
        )
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ArgumentError(
            build_message(f"microbatches={microbatches!r}.", remedy="pass the number of microbatches, 1 or more.")
        )


def _refuse_nesting(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if current_accumulation() is not None:
        refuse_while_accumulating("fdp.accumulate")
    differentiated = current_axis().name == "traced" and any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.leaves_of((args, kwargs))
    )
    if under_transform() or differentiated:
        where = "a transform of torch.func" if under_transform() else "another differentiation"
        raise ArgumentError(
            build_message(
                f"fdp.accumulate was called inside of {where}, which cannot see through its loop.",
                remedy="call it at the top of the step, and differentiate inside of what it is given.",
            )
        )


def _take_out(
    name: str, args: tuple[Any, ...], batch_argnums: int | Sequence[int]
) -> tuple[dict[str, torch.Tensor], Callable[[list[torch.Tensor]], tuple[Any, ...]]]:
    """The tensors of the batch by key path, and a function that puts others in their place."""
    numbers = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    wrong = [n for n in numbers if isinstance(n, bool) or not isinstance(n, int) or not -len(args) <= n < len(args)]
    if wrong or not numbers or len(args) == 1:
        what = f"batch_argnums={batch_argnums!r}" if wrong or not numbers else "it has no batch"
        raise ArgumentError(
            build_message(
                f"fdp.accumulate called {name!r} with {len(args)} positional argument{'s' * (len(args) != 1)}: {what}.",
                remedy="pass the batch by position, behind the parameters: grad_fn(params, batch); a batch that a "
                "function closes over cannot be cut.",
            )
        )
    positions = sorted({number % len(args) for number in numbers})
    trees = [args[position] for position in positions]
    leaves, spec = pytree.flatten(trees)
    labels = [f"argument {p}{rest}" for p, tree in zip(positions, trees, strict=True) for rest in leaf_names(tree, "")]
    moving = {
        label: leaf for label, leaf in zip(labels, leaves, strict=True) if isinstance(leaf, torch.Tensor)
    }  # numbers and strings are the same for all

    def with_batch(pieces: list[torch.Tensor]) -> tuple[Any, ...]:
        it = iter(pieces)
        cut = pytree.unflatten(spec, [next(it) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
        new = list(args)
        for position, tree in zip(positions, cut, strict=True):
            new[position] = tree
        return tuple(new)

    return moving, with_batch


def _refuse_changes(name: str, versions: dict[str, int], before: list[int]) -> None:
    """Refuse changes of a batch: those of the last microbatch would stay in it, and those of the others be lost."""
    changed = [label for (label, now), then in zip(versions.items(), before, strict=True) if now != then]
    if changed:
        raise ArgumentError(
            build_message(
                f"{name!r}, which fdp.accumulate called, changes its batch in place.",
                changed,
                remedy="compute a new value (x * 2, not x.mul_(2)), or clone it first.",
            )
        )


def _length(name: str, moving: dict[str, torch.Tensor], microbatches: int) -> int:
    """The length of a microbatch."""
    lengths = {label: tuple(x.shape[:1]) for label, x in moving.items()}
    first = next(iter(lengths.values()), ())
    if not first or any(length != first for length in lengths.values()) or first[0] % microbatches:
        raise ArgumentError(
            build_message(
                f"fdp.accumulate cannot cut the batch of {name!r} into {microbatches} microbatches of one length.",
                [f"{label}: {list(x.shape)}" for label, x in moving.items()] or ["there is no tensor in it"],
                remedy="give every tensor of the batch the same first dimension, a multiple of the number of "
                "microbatches; pass what is the same for all samples as another argument.",
            )
        )
    return first[0] // microbatches


def _in_rows(x: torch.Tensor, count: int, length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that takes one microbatch, in the memory order of the whole batch."""
    order = memory_order(x) or list(range(x.dim()))
    if order[0] != 0:
        order = list(range(x.dim()))
    back = sorted(range(len(order)), key=order.__getitem__)
    ordered = x if back == order else x.permute(order)
    rows = ordered.unflatten(0, (count, length)) if count else ordered

    def take(index: torch.Tensor) -> torch.Tensor:
        row = rows.index_select(0, index).squeeze(0)
        return row if back == order else row.permute(back)

    return take
