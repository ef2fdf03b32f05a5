"""The figures of one case in one setting, and who of the peers is the best."""

from __future__ import annotations

import dataclasses
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cases import CASES, Case
from launch import Place, Tell
from memory import Memory, measure_memory
from step_time import Quartiles, StepTimes, measure_step_times, paired_ratio


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where cases are measured, and beside whom.

    Attributes:
        name: as on the command line.
        title: for the reader of the table.
        place: processes and their group.
        cases: what is measured.
        peers: keys of `contenders.CONTENDERS`; the best of them is what fdp is compared with.
        peer: what to call the best of them.
        also: contenders that are measured as well, and are no peers.
        ours: the contender that is compared with them.
    """

    name: str
    title: str
    place: Place
    cases: tuple[Case, ...]
    peers: tuple[str, ...]
    peer: str
    also: tuple[str, ...] = ()
    ours: str = "fdp"


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured of one case.

    Attributes:
        times: contender to its times.
        memory: contender to its memory; empty where it was not measured.
    """

    times: dict[str, StepTimes]
    memory: dict[str, Memory]

    def seconds(self, name: str, clock: str = "host") -> list[float]:
        """A contender's median step in each round by one clock, "host" or "device"."""
        times = self.times[name].host_s if clock == "host" else self.times[name].device_s
        assert times is not None
        return [statistics.median(turn) for turn in times]

    def page_faults(self, name: str) -> float:
        """A contender's median page faults a step."""
        return statistics.median(statistics.median(turn) for turn in self.times[name].page_faults)

    def fastest(self, peers: Sequence[str], clock: str = "host") -> str:
        """The peer whose median step takes the least time."""
        return min(peers, key=lambda name: statistics.median(self.seconds(name, clock)))

    def leanest(self, peers: Sequence[str]) -> str:
        """The peer that needs the least memory for tensors above persistent memory."""
        return min(peers, key=lambda name: self.memory[name].tensors_above_bytes)

    def time_ratio(self, name: str, peer: str, clock: str = "host") -> Quartiles:
        """Quartiles of a contender's time divided by a peer's in the same round."""
        return paired_ratio(self.seconds(name, clock), self.seconds(peer, clock))

    def memory_ratio(self, name: str, peer: str) -> float:
        """A contender's memory for tensors above persistent memory, of a peer's."""
        return self.memory[name].tensors_above_bytes / self.memory[peer].tensors_above_bytes

    def as_json(self) -> dict[str, Any]:
        """All that was measured, as plain dicts and lists."""
        return dataclasses.asdict(self)


def measure(
    setting: Setting, case: str, rounds: int | None, with_memory: bool, begin: Callable[[str], Tell] = lambda _: _silent
) -> Figures:
    """Measures one case in one setting.

    Args:
        setting: where, and beside whom.
        case: a key of `cases.CASES`.
        rounds: turns of each contender; None for the case's own number.
        with_memory: whether to measure memory as well.
        begin: given what is measured next; returns whom to tell how far that is.

    Returns:
        The figures of every contender.
    """
    names = [*setting.peers, *setting.also, setting.ours]
    tell = begin(f"{case}: step time of {len(names)} contenders, {setting.title}")
    times = measure_step_times(setting.place, case, names, rounds or CASES[case].rounds, tell)
    memory = {}
    for name in names if with_memory else ():
        begin(f"{case}: memory of {name}, {setting.title}")
        memory[name] = measure_memory(setting.place, case, name)
    return Figures(times, memory)


def _silent(done: int, total: int) -> None:
    """Report nothing."""


def machine() -> dict[str, Any]:
    """Where the figures were taken."""
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "processor": _processor(),
        **gpu,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
