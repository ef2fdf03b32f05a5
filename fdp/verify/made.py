"""The check that tensors made for a program lie where its proof assumed them.

A program is proved on stand-ins, which lie where its places and layouts say. When it runs, tensors are made in
real memory: for each place, among the globals of its function, and for each bucket. Here they are checked, each time
that they are made and before the program runs. Nothing is read from memory, so it costs less than making them did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from fdp.errors import build_message
from fdp.plan.plan import Bucket, Plan
from fdp.pytorch.tensors import storage_id
from fdp.verify.bucket_memory import SCATTERS, bucket_parts, received_shape
from fdp.verify.combined import OwnRank
from fdp.verify.failure import VerificationError
from fdp.verify.program_protocol import ProgramProtocol

_AddressInStorage = tuple[int, int]
"""Where some memory begins, and which storage it belongs to (which is on one device)."""


class BufferProtocol(Protocol):
    """The part of a bucket's buffer that the check reads: see `fdp.runtime.buffers.Buffer`."""

    @property
    def bucket(self) -> Bucket: ...

    @property
    def own(self) -> torch.Tensor: ...

    @property
    def arriving(self) -> torch.Tensor | None: ...

    @property
    def result(self) -> torch.Tensor | None: ...

    @property
    def scaled(self) -> bool: ...

    @property
    def received(self) -> torch.Tensor | None: ...

    @property
    def message(self) -> torch.Tensor | None: ...

    @property
    def header(self) -> torch.Tensor | None: ...


def verify_made(
    plan: Plan,
    program: ProgramProtocol,
    blocks: Mapping[torch.device, torch.Tensor],
    buffers: Mapping[int, BufferProtocol],
) -> None:
    """Prove that the tensors made for a program are those that its proof assumed.

    Args:
        plan: that it was written for.
        program: proved; its function finds the tensors at its places.
        blocks: for each device the memory that they were made in, as bytes.
        buffers: what was made for its buckets, by index.

    Raises:
        VerificationError: a tensor lies elsewhere, or otherwise; names each.
    """
    memory: dict[torch.device, _AddressInStorage] = {}
    offenders = []
    for device, layout in program.layouts.items():
        block = blocks.get(device)
        if block is None or not _holds(block, device, layout.size_bytes):
            offenders.append(f"the memory on {device} is not {layout.size_bytes} bytes in a row")
        else:
            memory[device] = block.data_ptr(), storage_id(block.untyped_storage())
    if not offenders:
        offenders += [*_wrong_places(program, memory), *_wrong_buffers(plan, program, memory, buffers)]
    if offenders:
        raise VerificationError(
            build_message(
                f"the memory of step {plan.trace.name!r} differs from the memory that its program was proved with.",
                offenders,
                remedy="report this to the authors of fdp, with the step.",
            )
        )


def _holds(block: torch.Tensor, device: torch.device, size_bytes: int) -> bool:
    return (
        block.dtype == torch.uint8
        and block.device.type == device.type
        and device.index in (None, block.device.index)
        and block.dim() == 1
        and block.is_contiguous()
        and block.numel() >= size_bytes
    )


def _wrong_places(program: ProgramProtocol, memory: Mapping[torch.device, _AddressInStorage]) -> Iterator[str]:
    """The tensors that a function finds, and those that the bodies of its loops do."""
    where: dict[Any, _AddressInStorage] = {}
    for device, layout in program.layouts.items():
        address, storage = memory[device]
        where.update((key, (address + offset, storage)) for key, offset in layout.offsets.items())
    found: Any = program.function.__globals__
    seen = set()
    for name, place in program.places.items():
        at = where.get(place.memory)
        if at is None:
            continue  # a value that turned out not to be used: the program was proved without it
        tensor = found.get(name)
        start_bytes = place.start_bytes + place.offset * place.dtype.itemsize
        if not _is_at(tensor, at, start_bytes, place.shape, place.stride, place.dtype):
            yield f"{name} is not the place that it should be: {_tensor_text(tensor, at)}"
        elif id(tensor) in seen:
            yield f"{name} is one object with another place, and would take part in a change of its shape"
        seen.add(id(tensor))
    for node, body in program.loops.items():
        # The body of a loop has its memory out of that of the program around it; one without memory has no places.
        own = {device: where.get(("loop", node, device)) for device in body.layouts}
        if any(at is None and body.layouts[device].size_bytes for device, at in own.items()):
            yield f"the body of {node} has no memory"
        else:
            yield from _wrong_places(body, {device: at or memory[device] for device, at in own.items()})


def _wrong_buffers(
    plan: Plan,
    program: ProgramProtocol,
    memory: Mapping[torch.device, _AddressInStorage],
    buffers: Mapping[int, BufferProtocol],
) -> Iterator[str]:
    ranks = OwnRank(0, plan.trace.world_size, plan.trace.dimensions)
    starts: dict[int, _AddressInStorage] = {}
    results: dict[int, _AddressInStorage] = {}
    for device, layout in program.layouts.items():
        address, storage = memory[device]
        for bucket in plan.buckets:
            for kind, found in (("bucket", starts), ("result", results)):
                if bucket.device == device and (kind, bucket.index) in layout.offsets:
                    found[bucket.index] = address + layout.offsets[kind, bucket.index], storage
    if buffers.keys() != starts.keys():
        yield f"buckets {sorted(buffers)} were made, and not {sorted(starts)}"
        return
    for index, at in starts.items():
        bucket, buffer = plan.buckets[index], buffers[index]
        size = ranks.along(bucket.along).size
        parts, dtype = bucket_parts(bucket, size), bucket.dtype
        if buffer.bucket != bucket:
            yield f"bucket {index} is taken for another one"
        if buffer.scaled != (index in program.scaled):
            yield f"bucket {index} is {'' if buffer.scaled else 'not '}taken for one that holds shares of means"
        own = parts.sent if parts.whole else parts.numel
        message = buffer.own if buffer.message is None else buffer.message
        received = None if index in program.gathered else received_shape(bucket, size)
        header, itself = (parts.header,) if parts.header else None, (parts.arriving,) if parts.whole else None
        apart = results.get(index, (-1, -1))  # where nothing lies
        # What a reduce-scatter adds up arrives in its bucket, and the sum is the result; else what arrives is it.
        adds = bucket.op in SCATTERS
        expected: dict[str, tuple[torch.Tensor | None, _AddressInStorage, int, tuple[int, ...] | None]] = {
            "what this rank contributes": (buffer.own, at, 0, (own,)),
            "what is sent": (message, at, 0, (parts.sent,)),
            "what arrives": (buffer.arriving, at if adds else apart, parts.behind_bytes if adds else 0, received),
            "the result": (buffer.result, apart, 0, (parts.result,) if adds else None),
            "what is received": (buffer.received, at, parts.behind_bytes, itself),
            "the header": (buffer.header, at, parts.numel * parts.itemsize, header),
        }
        for what, (tensor, piece, start_bytes, shape) in expected.items():
            if shape is None:
                right = tensor is None
            else:
                stride = (1,) if len(shape) == 1 else (shape[1], 1)
                right = _is_at(tensor, piece, start_bytes, shape, stride, dtype)
            if not right:
                yield f"{what} of bucket {index} is not what it should be: {_tensor_text(tensor, piece)}"


def _is_at(
    tensor: torch.Tensor | None,
    memory: _AddressInStorage,
    start_bytes: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> bool:
    """Whether a tensor begins at a byte of some memory, with a shape, strides and dtype, and no lazy conjugate."""
    return (
        tensor is not None
        # Of no elements, it lies nowhere.
        and (tensor.data_ptr() == memory[0] + start_bytes or 0 in shape)
        and tensor.shape == shape
        and tensor.stride() == stride
        and tensor.dtype is dtype
        and storage_id(tensor.untyped_storage()) == memory[1]
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _tensor_text(tensor: object, memory: _AddressInStorage) -> str:
    if not isinstance(tensor, torch.Tensor):
        return "it is missing"
    where = f"{tensor.data_ptr() - memory[0]} bytes from the beginning of its piece"
    if storage_id(tensor.untyped_storage()) != memory[1]:
        where = "in other memory"
    return f"{tensor.dtype}, shape {list(tensor.shape)}, strides {list(tensor.stride())}, {where}"
