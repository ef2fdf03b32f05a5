"""Step time of several contenders, each in processes of its own, that take turns.

In processes of its own, as a user's training loop is: contenders that share a process share malloc's heap, and what
one of them leaves there decides how many pages the next one has to ask the system for. In turns, since machines
drift: other work, clock rates, page caches. Contenders that take turns see the same drift, so what is compared are the
ratios within a round, and the spread that is printed is the spread of those ratios.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import pathlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from cases import CASES, Case
from contenders import CONTENDERS, SamenessCheck
from launch import Crew, Place, Tell

WARMUP = 5
"""Steps before any that are timed."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Who takes turns.

    Attributes:
        name: what to call it.
        contender: a key of `contenders.CONTENDERS`.
        place: where its processes run.
        trains: whether it has to train as all others do that have to.
    """

    name: str
    contender: str
    place: Place
    trains: bool = True


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """One contender's timed steps: a list a turn, in the order of the rounds; times in seconds.

    Attributes:
        host_s: until the step returned, on the slowest rank.
        device_s: between two events on the device, around the step; None where there is no such device.
        page_faults: pages that the system had to provide during the step, on rank 0. Memory that malloc gave back
            after one step and asks for again in the next comes as such pages, about 0.7 us each.
    """

    host_s: list[list[float]]
    device_s: list[list[float]] | None
    page_faults: list[list[int]]


Quartiles = tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class _Step:
    host_s: float
    device_s: float | None
    page_faults: int


def quartiles_of(values: Sequence[float]) -> Quartiles:
    """25%, 50% and 75% of one value or more."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Quartiles:
    """Quartiles (25%, 50%, 75%) of the ratios of two contenders' times in the same round."""
    return quartiles_of([a / b for a, b in zip(ours, theirs, strict=True)])


def turns(names: Sequence[str], rounds: int) -> list[list[str]]:
    """The order in which contenders take turns: each round begins elsewhere, and every other one runs backwards.

    A contender that runs twice in a row, or after a certain other one, finds caches as it or that one left them; over
    the rounds everybody gets his share of that.

    Example:
        >>> turns("abc", 4)
        [['a', 'b', 'c'], ['c', 'b', 'a'], ['b', 'c', 'a'], ['a', 'c', 'b']]
    """
    orders = []
    for i in range(rounds):
        first = i // 2 % len(names)
        order = [*names[first:], *names[:first]]
        orders.append(order if i % 2 == 0 else order[::-1])
    return orders


def message_seconds(sends: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Send each message by turns, on all ranks; seconds of each on this one.

    The first of each makes connections, and does not count.
    """
    found: dict[str, list[float]] = {name: [] for name in sends}
    for number, order in enumerate(turns(tuple(sends), rounds + 1)):
        for name in order:
            dist.barrier()
            begun = time.perf_counter()
            sends[name]()
            if number:
                found[name].append(time.perf_counter() - begun)
    return found


def align(case: Case) -> None:
    """Waits until all ranks are here, and the device has nothing to do."""
    if case.device != "cpu":
        torch.cuda.synchronize()
    elif dist.is_initialized():
        dist.barrier()


class Trainer:
    """A contender in a process of its own. Built by all of them at once; whatever is timed, by one at a time."""

    def __init__(self, case_name: str, contender: str, dropout: bool = True):
        self._case = CASES[case_name] if dropout else CASES[case_name].without_dropout()
        self._running = CONTENDERS[contender](self._case)

    def warm_up(self, steps: int, folder: str) -> str:
        """Trains some steps, and writes the parameters to a file; returns its path."""
        for _ in range(steps):
            self._running.step()
        # To a file and not through the pipe: pickled, they would leave their traces on the heap of the steps to come.
        path = str(pathlib.Path(folder, f"{dist.get_rank() if dist.is_initialized() else 0}.pt"))
        torch.save({name: t.detach() for name, t in self._running.params().items()}, path)
        # A collection in the middle of a step would be charged to that step. Frozen, what is there by now need not be
        # looked through each time.
        gc.disable()
        self._rest()
        gc.freeze()
        return path

    def turn(self) -> list[_Step]:
        """Trains the steps of one turn, and says how the timed ones went."""
        for _ in range(self._case.waking):
            align(self._case)
            self._running.step()
        steps = [self._timed_step() for _ in range(self._case.burst)]
        align(self._case)  # or the first rank to answer would wake the parent while another one is still at its step
        self._rest()
        return steps

    def tell(self, what: Callable[..., Any], *args: Any) -> Any:
        """Calls a module-level function with the contender, and whatever else it wants."""
        return what(self._running, *args)

    def _rest(self) -> None:
        gc.collect()
        if self._on_device:
            torch.cuda.empty_cache()  # the others need the room

    @property
    def _on_device(self) -> bool:
        return self._case.device != "cpu"

    def _timed_step(self) -> _Step:
        align(self._case)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if self._on_device else (None, None)
        if begin is not None:
            begin.record()
        faults = _page_faults()
        start = time.perf_counter()
        self._running.step()
        host_s = time.perf_counter() - start
        faults = _page_faults() - faults
        device_s = None
        if begin is not None and end is not None:
            end.record()
            torch.cuda.synchronize()
            device_s = begin.elapsed_time(end) / 1e3
        return _Step(host_s, device_s, faults)


def measure_step_times(
    place: Place, case_name: str, contenders: list[str], rounds: int, tell: Tell | None = None
) -> dict[str, StepTimes]:
    """Times the contenders in fresh processes.

    Args:
        place: where each of them runs.
        case_name: a key of `cases.CASES`.
        contenders: keys of `contenders.CONTENDERS`.
        rounds: turns of each contender.
        tell: is called with the number of finished rounds.

    Returns:
        Contender name to its times.

    Raises:
        RuntimeError: the contenders do not train the same.
    """
    with contextlib.ExitStack() as stack:
        without = SamenessCheck(CASES[case_name])
        if CASES[case_name].draws:
            for name in contenders:
                with Crew(place.apart(name), Trainer, case_name, name, False) as crew:
                    warm_up(f"{name} without dropout", crew, [without.add])
        crews = {name: stack.enter_context(Crew(place.apart(name), Trainer, case_name, name)) for name in contenders}
        for name, crew in crews.items():
            if CASES[case_name].draws:
                # Its ranks still have to agree.
                warm_up(name, crew, [SamenessCheck(CASES[case_name]).add, without.refuse_alike])
            else:
                warm_up(name, crew, [without.add])
        return take_turns(crews, rounds, tell)


def measure_entries(
    case: str, entries: Sequence[Entry], rounds: int, tell: Tell, afterwards: Callable[[str, Crew], None]
) -> dict[str, StepTimes]:
    """Times contenders that do not all run in the same place, nor all train, in fresh processes.

    Args:
        case: a key of `cases.CASES` that draws no random numbers.
        entries: who takes turns.
        rounds: turns of each.
        tell: is called with the number of finished rounds.
        afterwards: called with each name and its processes once all times are taken.

    Returns:
        Name to times.

    Raises:
        RuntimeError: those that have to do not train the same.
    """
    with contextlib.ExitStack() as stack:
        same = SamenessCheck(CASES[case])
        crews = {}
        for entry in entries:
            crew = Crew(entry.place, Trainer, case, entry.contender)
            crews[entry.name] = stack.enter_context(crew)
            warm_up(entry.name, crew, [same.add] if entry.trains else [])
        times = take_turns(crews, rounds, tell)
        for name, crew in crews.items():
            afterwards(name, crew)
    return times


def take_turns(crews: Mapping[str, Crew], rounds: int, tell: Tell | None) -> dict[str, StepTimes]:
    """Times crews of a `Trainer` each; by name."""
    found: dict[str, list[list[list[_Step]]]] = {name: [] for name in crews}  # by round, rank, step
    for i, order in enumerate(turns(list(crews), rounds)):
        for name in order:
            found[name].append(crews[name].ask("turn"))
        if tell is not None:  # between two turns, so that it takes no processor time from what is timed
            tell(i + 1, rounds)
    return {name: _of_slowest(by_round) for name, by_round in found.items()}


def warm_up(name: str, crew: Crew, checks: Sequence[Callable[[str, Mapping[str, torch.Tensor]], None]]) -> None:
    """Has a crew train some steps, and shows the parameters of each rank to the checks."""
    with tempfile.TemporaryDirectory() as folder:
        paths = crew.ask("warm_up", WARMUP, folder)
        for rank, path in enumerate(paths if checks else ()):
            params = torch.load(path, map_location="cpu")
            pathlib.Path(path).unlink()
            for check in checks:
                check(f"rank {rank} of {name}", params)


def _of_slowest(by_round: list[list[list[_Step]]]) -> StepTimes:
    host, device, faults = [], [], []
    for ranks in by_round:
        # A step is over when it is over on every rank.
        host.append([max(step.host_s for step in same) for same in zip(*ranks, strict=True)])
        on_device = [[step.device_s for step in same if step.device_s is not None] for same in zip(*ranks, strict=True)]
        device.append([max(same) for same in on_device if same])
        faults.append([step.page_faults for step in ranks[0]])
    return StepTimes(host, device if device[0] else None, faults)


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
