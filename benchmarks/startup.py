"""How long it takes until a step is ready: with nothing compiled yet, and in new processes that find it compiled.

A start is everything beyond ordinary steps: building the contender, tracing, checking, compiling, and what else happens
only at first. It is what building and the first steps take, less as many ordinary steps. All ranks start at once, in
new processes that have imported torch, and with one cache between them, as processes of one machine have it. The first
start finds that cache empty, the second one as the first left it.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import statistics
import time
from collections.abc import Sequence

from cases import CASES
from contenders import CONTENDERS
from launch import Place, Tell, run_in
from step_time import align, turns

_FIRST, _ORDINARY = 4, 4
"""Steps that may still compile something (DDP lays its buckets out anew after the first), and steps after them."""


@dataclasses.dataclass(frozen=True)
class Starts:
    """One contender's starts, in the order of the rounds; seconds, on the slowest rank.

    Attributes:
        first_s: with an empty cache.
        second_s: each with the cache that the first start of the same round left.
    """

    first_s: list[float]
    second_s: list[float]


def excess(times: Sequence[float], ordinary: int) -> float:
    """What all but the last `ordinary` of these times take beyond as many ordinary ones.

    The first of the times is no step at all, so all of it counts.

    Example:
        >>> excess([1.0, 20.0, 2.5, 2.0, 2.0], 2)
        19.5
    """
    early, late = times[:-ordinary], times[-ordinary:]
    return sum(early) - (len(early) - 1) * statistics.median(late)


def _on_rank(case_name: str, contender: str) -> list[float]:
    """Seconds for building the contender, and for each step."""
    case = CASES[case_name]
    align(case)
    times = [time.perf_counter()]
    running = CONTENDERS[contender](case)
    for _ in range(_FIRST + _ORDINARY):
        align(case)  # a step is over when it is over on every rank
        times.append(time.perf_counter())
        running.step()
    align(case)
    times.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(times)]


def measure_starts(
    place: Place, case_name: str, contenders: list[str], rounds: int, tell: Tell | None = None
) -> dict[str, Starts]:
    """Starts contenders interleaved. The cache of each is left as its last start left it.

    Args:
        place: where they run; it has to have a folder for caches. Contenders' caches in it are emptied.
        case_name: a key of `cases.CASES`.
        contenders: keys of `contenders.CONTENDERS`.
        rounds: first starts of each contender, and second ones.
        tell: is called with the number of finished rounds.

    Returns:
        Contender name to its starts.
    """
    found = {name: Starts([], []) for name in contenders}
    for i, order in enumerate(turns(contenders, rounds)):
        for name in order:
            apart = place.apart(name)
            assert apart.cache is not None
            shutil.rmtree(apart.cache, ignore_errors=True)
            for seconds in (found[name].first_s, found[name].second_s):
                ranks = run_in(apart, _on_rank, case_name, name)
                seconds.append(max(excess(times, _ORDINARY) for times in ranks))
        if tell is not None:
            tell(i + 1, rounds)
    return found
