"""Which values a step may return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdp import pytree
from fdp.errors import TraceError, build_message
from fdp.pytorch.tensors import is_zero_without_memory
from fdp.trace.calls.arguments import PLAIN_TYPES


def refuse_foreign_outputs(name: str, leaves: Sequence[Any], spec: pytree.Spec) -> None:
    """Refuse a step that returns a value which a program cannot compute anew at each call.

    Raises:
        TraceError: names each leaf that is a value of a tensor as a number or a text, sparse, or no plain constant.
    """
    names = pytree.names_in(spec, "output")
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    offenders = [
        f"{path}: a number read from a tensor" if type(leaf) in numbers else f"{path}: the text of a tensor"
        for path, leaf in zip(names, leaves, strict=True)
        if type(leaf) in numbers or (isinstance(leaf, str) and "FakeTensor(" in leaf)
    ]
    if offenders:
        raise TraceError(
            build_message(
                f"step {name!r} returns values of tensors as Python numbers.",
                offenders,
                remedy="return the tensor, and call .item() on what the step returns.",
            )
        )
    offenders = [
        f"{path}: a tensor of layout {leaf.layout}"
        for path, leaf in zip(names, leaves, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided
    ]
    if offenders:
        raise TraceError(
            build_message(
                f"step {name!r} returns sparse tensors.", offenders, remedy="return dense ones: x.to_dense()."
            )
        )
    offenders = [
        f"{path}: {pytree.describe_kind(leaf)}"
        for path, leaf in zip(names, leaves, strict=True)
        if not isinstance(leaf, (torch.Tensor, *PLAIN_TYPES))
    ]
    if offenders:
        raise TraceError(
            build_message(
                f"step {name!r} returns objects that are neither tensors nor plain constants.",
                offenders,
                remedy="return dicts, lists, tuples, namedtuples or dataclasses of tensors; or register the class with "
                "optree.",
            )
        )


def plain(leaf: object) -> Any:
    """A result with its lazy negation, conjugation or zeros (flags of the tensor) carried out.

    Such a tensor could not go in again.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    # Private to torch. Relied on: it is true of a tensor of zeros that takes no memory.
    if is_zero_without_memory(leaf):
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)  # a compiler drops a copy
    return leaf.resolve_conj().resolve_neg()
