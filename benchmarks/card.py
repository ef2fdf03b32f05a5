"""A simulated network card: a process group of one process that claims to be many, and takes as long as they would.

A message completes, as work and as future, when its bytes and latencies would have crossed a serial link: one message
after another, each for as long as the ring algorithm takes among the claimed ranks. Nothing is sent. The result is
that of ranks which all hold what this one holds: a mean is the tensor itself, a sum so many times the tensor.
Computation is real, and has its processor to itself: a thread that sleeps until the next message is due completes it.
What this leaves out: the processor time, memory traffic and jitter of a real network, and ranks slower than others.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import math
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from launch import Place
from mirror import MirrorStore
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d as c10d

_SWITCH_S = 2e-4
_SET_TIMER_SLACK = 29
"""The number of the option PR_SET_TIMERSLACK of prctl(2)."""


@dataclasses.dataclass(frozen=True)
class Link:
    """What a card claims: so many ranks on a ring, and the link from each to the next.

    Attributes:
        world_size: number of ranks.
        latency_s: seconds from one rank to the next, for a message of no bytes.
        bandwidth_bytes_per_s: bytes a second from one rank to the next.
    """

    world_size: int
    latency_s: float
    bandwidth_bytes_per_s: float

    def all_reduce_s(self, size_bytes: int) -> float:
        """Seconds of a ring all-reduce: each of 2(N - 1) hops carries one of N parts.

        Example:
            >>> Link(16, 5e-6, 1.25e9).all_reduce_s(25 * 2**20)
            0.0394716
        """
        return 2 * self._hops_s(size_bytes / self.world_size)

    def all_gather_s(self, size_bytes: int) -> float:
        """Seconds until all have the bytes of all, so many from each: N - 1 hops."""
        return self._hops_s(size_bytes)

    def scatter_s(self, size_bytes: int) -> float:
        """Seconds of a reduce-scatter or all-to-all of so many bytes on each rank: N - 1 hops of one part each."""
        return self._hops_s(size_bytes / self.world_size)

    def broadcast_s(self, size_bytes: int) -> float:
        """Seconds until the last rank of the ring has what the first one sends in small pieces, one after another."""
        return (self.world_size - 1) * self.latency_s + size_bytes / self.bandwidth_bytes_per_s

    def _hops_s(self, size_bytes: float) -> float:
        return (self.world_size - 1) * (self.latency_s + size_bytes / self.bandwidth_bytes_per_s)


def _nothing() -> None:
    """There is nothing to do."""


class _Wire:
    """The thread that completes messages: it sleeps until one is due."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[tuple[float, Callable[[], None], torch.futures.Future[Any], Any] | None]
        self._messages = queue.SimpleQueue()
        self.late_s: list[float] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="card", daemon=True)
        self._thread.start()

    def send(self, due: float, work: Callable[[], None], future: torch.futures.Future[Any], result: Any) -> None:
        """Complete a future at a time of `time.perf_counter`, and do some work before."""
        self._messages.put((due, work, future, result))

    def end(self) -> None:
        """Complete what was sent, and end."""
        self._messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(1)
        with contextlib.suppress(OSError, AttributeError):  # or a sleep lasts 50 us longer than asked for
            ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
        while (message := self._messages.get()) is not None:
            due, work, future, result = message
            try:
                work()
            except Exception as error:  # whoever waits in C++ does not see it; whoever sends next will
                self.error = error
                future.set_exception(error)
                continue
            left = due - time.perf_counter()
            if left > 0:
                time.sleep(left)
            self.late_s.append(time.perf_counter() - due)
            future.set_result(result)
            del message, work, future, result  # or the last message's memory lives until the next one comes


class CardGroup(dist.ProcessGroup):
    """The process group of a card.

    Args:
        rank: of this process.
        link: the rest of the world.
    """

    def __init__(self, rank: int, link: Link):
        super().__init__(rank, link.world_size)
        self.link = link
        self.messages: list[tuple[str, int, float]] = []
        """What was sent: kind, bytes, seconds on the link."""
        self.store: dist.Store | None = None
        self._rank, self._free, self._wire = rank, 0.0, _Wire()

    def size(self) -> int:
        """The number of ranks that the card claims."""
        return self.link.world_size

    @property
    def group_name(self) -> str:
        """The name by which functional collectives find it; a group in Python has none otherwise."""
        return str(c10d._world.pg_names[self])

    def getBackendName(self) -> str:
        """What torch asks for in messages."""
        return "card"

    def late_s(self) -> list[float]:
        """By how many seconds each message was late, oldest first."""
        return list(self._wire.late_s)

    def shutdown(self) -> None:
        """End the thread."""
        self._wire.end()

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """The reduction of as many copies of each tensor as there are ranks."""
        seconds, reduce = self.link.all_reduce_s(_bytes(tensors)), self._reduction(tensors, opts)
        return self._send("all_reduce", _bytes(tensors), seconds, list(tensors), reduce)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """Whoever sends it, it is what this rank holds."""
        return self._send("broadcast", _bytes(tensors), self.link.broadcast_s(_bytes(tensors)), list(tensors))

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """This rank's tensor from every rank."""

        def copy() -> None:
            for parts, own in zip(outputs, inputs, strict=True):
                for part in parts:
                    part.copy_(own)

        return self._send("all_gather", _bytes(inputs), self.link.all_gather_s(_bytes(inputs)), list(outputs), copy)

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist.Work:
        """This rank's tensor from every rank, in one."""

        def copy() -> None:
            output.view(self.size(), -1).copy_(own.reshape(1, -1))

        return self._send("all_gather", _bytes([own]), self.link.all_gather_s(_bytes([own])), [output], copy)

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> dist.Work:
        """This rank's part of a reduction."""
        reduce = self._reduction([output], opts)

        def part() -> None:
            output.view(-1).copy_(whole.reshape(self.size(), -1)[self._rank])
            reduce()

        return self._send("reduce_scatter", _bytes([whole]), self.link.scatter_s(_bytes([whole])), [output], part)

    def all_to_all_single(
        self, output: torch.Tensor, whole: torch.Tensor, to_sizes: list[int], from_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        """What every rank sends to this one, in equal parts."""
        if to_sizes or from_sizes:
            raise NotImplementedError("the card sends equal parts only")

        def parts() -> None:
            output.view(self.size(), -1).copy_(whole.reshape(self.size(), -1)[self._rank].expand(self.size(), -1))

        return self._send("all_to_all", _bytes([whole]), self.link.scatter_s(_bytes([whole])), [output], parts)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> dist.Work:
        """All others have waited for this one; it is over when the link has nothing to do."""
        return self._send("barrier", 0, 0.0, None)

    def _send(
        self, kind: str, size_bytes: int, seconds: float, result: Any, work: Callable[[], None] = _nothing
    ) -> dist.Work:
        if self._wire.error is not None:
            raise RuntimeError("an earlier message failed") from self._wire.error
        self._free = max(self._free, time.perf_counter()) + seconds
        if kind != "barrier":
            self.messages.append((kind, size_bytes, seconds))
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._wire.send(self._free, work, future, result)
        sent: dist.Work = _create_work_from_future(future)
        return sent

    def _reduction(self, tensors: Sequence[torch.Tensor], opts: Any) -> Callable[[], None]:
        """What is left to do with tensors that hold one rank's values, to reduce them over all."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if any(op == same for same in (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)):
            return _nothing
        if op != dist.ReduceOp.SUM:
            raise NotImplementedError(f"the card does not reduce by {op}")

        def multiply() -> None:
            # On the card's own thread: a network that adds needs no time of the processor that computes.
            with torch.no_grad():
                for tensor in tensors:
                    tensor.mul_(self.size())

        return multiply


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def plug_in(link: Link) -> CardGroup:
    """Make a card the default process group of this process, which becomes rank 0.

    Args:
        link: what it claims.

    Returns:
        The group.
    """
    dist.Backend.register_backend("card", lambda store, rank, size, timeout: CardGroup(rank, link), devices=["cpu"])
    store, timeout = MirrorStore(), datetime.timedelta(seconds=120)
    dist.init_process_group("card", store=store, rank=0, world_size=link.world_size, timeout=timeout)
    group = dist.group.WORLD
    assert isinstance(group, CardGroup)
    group.store = store  # torch holds only the part of it that is in C++
    # fdp asks by name what a backend can do: this one takes means, and reduces and scatters in one message.
    c10d._world.pg_backend_config[group] = "cpu:xccl"
    # The card's thread has to get Python's lock as soon as a message is due, whatever Python code runs then.
    sys.setswitchinterval(_SWITCH_S)
    return group


@dataclasses.dataclass(frozen=True)
class CardPlace(Place):
    """One process with a card.

    Attributes:
        link: what it claims.
    """

    link: Link = Link(1, 0.0, math.inf)

    def join(self, rank: int, port: int) -> None:
        """Plugs the card in; no other rank is asked."""
        plug_in(self.link)


def card_place(link: Link) -> CardPlace:
    """One process with a card that claims this."""
    return CardPlace(1, "card", link=link)


def lateness() -> list[float]:
    """By how many seconds each message of this process's card was completed late; of no card, nothing."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return group.late_s() if isinstance(group, CardGroup) else []


def idle_times(link: Link, sizes_bytes: Sequence[int]) -> list[tuple[int, float, float]]:
    """How long all-reduces take on a plugged-in card, for a process that has nothing else to do.

    Args:
        link: its link.
        sizes_bytes: of the messages, multiples of 4.

    Returns:
        For each, its size, the seconds that it should take, and the median of the seconds that it took.
    """
    found = []
    for size in sizes_bytes:
        tensor, times = torch.zeros(size // 4), []
        for _ in range(9):
            start = time.perf_counter()
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            times.append(time.perf_counter() - start)
        found.append((size, link.all_reduce_s(size), statistics.median(times)))
    return found
