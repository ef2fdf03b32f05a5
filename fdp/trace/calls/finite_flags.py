"""Wraps a step so that it returns flags together with its result: which gradients are finite, on which ranks."""

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
class WithFiniteFlags:
    """The result of a step, and flags that say which gradients are finite.

    It is a container that optree knows. The key paths that users see are those of the result alone.

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
    """The children of a `WithFiniteFlags`. No strings: these could be keys of the user's, too."""

    RESULT = "result"
    OWN = "own"
    MEANS = "means"


class _Entry(PyTreeEntry):
    """The entry of a key path that leads into a `WithFiniteFlags`."""

    def __call__(self, obj: Any) -> Any:
        return getattr(obj, self.entry.value)

    def codify(self, /, node: str = "") -> str:
        """The expression for the child: nothing is added for the result; the flags are called `finite(...)`."""
        return node if self.entry is _Part.RESULT else f"finite({self.entry.value})"


def is_hidden(entry: PyTreeEntry) -> bool:
    """Whether an entry of a key path leads to the result in a `WithFiniteFlags`, which users do not see."""
    return entry.entry is _Part.RESULT


def _flattened(made: WithFiniteFlags) -> tuple[tuple[Any, ...], tuple[str, ...], tuple[_Part, ...]]:
    return (made.result, made.own, made.means), made.names, tuple(_Part)


def _unflattened(names: tuple[str, ...], children: Iterable[Any]) -> WithFiniteFlags:
    result, own, means = children
    return WithFiniteFlags(result, own, means, names)


pytree.register_everywhere(WithFiniteFlags, _flattened, _unflattened, _Entry)


class ReturnsFiniteFlags:
    """A step that returns a `WithFiniteFlags` in place of its result.

    Args:
        step: the user's function.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        functools.update_wrapper(self, step)
        self.step = step

    def __call__(self, *args: Any) -> WithFiniteFlags:
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
        return WithFiniteFlags(result, own, _flags(look.means).to(torch.uint8), tuple(look.names))


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
