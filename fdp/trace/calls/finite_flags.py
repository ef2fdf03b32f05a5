"""A step that returns, beside its result, what shows whether its gradients are finite; only fdp sees that."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from optree.accessors import PyTreeEntry

from fdp import pytree
from fdp.collectives.markers import all_gather
from fdp.context.axis import current_axis
from fdp.context.looking import looking
from fdp.errors import ArgumentError, build_message


@dataclass(frozen=True)
class Beside:
    """What a step returns, and flags beside it.

    To optree it is a container; the key paths of the result are what they were without it.

    Attributes:
        result: what the user's function returned.
        own: for each rank and gradient, whether all of it is finite there: [ranks, gradients].
        means: for each gradient, whether all of its mean over ranks is finite: [gradients].
        names: key paths of gradients.
    """

    result: Any
    own: torch.Tensor
    means: torch.Tensor
    names: tuple[str, ...]


class _Part(enum.Enum):
    """Which part of it something is: no string, which could be a key of the user's as well."""

    RESULT = "result"
    OWN = "own"
    MEANS = "means"


class _Entry(PyTreeEntry):
    """The step of a key path into what a step returns."""

    def __call__(self, obj: Any) -> Any:
        return getattr(obj, self.entry.value)

    def codify(self, /, node: str = "") -> str:
        """The expression for it; a user sees his own result, and what is beside it has a name of its own."""
        return node if self.entry is _Part.RESULT else f"finite({self.entry.value})"


def is_hidden(entry: PyTreeEntry) -> bool:
    """Whether a step of a key path is one that a user does not see."""
    return entry.entry is _Part.RESULT


def _parts(beside: Beside) -> tuple[tuple[Any, ...], tuple[str, ...], tuple[_Part, ...]]:
    return (beside.result, beside.own, beside.means), beside.names, tuple(_Part)


def _whole(children: Iterable[Any], names: tuple[str, ...]) -> Beside:
    result, own, means = children
    return Beside(result, own, means, names)


pytree.register_everywhere(Beside, _parts, _whole, _Entry)


class LooksAtGradients:
    """A step that returns a `Beside`.

    Args:
        step: the user's function.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        functools.update_wrapper(self, step)
        self.step = step

    def __call__(self, *args: Any) -> Beside:
        with looking() as look:
            result = self.step(*args)
        if not look.names:
            raise ArgumentError(
                build_message(
                    f"step {getattr(self.step, '__name__', 'step')!r} was made with check_finite=True, and takes no "
                    "gradient with fdp.value_and_grad or fdp.grad.",
                    remedy="take gradients with these; or leave check_finite out.",
                )
            )
        axis = current_axis()
        own = all_gather(_flags(look.own).to(torch.uint8), axis.size, axis.name, "finite")
        return Beside(result, own, _flags(look.means).to(torch.uint8), tuple(look.names))


def _flags(found: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Whether the extremes of each gradient are finite, on the device of the first."""
    device = next((x.device for pair in found for x in pair), torch.device("cpu"))
    made: dict[int, torch.Tensor] = {}
    # In one row for each kind: two thousand operators on single numbers would take longer than the numbers.
    kinds: dict[Any, list[int]] = {}
    for at, pair in enumerate(found):
        if pair:
            kinds.setdefault((pair[0].dtype, pair[0].device), []).append(at)
    for members in kinds.values():
        row = torch.stack([x for at in members for x in found[at]])
        made.update(zip(members, row.isfinite().view(-1, 2).all(1).to(device).unbind(), strict=True))
    true = torch.ones((), dtype=torch.bool, device=device)
    return torch.stack([made.get(at, true) for at in range(len(found))])
