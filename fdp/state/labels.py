"""Labels: `PerRank` marks a tensor of a state as each rank's own, outside of steps.

A labelled leaf is a container of one tensor, known to optree and to torch's pytrees. So the structure of a tree says
which leaves are labelled, and whatever compares structures (signatures, remembered calls) sees labels without looking
at leaves. Inside of a step there are none: it sees the tensors, in the same tree without the containers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fdp.errors import ArgumentError, build_message


@dataclass(frozen=True, eq=False, repr=False)
class PerRank:
    """A leaf of a state that is each rank's own: made by `fdp.per_rank(tree)` outside of a step.

    Inside of a step its tensor is in its place, and varies. What a step returns in its place (under the same key path)
    comes out labelled again. `fdp.save` writes each rank's, `fdp.replicate` leaves it as it is. To optree and torch's
    pytrees it is a container of one tensor, so functions that map over trees keep the label; key paths do not show it.

    Args:
        value: a tensor of any shape and dtype; shape and dtype are the same on every rank.

    Attributes:
        value: likewise.

    Raises:
        ArgumentError: `value` is no tensor.

    Example:
        >>> leaf = PerRank(torch.tensor([1.0, 2.0]))
        >>> leaf
        PerRank(tensor([1., 2.]))
        >>> leaf.value.sum()
        tensor(3.)
        >>> leaf == PerRank(torch.tensor([1.0, 2.0]))
        True
    """

    value: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.value, torch.Tensor):
            raise ArgumentError(
                build_message(
                    f"fdp.PerRank labels one tensor, and was given {type(self.value).__name__}.",
                    remedy="label the tensors of a tree with fdp.per_rank(tree), outside of a step.",
                )
            )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a PerRank has no attribute {name!r}: it is a label, and its tensor is its `value`.")

    def __repr__(self) -> str:
        text = repr(self.value)
        if isinstance(self.value, torch.Tensor) and ("\n" in text or len(text) > 70):
            dtype = str(self.value.dtype).removeprefix("torch.")
            text = f"<{dtype} {list(self.value.shape)} on {self.value.device}>"
        return f"PerRank({text})"

    def __str__(self) -> str:
        return f"PerRank({self.value})"

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same values (as `torch.equal` has it) in the same dtype."""
        if not isinstance(other, PerRank):
            return NotImplemented
        one, two = self.value, other.value
        if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
            return one is two or (one.dtype == two.dtype and torch.equal(one, two))
        return bool(one == two)

    __hash__ = None  # type: ignore[assignment]  # its tensor may change in place


def apart(label: PerRank) -> tuple[tuple[Any], None, tuple[str]]:
    """Take a label off: its tensor, nothing else, and the attribute of the tensor."""
    return (label.value,), None, ("value",)


def together(rest: None, children: Iterable[Any]) -> PerRank:
    """Put a label around a tensor."""
    # Not through the constructor: what is put into a tree for a while need not be a tensor.
    new = object.__new__(PerRank)
    (value,) = children
    object.__setattr__(new, "value", value)
    return new


torch.serialization.add_safe_globals([PerRank])  # so that torch.load(weights_only=True) takes a state with labels
