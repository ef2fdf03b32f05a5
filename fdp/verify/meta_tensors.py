"""Meta tensors that lie in memory as the tensors of a program would, and the block of memory that each lies in."""

from __future__ import annotations

from typing import Any

import torch

from fdp.pytorch.tensors import storage_id
from fdp.verify.failure import VerificationError
from fdp.verify.memory import Block, View, marks_of, view_of


class MetaTensors:
    """Tensors of shape, strides and dtype alone, which PyTorch itself makes views of and changes the shapes of."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._storages: dict[Block, Any] = {}
        self._kept: list[torch.Tensor] = []

    def allocate(self, block: Block, size: int) -> None:
        """Give a block memory of so many bytes."""
        self.enter(torch.empty(size, dtype=torch.uint8, device="meta"), block)

    def enter(self, tensor: torch.Tensor, block: Block) -> Block:
        """Register the memory of a tensor as a block, and return that."""
        storage = self._storages[block] = tensor.untyped_storage()
        self._blocks[storage_id(storage)] = block
        self._kept.append(tensor)
        return block

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor is that of a block."""
        return storage_id(tensor.untyped_storage()) in self._blocks

    def tensor(self, block: Block, start: int, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in a block, from a byte on."""
        tensor = torch.empty(0, dtype=dtype, device="meta")
        return tensor.set_(self._storages[block], start // dtype.itemsize, shape, stride)

    def view(self, tensor: torch.Tensor) -> View:
        """A tensor as a view of its block.

        Raises:
            VerificationError: it lies in no block.
        """
        block = self._blocks.get(storage_id(tensor.untyped_storage()))
        if block is None:
            raise VerificationError("a tensor lies in memory that the proof does not know")
        marks = marks_of(tensor)
        return view_of(block, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, marks)
