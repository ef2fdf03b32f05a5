"""Which step, schedule and call a message belongs to, so that a message never meets one of another call unseen.

Ranks pair their messages by order alone. So each call says which it is: in a header behind its first message, where
the first messages of all steps of a group are alike, so that headers meet headers; otherwise, since messages of unequal
size or kind cannot be paired at all, in a small message of its own before the first. Which of both it is follows from
the steps that have run on the group, which are the same on all ranks.

What does not fit is seen by all ranks at once. Each then tells the others through the store where it is.

The number of a call also depends on a part of the replicated state (`in_passing`). If ranks are at the same call, and
their numbers differ, then their state does.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fdp.distributed.exchange import exchange, timeout_s
from fdp.distributed.group import Group
from fdp.distributed.header import NUMEL, Header, SentNumbers, is_unanimous, numbers
from fdp.distributed.liveness.patience import known_loss
from fdp.distributed.messages import start_all_reduce
from fdp.emit.codegen.program import Program
from fdp.emit.memory.message_memory import header_numel
from fdp.errors import AgreementError, FdpError, build_message
from fdp.plan import Plan
from fdp.runtime.buffers import Buffer
from fdp.runtime.in_passing import InPassing, Look

_PATIENCE_S = 30.0
"""Seconds for which a rank waits for the positions of the others, which notice when they wait for the same message."""

_PATIENCE_WITH_THE_LOST_S = 2.0
"""The same after a failure of the backend, or where a rank is known to be lost: most often it sends no position."""

MessageKind = tuple[Any, ...]
"""The properties of a first message; those of equal kind can be paired."""


@dataclass
class Agreed:
    """An agreement of ranks on a step and its schedule.

    Attributes:
        number: of the agreement: the same on all ranks, and no other one's on the group.
        digest: of the schedule.
        compares: whether all ranks compare replicated state.
        calls: how many times it has been called on this rank.
        compared_since: the first call at which state was compared; 0 for none so far.
    """

    number: int
    digest: str
    compares: bool
    calls: int = 0
    compared_since: int = 0


@dataclass
class Attempts:
    """Counts the calls of one step that were refused on this rank before they sent anything.

    They count as calls. If they did not, and one rank went on after an error that the others did not have, its next
    call would meet the call that it left out, and so on.

    Attributes:
        refused: how many.
        begun: whether the call that is under way says which it is, so that it is counted.
    """

    refused: int = 0
    begun: bool = False

    def ends_by_error(self) -> None:
        """Record that the present call ends by an error."""
        if not self.begun:
            self.refused += 1


class Agreements(dict[tuple[str, Group], Agreed]):
    """The agreements on one step, by the digest of the schedule and the group.

    Attributes:
        attempts: its calls that were refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attempts = Attempts()


@dataclass
class _GroupHistory:
    """What has run on a process group: the same on all ranks, since each run follows its agreement.

    Attributes:
        kinds: those of their first messages.
        newest: the number of the last agreement.
    """

    kinds: set[MessageKind] = field(default_factory=set)
    newest: int = 0


_histories: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupHistory] = weakref.WeakKeyDictionary()
_histories_lock = threading.Lock()


class Order:
    """Identifies each call of a step in a message, and checks that all ranks are at the same call.

    Args:
        plan: of the step; it has a bucket.
        program: what carries it out.
        group: the ranks; more than one.
        agreed: what they agreed on.
        attempts: the calls that were refused.
    """

    def __init__(self, plan: Plan, program: Program, group: Group, agreed: Agreed, attempts: Attempts) -> None:
        self._plan, self._group, self._agreed, self._attempts = plan, group, agreed, attempts
        # Otherwise messages start without `start` being called: a recording does it.
        self._in_sight = program.recording is None
        assert group.process_group is not None
        with _histories_lock:
            self._history = _histories.setdefault(group.process_group, _GroupHistory())
        first = plan.buckets[0]
        self._carries = self._in_sight and header_numel(first, group.size) > 0
        op = "sum" if 0 in program.scaled else first.op
        alike = (op, str(first.dtype), str(first.accumulate_dtype), first.device.type, first.numel)
        # One that carries no header is like no other one.
        self._kind: MessageKind = alike if self._carries else (agreed.number,)
        self._numbers = numbers(agreed.number, agreed.digest)
        self._header: Header | None = None
        self._call_message: _CallMessage | None = None
        self._header_copies: list[_HeaderCopy] = []
        in_passing = InPassing(plan, group, agreed.number, first.device) if agreed.compares else None
        self._in_passing = None if in_passing is None or in_passing.is_empty else in_passing
        self._look: Look | None = None
        self._sent: SentNumbers = 0

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin a call: checksum the state that is due, and send the call's own message if it needs one.

        Args:
            tensors: the inputs of the call.

        Raises:
            AgreementError: at an earlier call, of which that was not known yet, another rank was elsewhere.
            ReplicationError: at an earlier call, likewise, another rank had other state.
        """
        history, agreed = self._history, self._agreed
        self._attempts.begun = True
        self._check_header_copies(tensors)
        if self._kind not in history.kinds:
            history.kinds.add(self._kind)
        history.newest = max(history.newest, agreed.number)
        agreed.calls += 1
        ahead = self._needs_call_message
        if self._in_passing is not None and (ahead or self._carries):
            agreed.compared_since = agreed.compared_since or self._call
            self._look = self._in_passing.look(tensors, self._call)
        if ahead:
            if self._call_message is None:
                self._call_message = _CallMessage(self._numbers, self._group, self._call_message_device())
            self._sent = self._call_message.start(self._call, self._mixed)
            if not self._in_sight:
                self._finish_call_message()

    def before_start(self, buffer: Buffer) -> None:
        """Before the first message of the call starts: write its header, or wait for the call's own message.

        Raises:
            AgreementError: another rank is elsewhere.
        """
        if self._needs_call_message:
            self._finish_call_message()
        elif self._carries and buffer.header is not None:
            if self._header is None:
                self._header = Header(self._numbers, buffer.header.dtype, buffer.header.device)
            self._sent = self._header.write(buffer.header, self._call, self._mixed)

    @property
    def _call(self) -> int:
        """The number of the present call; calls that were refused count."""
        return self._agreed.calls + self._attempts.refused

    @property
    def _needs_call_message(self) -> bool:
        """Whether a call is identified by a message of its own."""
        return len(self._history.kinds) > 1 or (self._in_passing is not None and self._in_sight and not self._carries)

    @property
    def _mixed(self) -> int | torch.Tensor:
        return 0 if self._look is None else self._look.mixed

    def _call_message_device(self) -> torch.device:
        """The device of that message: the CPU if possible, unless it would have to wait for a checksum on a device."""
        stays = self._in_passing is not None and self._in_passing.on_device
        device = self._plan.buckets[0].device
        return device if stays else self._group.carrier(torch.device("cpu"), device)

    @property
    def awaits_first(self) -> bool:
        """Whether the first message has to arrive before any received value is used."""
        return self._carries and len(self._history.kinds) == 1

    def after_wait(self, buffer: Buffer) -> None:
        """Check the header when the first message of the call has arrived.

        Raises:
            AgreementError: another rank is elsewhere.
            ReplicationError: another rank has other state.
        """
        if buffer.header is not None and self.awaits_first:
            self._check(buffer.header)

    def _finish_call_message(self) -> None:
        assert self._call_message is not None
        self._check(self._call_message.finish())

    def _check(self, arrived: torch.Tensor) -> None:
        calls, sent, look, self._look = self._call, self._sent, self._look, None
        if _is_on_cpu(arrived):
            if not is_unanimous(arrived, sent):
                raise self._mismatch(calls, look)
        elif not (arrived.is_cuda and torch.cuda.is_current_stream_capturing()):
            # To look at it now would wait for the device: it is looked at when it has come over.
            if look is not None:
                look.state.clear()
            self._header_copies.append(_HeaderCopy(sent, arrived, calls, look))

    def _check_header_copies(self, tensors: Sequence[torch.Tensor]) -> None:
        while self._header_copies and self._header_copies[0].has_arrived():
            copy = self._header_copies.pop(0)
            if not copy.is_unanimous():
                raise self._mismatch(copy.call, copy.look, tensors)

    def _mismatch(self, call: int, look: Look | None, inputs: Sequence[torch.Tensor] | None = None) -> FdpError:
        """The error for ranks whose headers differ.

        Args:
            call: at which.
            look: what it saw of its state, if it looked.
            inputs: those of the call that begins, if that is a later one.
        """
        returned, name, ranks = inputs is not None, self._plan.trace.name, self._group.process_group
        message = f"a message of call {call}" + (", which returned wrong results" if returned else "")
        # NCCL, once aborted, ends a message as if it had arrived. Who has raised may have gone on, and then it answers.
        lost = known_loss(ranks, message, believing=False) is not None
        found = self._exchange_positions(call, _PATIENCE_WITH_THE_LOST_S if lost else _PATIENCE_S)
        own = found[self._group.rank]
        if self._in_passing is not None and look is not None and all(each and _same(each, own) for each in found):
            now = None if inputs is None else (self._call + 1, inputs)
            return self._in_passing.error(look, self._agreed.compared_since, now)
        if not all(found) and (gone := known_loss(ranks, message, believing=True)) is not None:
            return gone
        what = f"call {call} of step {name!r} on rank {self._group.rank} met another call on another rank."
        if returned:
            what += " What it returned is wrong."
        return _mismatch_error(what, found, self._plan)

    def explain(self) -> AgreementError | None:
        """The error for a failure of the backend, if the cause is that another rank was at another call; else None."""
        found = self._exchange_positions(self._call, _PATIENCE_WITH_THE_LOST_S)
        own = found[self._group.rank]
        if all(other is None or _same(other, own) for other in found):
            return None
        what = (
            f"a message of call {self._call} of step {self._plan.trace.name!r} failed on rank "
            f"{self._group.rank}, since another rank was elsewhere."
        )
        return _mismatch_error(what, found, self._plan)

    def _exchange_positions(self, call: int, patience_s: float) -> list[dict[str, Any] | None]:
        """Exchange which call each rank is at, through the store; None for ranks that do not answer."""
        trace, group, agreed = self._plan.trace, self._group, self._agreed
        own = {
            "agreement": agreed.number, "digest": agreed.digest, "call": call, "name": trace.name,
            "source": trace.source, "refused": self._attempts.refused,
        }  # fmt: skip
        # A rank that has left a call never comes back: one key a rank is enough. A group that is made anew in the same
        # store agrees anew, under greater numbers.
        key = f"fdp/order/{group.name}/{self._history.newest}"
        found: list[Any] = [None] * group.size
        try:
            payload = json.dumps(own).encode()
            found = [
                None if text is None else json.loads(text)
                for text in exchange(group, key, payload, min(patience_s, timeout_s()), looks=False)
            ]
        except (RuntimeError, dist.DistError):
            pass  # the store is gone with the process that holds it: the others cannot be named
        found[group.rank] = own
        return found


class _CallMessage:
    """A call's own message, which identifies it: of the same size and kind for all steps of a group."""

    def __init__(self, call_numbers: list[int], group: Group, device: torch.device) -> None:
        self._header = Header(call_numbers, torch.int32, device)
        self._message = torch.zeros(NUMEL, dtype=torch.int32, device=device)
        self._group = group
        self._wait: Callable[[], None] | None = None

    def start(self, call: int, mixed: int | torch.Tensor) -> SentNumbers:
        sent = self._header.write(self._message, call, mixed)
        self._wait = start_all_reduce(self._message, "sum", self._group)
        return sent

    def finish(self) -> torch.Tensor:
        assert self._wait is not None
        self._wait()
        return self._message


class _HeaderCopy:
    """A received header on a device, while it is copied to the CPU."""

    def __init__(self, sent: SentNumbers, arrived: torch.Tensor, call: int, look: Look | None) -> None:
        self.call, self.look = call, look
        self._sent = sent if isinstance(sent, int) else None
        both = torch.stack((arrived, arrived if isinstance(sent, int) else sent))
        self._host = torch.empty(both.shape, dtype=both.dtype, device="cpu", pin_memory=both.is_cuda)
        self._host.copy_(both, non_blocking=True)
        self._event = torch.Event(arrived.device.type)
        self._event.record()

    def has_arrived(self) -> bool:
        return bool(self._event.query())

    def is_unanimous(self) -> bool:
        arrived, sent = self._host.unbind(0)
        return is_unanimous(arrived, sent if self._sent is None else self._sent)


def _is_on_cpu(arrived: torch.Tensor) -> bool:
    """Whether a tensor can be read without waiting for a device."""
    return arrived.device.type == "cpu"


def _same(one: Any, two: Any) -> bool:
    return (one["agreement"], one["digest"], one["call"]) == (two["agreement"], two["digest"], two["call"])


def _mismatch_error(what: str, found: list[dict[str, Any] | None], plan: Plan) -> AgreementError:
    offenders = []
    for rank, other in enumerate(found):
        if other is None:
            offenders.append(f"rank {rank}: did not say where it is")
        else:
            refused = f"; of its calls {other['refused']} raised and sent nothing" if other["refused"] else ""
            offenders.append(
                f"rank {rank}: at call {other['call']} of step {other['name']!r} ({other['source']}){refused}"
            )
    spoiled = " (donated state may be half updated)" if any(item.donated for item in plan.trace.inputs) else ""
    return AgreementError(
        build_message(
            what,
            offenders,
            remedy="call the same steps in the same order, and equally often, on every rank; a call that raises on one "
            f"rank counts, and all have to leave it out; start the job again from its last checkpoint{spoiled}.",
        )
    )
