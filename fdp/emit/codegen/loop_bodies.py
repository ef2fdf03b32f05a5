"""Loops in a program: the body is a program of its own, whose memory is a piece of that of the program around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from fdp.emit.codegen.lines import Line
from fdp.emit.codegen.writer import Writer, bind_object, literal
from fdp.emit.memory.allocation import memory_of_body
from fdp.emit.memory.elements import with_strides
from fdp.emit.memory.layout import Layout
from fdp.trace.graph.loops import changed_operands
from fdp.trace.operators.control import Repeated


class Body(Protocol):
    """What the code of a loop reads of a program: the loop's body, or the program around it."""

    @property
    def function(self) -> Callable[..., Any]:
        """Takes a list of tensors, and what starts messages and waits for them."""

    @property
    def layouts(self) -> Mapping[torch.device, Layout]:
        """Its memory."""


def write_loop(writer: Writer, node: fx.Node) -> None:
    """Write the call that runs a loop."""
    body = writer.bodies[node.name]
    count: Any = node.args[1]
    operands: Any = node.args[2]
    uses: set[str] = set()
    device = node.meta["index_device"]
    run = bind_object(writer, _runner(body, count, device), "loop")
    text = f"{run}({literal(writer, list(operands), uses)})"
    writer.lines.append(Line(text, uses))


def blocks_of_body(
    node: str, body: Body, around: Body, blocks: Mapping[torch.device, torch.Tensor]
) -> dict[torch.device, torch.Tensor]:
    """The memory of a loop's body: a piece of that of the program around it."""
    found = {}
    for key, (device, size_bytes) in memory_of_body(node, body.layouts):
        start = around.layouts[device].offsets[key]
        found[device] = blocks[device][start : start + size_bytes]
    return found


def compiled_loop(body: Body, count: int, node: fx.Node) -> Callable[..., None]:
    """A function that runs a loop in a compiled program; it takes the tensors that the loop changes separately.

    The body was compiled for tensors that lie as those of the trace do. Those of a compiled program may lie otherwise:
    where the trace writes zeros into a tensor, a compiler goes on with a tensor of zeros of its own.
    """
    run = _runner(body, count, node.meta["index_device"])
    order = [at for group in changed_operands(node) for at in group]
    back = sorted(range(len(order)), key=order.__getitem__)
    operands: Any = node.args[2]
    strides = [operand.meta["val"].stride() for operand in operands]

    def run_apart(changed: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        given = [*changed, *others]
        lying = [with_strides(given[at], stride) for at, stride in zip(back, strides, strict=True)]
        run(lying)
        for at, tensor in zip(back, lying, strict=True):
            if at < len(changed) and tensor is not given[at]:
                given[at].copy_(tensor)

    return run_apart


def _runner(body: Body, count: int, device: torch.device) -> Repeated:
    return Repeated(body.function, tuple(torch.arange(count, device=device).split(1)))
