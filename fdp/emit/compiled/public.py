"""A step through public interfaces of inductor alone, for a torch whose private ones are not what fdp knows.

The functional graph is carried out once more, with what it hides from the compiler said in operators that torch itself
has: members of a bucket are put together, sent by a functional collective, awaited, and taken apart; fused optimizers
are arithmetic; donated inputs are copied to at the end. Nothing but data flow orders that graph. So the compiler may
move a start behind computation that the plan hides it under: the results are the same, the overlap may not be. All
ranks compile the same graph under the same settings, and so send their messages in the same order.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from fdp.distributed.group import Group, registered_name, way_to_reduce
from fdp.distributed.other_ranks import OtherRanks
from fdp.emit.codegen.program import OwnMessages
from fdp.emit.compiled.barriers import FUSED, copy_into, start, wait
from fdp.emit.compiled.graph import result_name
from fdp.emit.compiled.inductor import Lowered, lower_publicly
from fdp.emit.compiled.options import Options
from fdp.emit.compiled.updates import UPDATES
from fdp.emit.memory.planning import is_scaled, slot_name
from fdp.errors import CompileError, FdpError, build_message
from fdp.plan import Bucket, Plan
from fdp.pytorch.dispatch import TorchDispatchMode
from fdp.trace import Geometry, capture_functional

VARIABLE = "FDP_PUBLIC_INDUCTOR"
_NAMESPACE = "_c10d_functional"
_UPDATES = {hidden: UPDATES.get(fused._schema.name.split("::")[-1]) for fused, hidden in FUSED.items()}
_warned = False

_PAD_BYTES = 16
"""A multiple of the size of every dtype."""


def asks_for_public() -> bool:
    """Whether the environment asks for the public entry."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def warn_of_public(why: str) -> None:
    """Say once that steps are compiled without their plan, and why."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"fdp: torch {torch.__version__} does not have the entry to inductor that fdp knows ({why}). Steps are "
            "compiled by torch._inductor.compile instead: results are the same, but the compiler orders messages as "
            f"it likes, and less of them may be hidden. Install a torch that fdp supports, or set {VARIABLE}=1, which "
            "asks for this and does not warn.",
            stacklevel=2,
        )


def compile_publicly(
    functional: fx.GraphModule, plan: Plan, group: Group, slots: Sequence[str], options: Options
) -> tuple[Lowered, OwnMessages | None]:
    """Compile a functional graph with its messages inside.

    Args:
        functional: takes inputs, constants and slots; not decomposed, effects not declared.
        plan: the plan.
        group: the ranks.
        slots: names of the last inputs, which the compiled graph does without.
        options: how.

    Returns:
        The compiled graph, and what can be known of its messages; None if it sends none.

    Raises:
        CompileError: the group is not one that torch's operators can name, or inductor cannot take an operator; or
            gradients are added up in another dtype than they are sent in: by two messages, which no compiler may
            reorder.
    """
    sends = group.size > 1 and bool(plan.buckets)
    wide = next((bucket.accumulate_dtype for bucket in plan.buckets if bucket.accumulate_dtype is not None), None)
    if sends and wide is not None:
        raise CompileError(
            build_message(
                f"step {plan.trace.name!r} has accumulate_dtype={wide} and compile=True, which the public entry of "
                "inductor does not take together.",
                remedy="leave accumulate_dtype out, or compile=False; or install a torch whose own entry fdp knows.",
            )
        )
    name = registered_name(group) if sends else ""
    if name is None:
        raise CompileError(
            build_message(
                f"step {plan.trace.name!r} cannot be compiled by the public entry of inductor: its ranks are no "
                "process group that torch.distributed has registered, and functional collectives find theirs by name.",
                remedy="make the group with torch.distributed.new_group; or compile=False.",
            )
        )
    placeholders = functional.graph.find_nodes(op="placeholder")
    count = len(placeholders) - len(slots)
    messages = _Messages(plan, group, name)

    def carry_out(*values: torch.Tensor) -> Any:
        messages.moved.clear()
        held = {slot: _Slot() for slot in slots}
        return _Carrying(functional, messages, held).run(*values, *held.values())

    inputs = [_geometry(node.meta["val"]) for node in placeholders[:count]]
    graph = capture_functional(carry_out, inputs, {})
    lowered = lower_publicly(plan.trace.name, graph, dict(options.settings))
    if not sends:
        return lowered, None
    moved = dict(messages.moved)
    return lowered, OwnMessages(lambda others: _Pretending(plan.trace.name, others, moved), _is_of_message)


def _geometry(value: torch.Tensor) -> Geometry:
    return tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype, value.device


@dataclass
class _Slot:
    """What a member's place in its bucket holds."""

    value: Any = None


class _Carrying(fx.Interpreter):
    """Runs a functional graph, with operators of torch in place of those that hide something."""

    def __init__(self, functional: fx.GraphModule, messages: _Messages, slots: Mapping[str, _Slot]) -> None:
        super().__init__(functional)
        self.messages, self.slots = messages, slots
        self.in_flight: dict[int, Callable[[], list[torch.Tensor]]] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        plan = self.messages.plan
        if target is copy_into:
            slot, value = args
            slot.value = value
        elif target is start:
            bucket = plan.buckets[args[1]]
            members = [self.slots[slot_name(bucket.index, at)].value for at in range(len(bucket.members))]
            self.in_flight[bucket.index] = self.messages.send(bucket, members)
        elif target is wait:
            for at, value in enumerate(self.in_flight.pop(args[1])()):
                self.slots[result_name(plan, args[1], at)].value = value
        else:
            # Whoever reads a slot after the message was awaited reads what came back.
            args, kwargs = fx.node.map_aggregate((args, kwargs), _value)
            if target not in _UPDATES:
                return super().call_function(target, args, kwargs)
            update = _UPDATES[target]
            if update is None:
                what = f"step {plan.trace.name!r} calls {target}, which the public entry of inductor cannot take."
                raise CompileError(build_message(what, remedy="compile=False runs it operator by operator."))
            update(*args, **dict(kwargs))
        return None


def _value(argument: Any) -> Any:
    return argument.value if isinstance(argument, _Slot) else argument


@dataclass
class _Messages:
    """Sends buckets by functional collectives.

    Attributes:
        plan: the plan.
        group: the ranks.
        name: the name that the group is registered under. (A group itself would be kept alive by the graph.)
        moved: what dtype the values have that are sent as bytes, by the number of bytes that a rank sends.
    """

    plan: Plan
    group: Group
    name: str
    moved: dict[int, torch.dtype] = field(default_factory=dict)

    def send(self, bucket: Bucket, members: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Start the message of a bucket; returns the function that waits, and takes the result apart."""
        if self.group.size == 1:
            return lambda: [member.unsqueeze(0).clone() for member in members]
        operators = getattr(torch.ops, _NAMESPACE)
        flat = [member.reshape(-1) for member in members]
        lengths = [len(each) for each in flat]
        if bucket.op in ("broadcast", "all_gather"):
            # What is only moved needs no dtype that the backend knows.
            message = self._told_apart(_together([each.view(torch.uint8) for each in flat]), bucket.dtype)
            if bucket.op == "broadcast":
                sent = operators.broadcast(message, bucket.root, self.name)
            else:
                sent = operators.all_gather_into_tensor(message, self.group.size, self.name)
            divide = None
        else:
            scaled = is_scaled(bucket, self.group.size)
            op, divide = way_to_reduce("sum" if scaled else bucket.op, bucket.dtype, bucket.device, self.group)
            if bucket.dtype.is_complex:
                flat = [torch.view_as_real(each).reshape(-1) for each in flat]
            message = _together(flat)
            if divide == "before":
                message = message / self.group.size
            sent = operators.all_reduce(message, op, self.name)

        def finish() -> list[torch.Tensor]:
            result = operators.wait_tensor(sent)
            if divide == "after":
                result = result / self.group.size
            if bucket.op == "all_gather":
                rows = result.view(self.group.size, -1).view(bucket.dtype)[:, : sum(lengths)].split(lengths, dim=1)
                return [row.reshape(-1, *member.shape) for row, member in zip(rows, members, strict=True)]
            if bucket.op == "broadcast":
                result = result.view(bucket.dtype)
            elif bucket.dtype.is_complex:
                result = torch.view_as_complex(result[: 2 * sum(lengths)].view(-1, 2))
            pieces = result[: sum(lengths)].split(lengths)
            return [piece.view(member.shape) for piece, member in zip(pieces, members, strict=True)]

        return finish

    def _told_apart(self, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Let a run without other ranks see what the bytes of a message are: other dtypes have other lengths."""
        while self.moved.setdefault(message.numel(), dtype) is not dtype:
            message = torch.cat([message, message.new_zeros(_PAD_BYTES)])
        return message


def _together(flat: Sequence[torch.Tensor]) -> torch.Tensor:
    return flat[0] if len(flat) == 1 else torch.cat(list(flat))


class _Pretending(TorchDispatchMode):
    """Answers the collectives of a compiled program on this rank alone, as `Buffer.pretend` does."""

    def __init__(self, name: str, others: OtherRanks, moved: Mapping[int, torch.dtype]) -> None:
        super().__init__()
        self.name, self.others, self.moved = name, others, moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") != _NAMESPACE:
            return func(*args, **kwargs)
        what = func._schema.name.split("::")[-1]
        message = args[0]
        if what == "wait_tensor":
            return message
        if what in ("broadcast", "broadcast_"):
            result = message if what == "broadcast_" else message.clone()
            self.others.broadcast_(result.view(self.moved[message.numel()]), args[1])
            return result
        if what in ("all_reduce", "all_reduce_"):
            result = message if what == "all_reduce_" else message.clone()
            self.others.all_reduce_(result, {"avg": "mean"}.get(args[1], args[1]))
            return result
        if what in ("all_gather_into_tensor", "all_gather_into_tensor_out"):
            dtype, size = self.moved[message.numel()], self.others.size
            gathered = message.new_empty(size * message.numel())
            self.others.all_gather_(gathered.view(size, -1).view(dtype), message.view(dtype))
            return kwargs["out"].copy_(gathered) if "out" in kwargs else gathered
        raise CompileError(
            build_message(
                f"the compiler made {func} out of the messages of step {self.name!r}, which cannot be dry-run.",
                remedy="check_trace=False compiles it without a comparison; compile=False runs it as it is.",
            )
        )


def _is_of_message(error: Exception) -> bool:
    """Whether an error was raised by a collective: the line of the generated program that it passed through says so."""
    if isinstance(error, FdpError):
        return False
    lines = (frame.line or "" for frame in traceback.extract_tb(error.__traceback__))
    return isinstance(error, dist.DistError) or any(_NAMESPACE in line for line in lines)
