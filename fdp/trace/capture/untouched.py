"""Restore what a step closes over, if the step changes it while it is traced.

A step runs once, as Python, when it is traced. What it does out of the dispatcher's sight it does for real: it writes
to a NumPy array that a tensor looks at, sets `.grad`, gives a buffer of a module another tensor. No later call would
do it again. So the step is refused for what would make its results differ; and all of this is undone, but for changes
of large tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fdp.distributed.checksum import checksum_of_memory
from fdp.errors import PurityError, build_message
from fdp.pytorch.registries import REGISTRIES
from fdp.trace.calls.closure import closed_over_modules, closed_over_tensors

_MAX_KEPT = 2**16
"""Tensors of more elements are not copied: a change of one is seen by a number for its memory, and not undone.

Operators cannot change them while a step is traced; NumPy can.
"""

_MAX_READ_BYTES = 2**30
"""Of larger memory a change goes unnoticed: it may be a file that would be read as a whole."""


@contextmanager
def untouched(function: Callable[..., Any]) -> Iterator[list[str]]:
    """Undo what a step changes of the tensors and modules that it closes over.

    Args:
        function: the step.

    Yields:
        A list that describes, once the context is left, each change that makes results differ; see `check_untouched`.
    """
    tensors = list(closed_over_tensors(function).values())
    # What is seen without an operator lies in the memory of the host.
    kept = [
        (known, tensor, tensor.detach().clone())
        for known, tensor in tensors
        if _is_plain(tensor) and tensor.numel() <= _MAX_KEPT
    ]
    large = {
        tensor.untyped_storage().data_ptr(): (known, tensor, _number_of_memory(tensor))
        for known, tensor in tensors
        if _is_plain(tensor) and tensor.numel() > _MAX_KEPT and tensor.untyped_storage().nbytes() <= _MAX_READ_BYTES
    }
    flags = [(known, tensor, tensor.requires_grad, tensor.grad) for known, tensor in tensors if tensor.is_leaf]
    modules = [(known, module, _contents(module)) for known, module in closed_over_modules(function)]
    changes: list[str] = []
    try:
        yield changes
    finally:
        with torch.no_grad():
            changes += _values_put_back(kept)
        changes += (
            f"{known}: its values changed, through NumPy or another view of its memory. It is too large to have been "
            "kept, and stays as it is now"
            for known, tensor, number in large.values()
            if _number_of_memory(tensor) != number
        )
        changes += _flags_put_back(flags)
        for known, module, contents in modules:
            changes += _contents_put_back(known, module, contents)


def check_untouched(name: str, changes: Sequence[str]) -> None:
    """Refuse a step that changed what it closes over while it was traced.

    Raises:
        PurityError: names each tensor.
    """
    if changes:
        raise PurityError(
            build_message(
                f"step {name!r} changes what it closes over, out of the trace's sight.",
                changes,
                remedy="pass it as an argument and return its new value; for a module, apply, params, buffers = "
                "fdp.from_module(module).",
            )
        )


def _number_of_memory(tensor: torch.Tensor) -> int:
    """A checksum of the whole storage of a tensor."""
    memory = tensor.untyped_storage()
    return checksum_of_memory(memory.data_ptr(), memory.nbytes())


def _values_put_back(kept: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> Iterator[str]:
    for known, tensor, value in kept:
        if not _has_equal_values(tensor, value):
            tensor.copy_(value)
            yield f"{known}: its values changed, through NumPy or another view of its memory"


def _flags_put_back(flags: Iterable[tuple[str, torch.Tensor, bool, Any]]) -> Iterator[str]:
    for known, tensor, required, grad in flags:
        if tensor.requires_grad and not required:  # the other way round, a step freezes what it does not train
            tensor.requires_grad_(False)
            yield f"{known}: it came to require a gradient"
        if tensor.grad is not grad:
            tensor.grad = grad
            yield f"{known}: its .grad was set"


def _contents(module: torch.nn.Module) -> tuple[type, list[dict[str, Any]]]:
    return type(module), [dict(getattr(module, held)) for held in REGISTRIES]


def _contents_put_back(
    known: str, module: torch.nn.Module, contents: tuple[type, list[dict[str, Any]]]
) -> Iterator[str]:
    kind, tables = contents
    if type(module) is not kind:
        module.__class__ = kind
    for held, before in zip(REGISTRIES, tables, strict=True):
        now = getattr(module, held)
        changed = [key for key in {**before, **now} if before.get(key) is not now.get(key)]
        if changed:
            now.clear()
            now.update(before)
        what = held.strip("_").removesuffix("s")
        yield from (f"{known}.{key}: this {what} became another one" for key in changed)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_inference()
    )


def _has_equal_values(one: torch.Tensor, two: torch.Tensor) -> bool:
    one = one.detach()
    return torch.equal(one, two) or bool(((one == two) | ((one != one) & (two != two))).all())
