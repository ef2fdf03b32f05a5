"""Ranks that live on from job to job, and a watchdog: a hang or a death is a verdict, and new ranks take over."""

from __future__ import annotations

from collections.abc import Sequence

import cards
import torch
from ranks import Ranks, RankTimeout

from fdp.distributed.desynchronised import why_desynchronised
from fdp.distributed.group import resolve_group
from fuzz import poison
from fuzz.execute import Report, run_programs
from fuzz.program import Program
from fuzz.verdict import Verdict, judge

Job = Sequence[Program]
"""Programs that run as one step."""

_ENVIRONMENT = {"RANKS_TIMEOUT_S": "120", "FDP_AGREE_TIMEOUT_S": "240", "OMP_NUM_THREADS": "1"}
_DEADLINE_S = 300.0
_COMPILED_DEADLINE_S = 600.0


def work(jobs: Sequence[Job], device: str = "cpu") -> list[Report]:
    """Run jobs on this rank, until one has left the ranks where no message can be paired."""
    poison.fill_freed_memory()
    if device != "cpu":
        torch.set_default_device(device)
    done = []
    for job in jobs:
        report = run_programs(job)
        done.append(report)
        if why_desynchronised(resolve_group()) is not None:
            break
    return done


class Pool:
    """So many ranks.

    Args:
        world: how many.
        device: where programs make their tensors.

    Attributes:
        restarts: how many times new ones had to be started.
    """

    def __init__(self, world: int, device: str = "cpu") -> None:
        self.world, self.device, self.restarts = world, device, 0
        self._ranks: Ranks | None = None
        self._last_words = ""

    def run(self, jobs: Sequence[Job]) -> list[Verdict]:
        """Run jobs, and say what came of each."""
        verdicts: list[Verdict] = []
        while len(verdicts) < len(jobs):
            rest = jobs[len(verdicts) :]
            found = self._some(rest)
            if not found and len(rest) > 1:
                found = self._some(rest[:1])  # by itself, so that it is known which one it was
            if not found:
                found = [Verdict("failed", "hang or death", self._last_words)]
            verdicts += found
        return verdicts

    def _some(self, jobs: Sequence[Job]) -> list[Verdict]:
        """What came of the first jobs, as many as went well."""
        compiled = sum(job[0].options.compile for job in jobs)
        deadline = _DEADLINE_S + compiled * _COMPILED_DEADLINE_S
        if self._ranks is None:
            backend = "gloo" if self.device == "cpu" else cards.BACKEND
            self._ranks = Ranks(self.world, env=_ENVIRONMENT, init=self.world > 1, backend=backend)
        try:
            outcomes = self._ranks.submit(work, jobs, self.device, deadline_s=deadline)
        except RankTimeout as error:
            self._last_words = str(error)
            self._drop()
            return []
        if not all(outcome.ok for outcome in outcomes):
            self._last_words = "\n".join(outcome.describe() for outcome in outcomes)
            self._drop()
            return []
        count = min(len(outcome.value) for outcome in outcomes)
        done = [[outcome.value[n] for outcome in outcomes] for n in range(count)]
        if count < len(jobs):
            self._drop()
        return [judge(job, reports) for job, reports in zip(jobs, done, strict=False)]

    def _drop(self) -> None:
        if self._ranks is not None:
            self._ranks.kill()
            self._ranks = None
            self.restarts += 1

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
