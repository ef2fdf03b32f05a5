"""The network between the ranks of a group, measured with a few messages.

All ranks send the same messages: agreed numbers decide how many, and of which sizes.

References: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH (IJHPCA 2005);
Li et al., PyTorch Distributed (VLDB 2020), section 2.3, for why latency and bandwidth both count.
"""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fdp.distributed.exchange import come_together
from fdp.distributed.group import Group
from fdp.distributed.messages import start_all_reduce
from fdp.distributed.sending import Arrived
from fdp.errors import ArgumentError, build_message
from fdp.measure.agreed import agreed_seconds, refuse_left, talking
from fdp.measure.clock import Clock, clock_for
from fdp.measure.fit import MOST_IN_FLIGHT, fit_line, in_flight_of, ring_numbers, slowdown_of
from fdp.plan.cost.network import Network

_SIZES_BYTES = (64, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24)
"""The latency shows in the small ones, the bandwidth in the large ones, and buckets are of the sizes in between."""

_FEWEST_SIZES = 3
_SMALL_BYTES = 2**18
_REPEATS_OF_SMALL, _REPEATS_OF_LARGE, _REPEATS_BESIDE = 15, 3, 5
_BUDGET_S = 1.2
"""So long messages of growing sizes are sent; larger ones are left out then. Everything together takes about two
seconds at most, but on links on which the three smallest sizes take longer, or no longer than each other."""

_TELLS_BANDWIDTH = 2.0
"""By so many times the largest message has to be slower than the fastest one; else more bytes are sent whatever the
budget: jitter of the latency would be all that there is to tell the bandwidth from."""

_BESIDE_S = 5e-3
"""So long computing goes on beside messages, to see how much slower it is."""

_LONGEST_BESIDE_S = 10.0
"""So long it is computed beside a message, at most; what has not arrived then is waited for."""

_PIECE = {"cpu": 128, "cuda": 1024}
"""Rows of the matrices that are multiplied meanwhile: one product takes a tenth of a millisecond or so."""


@dataclass(frozen=True)
class MeasuredLink:
    """The measurements of a group.

    Attributes:
        network: between its ranks.
        start_s: seconds that a rank takes to start one message.
    """

    network: Network
    start_s: float


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, torch.dtype], MeasuredLink]] = (
    weakref.WeakKeyDictionary()
)


def measure_network(group: Group, device: torch.device, dtype: torch.dtype = torch.float32) -> Network:
    """Measure the network of a group; the result is remembered as long as the group lives.

    Args:
        group: the ranks, two or more; all of them call this together, while they use the group for nothing else.
        device: where messages come from and go to.
        dtype: of what they carry: backends add some dtypes more slowly than others.

    Returns:
        Latency and bandwidth as of a ring, how many messages the backend works on at once, and how much slower
        computing is meanwhile. The same on every rank, to the bit.

    Raises:
        ArgumentError: the group has one rank; or messages of all sizes took the same time.
        AgreementError: another rank does something else, or did not come in time.
        PeerError: another rank died or stopped answering.
    """
    return measure_link(group, device, dtype).network


def measure_link(group: Group, device: torch.device, dtype: torch.dtype = torch.float32) -> MeasuredLink:
    """As `measure_network`, together with the seconds to start a message."""
    if group.process_group is None or group.size == 1:
        raise ArgumentError(
            build_message(
                "there is no network in a world of one, so none can be measured.",
                remedy="give one by hand: fdp.Network(latency_s=, bandwidth_bytes_per_s=); or launch more ranks.",
            )
        )
    known = _known.setdefault(group.process_group, {})
    key = (device.type, dtype)
    if key not in known:
        refuse_left(group)
        come_together(group, f"the network for {dtype} on {device.type}", "is to be measured")
        with talking(group), torch.no_grad():
            known[key] = _measure(group, device, dtype)
    return known[key]


def _measure(group: Group, device: torch.device, dtype: torch.dtype) -> MeasuredLink:
    messages = _Messages(group, device, dtype)
    sizes, seconds = _time_sizes(messages)
    base_s, slope = fit_line(sizes, seconds)
    # Logarithms may differ in a last bit from one host to another, and so might the line that is taken.
    base_s, slope = agreed_seconds(group, device, [base_s, slope], "max")
    latency_s, bandwidth = ring_numbers(base_s, slope, group.size)
    many_s = messages.seconds([sizes[0]] * MOST_IN_FLIGHT, _REPEATS_OF_SMALL)
    in_flight = in_flight_of(seconds[0], many_s, MOST_IN_FLIGHT)
    slowdown = _time_beside(messages, sizes, seconds)
    start_s = statistics.median(messages.starts_s)
    (start_s,) = agreed_seconds(group, device, [start_s], "mean")
    return MeasuredLink(Network(latency_s, bandwidth, in_flight=in_flight, compute_slowdown=slowdown), start_s)


def _time_sizes(messages: _Messages) -> tuple[list[int], list[float]]:
    sizes: list[int] = []
    seconds: list[float] = []
    spent_s = 0.0
    for size_bytes in _SIZES_BYTES:
        repeats = _REPEATS_OF_SMALL if size_bytes <= _SMALL_BYTES else _REPEATS_OF_LARGE
        if len(sizes) >= _FEWEST_SIZES:
            ahead_s = seconds[-1] * size_bytes / sizes[-1] * (1 + repeats)
            if spent_s + ahead_s > _BUDGET_S and seconds[-1] >= _TELLS_BANDWIDTH * min(seconds):
                break
        sizes.append(size_bytes)
        seconds.append(messages.seconds([size_bytes], repeats))
        spent_s += seconds[-1] * (1 + repeats)
    return sizes, seconds


def _time_beside(messages: _Messages, sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Time a fixed computation alone, and beside messages that take longer than it."""
    at = next((at for at, second in enumerate(seconds) if second >= _BESIDE_S), len(seconds) - 1)
    count = min(math.ceil(_BESIDE_S / seconds[at]), MOST_IN_FLIGHT)
    together = [sizes[at]] * count
    under_way_s = messages.seconds(together, _REPEATS_BESIDE)
    compute = messages.computing()
    compute(4)
    (piece_s,) = agreed_seconds(messages.group, messages.device, [compute(16) / 16], "mean")
    pieces = max(1, int(0.5 * under_way_s / piece_s))
    alone, beside = [], []
    for _ in range(_REPEATS_BESIDE):
        alone.append(compute(pieces))
        waits = messages.start(together)
        beside.append(compute(pieces))
        messages.finish(waits)
    own = [statistics.median(alone), statistics.median(beside)]
    return slowdown_of(*agreed_seconds(messages.group, messages.device, own, "mean"))


class _Messages:
    """Messages of a group, from memory that is taken once."""

    def __init__(self, group: Group, device: torch.device, dtype: torch.dtype) -> None:
        self.group, self.device, self.dtype = group, device, dtype
        self.starts_s: list[float] = []
        self._memory = torch.zeros(max(_SIZES_BYTES) // dtype.itemsize, dtype=dtype, device=device)
        self._clock: Clock = clock_for([device])
        self._compute = self.computing() if device.type == "cpu" and self._tells() else None

    def start(self, sizes_bytes: Sequence[int], arrived: Arrived | None = None) -> list[Callable[[], None]]:
        """Start messages of some sizes at once; `arrived` is called for each arrival that the backend reports."""
        waits, begin = [], 0
        for size_bytes in sizes_bytes:
            numel = max(1, size_bytes // self.dtype.itemsize)
            if begin + numel > self._memory.numel():
                begin = 0  # messages of zeros may lie in the same memory
            before = time.perf_counter()
            waits.append(start_all_reduce(self._memory[begin : begin + numel], "sum", self.group, arrived))
            self.starts_s.append(time.perf_counter() - before)
            begin += numel
        return waits

    def _tells(self) -> bool:
        """Whether the backend reports the arrival of a message."""
        arrivals: list[bool] = []
        self.finish(self.start([_SIZES_BYTES[0]], lambda: arrivals.append(True)))
        # The one who tells may be a thread that comes after.
        end = time.perf_counter() + 0.1
        while not arrivals and time.perf_counter() < end:
            time.sleep(1e-3)
        (late,) = agreed_seconds(self.group, self.device, [0.0 if arrivals else 1.0], "max")
        return late == 0

    def finish(self, waits: Sequence[Callable[[], None]]) -> None:
        """Wait until some messages have all arrived."""
        for wait in waits:
            wait()
        self._clock.settle()

    def seconds(self, sizes_bytes: Sequence[int], repeats: int) -> float:
        """Seconds until messages that are started at once have all arrived; the same on every rank.

        The first run is not counted. Of each of the others it is counted from when the last rank came: the rank that
        waited least for the others came last. The lower quartile of the runs is taken: now and then a message waits for
        its turn on a processor, several times as long as it is on the link.

        On CPUs ranks compute meanwhile, as they do in a step: the threads of the backend want the same cores, and a
        message that is alone may take a fraction of that time.
        """
        runs = []
        for _ in range(1 + repeats):
            before = time.perf_counter()
            ended: list[float] = []
            waits = self.start(sizes_bytes, lambda ended=ended: ended.append(time.perf_counter()))  # type: ignore[misc]
            if self._compute is not None:
                while len(ended) < len(waits) and time.perf_counter() - before < _LONGEST_BESIDE_S:
                    self._compute(1)
            self.finish(waits)
            # By the time at which their arrival is reported; not when computing came to an end.
            runs.append((max(ended) if len(ended) == len(waits) else time.perf_counter()) - before)
        agreed = agreed_seconds(self.group, self.device, runs[1:], "min")
        return max(statistics.quantiles(agreed, n=4, method="inclusive")[0], 1e-9)

    def computing(self) -> Callable[[int], float]:
        """A function that computes so many equal pieces, and returns the seconds that it took."""
        rows = _PIECE.get(self.device.type, 128)
        one = torch.ones(rows, rows, device=self.device)
        out = torch.empty_like(one)

        def compute(pieces: int) -> float:
            self._clock.settle()
            first = self._clock.stamp()
            for _ in range(pieces):
                torch.mm(one, one, out=out)
            (second,) = self._clock.seconds(first, [self._clock.stamp()])
            return second

        return compute
