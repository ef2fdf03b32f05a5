"""The labelled state of the step that is being traced: tensors that are each rank's own, by their memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from fdp.pytorch.tensors import storage_id, untransformed

_local = threading.local()


@contextmanager
def labelled_state(leaves: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Say which tensors are labelled while this thread traces a step.

    Args:
        leaves: the key path of each in the arguments, and the tensor that the step sees in its place.
    """
    before = getattr(_local, "names", None)
    _local.names = {storage_id(tensor.untyped_storage()): name for name, tensor in leaves}
    try:
        yield
    finally:
        _local.names = before


def label_of(tensor: torch.Tensor) -> str | None:
    """The key path of the labelled leaf that a tensor is, or is a view of; None if it is neither."""
    names: dict[int, str] | None = getattr(_local, "names", None)
    if not names or tensor.layout != torch.strided:
        return None
    return names.get(storage_id(untransformed(tensor).untyped_storage()))
