"""Clocks: stamps that cost little to take, and the seconds between them once all is done.

A host clock reads the time. On a CUDA device the host runs ahead of the work, so a stamp is an event in the stream:
its time is when the device reached it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes time stamps."""

    def stamp(self) -> Any:
        """A stamp of now, for `seconds`."""

    def seconds(self, first: Any, stamps: Sequence[Any]) -> list[float]:
        """Seconds from one stamp to each of some others; waits until the device has reached all of them."""

    def settle(self) -> None:
        """Wait until the device is idle."""


class HostClock:
    """The clock of a step that runs on the CPU."""

    stamp = staticmethod(time.perf_counter_ns)

    def seconds(self, first: int, stamps: Sequence[int]) -> list[float]:
        return [(stamp - first) / 1e9 for stamp in stamps]

    def settle(self) -> None:
        pass


class DeviceClock:
    """The clock of a step that runs on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: torch.cuda.Event, stamps: Sequence[torch.cuda.Event]) -> list[float]:
        self.settle()
        return [first.elapsed_time(stamp) / 1e3 for stamp in stamps]

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_for(devices: Iterable[torch.device]) -> Clock:
    """The clock for work on some devices: that of the first CUDA device among them, if there is one."""
    found = sorted((device for device in devices if device.type == "cuda"), key=lambda device: device.index or 0)
    return DeviceClock(found[0]) if found else HostClock()


def cost_of_a_stamp(clock: Clock, count: int = 1000) -> float:
    """Seconds between two stamps with nothing in between."""
    stamps: list[Any] = []
    append, stamp = stamps.append, clock.stamp
    for _ in range(count):
        append(stamp())
    seconds = clock.seconds(stamps[0], stamps)
    return statistics.median(after - before for before, after in itertools.pairwise(seconds))
