"""The command: draw programs, run them on ranks, count, and write what fails as scripts. See `make fuzz`."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
import random
import time
from collections.abc import Sequence

import torch

from fuzz.generate import draw
from fuzz.pool import Job, Pool
from fuzz.program import Program
from fuzz.script import script
from fuzz.shrink import shrunk
from fuzz.verdict import Verdict

_CHUNK = 16
_TOGETHER = 8

_HARMLESS = {"turns", "same bytes"}
"""Traits of programs that run like any other."""


@dataclasses.dataclass
class Failure:
    """A program that failed, as small as it got."""

    programs: tuple[Program, ...]
    verdict: Verdict
    path: pathlib.Path | None = None


class Counts:
    """What came of all runs."""

    def __init__(self) -> None:
        self.runs: collections.Counter[str] = collections.Counter()
        self.refusals: collections.Counter[str] = collections.Counter()
        self.failures: list[Failure] = []
        self.kinds: collections.Counter[str] = collections.Counter()

    def add(self, programs: Job, verdict: Verdict) -> None:
        how = "compiled" if programs[0].options.compile else "op by op"
        self.runs[f"{how}, {verdict.status}"] += len(programs)
        if verdict.status == "refused":
            self.refusals[verdict.kind] += 1
        self.runs["excused values"] += verdict.excused
        self.runs["nothing rounded"] += verdict.exact

    def total(self, how: str) -> int:
        """How many programs ran, that plain PyTorch can run."""
        return sum(n for key, n in self.runs.items() if key.startswith(how) and "invalid" not in key)

    def summary(self) -> str:
        """How much was run, in a line."""
        return (
            f"{self.total('op by op')} programs, {self.total('compiled')} of them also compiled, "
            f"{len(self.failures)} failed"
        )

    def lines(self) -> list[str]:
        found = [f"{key}: {count}" for key, count in sorted(self.runs.items())]
        found += [f"refused, {count} times: {kind}" for kind, count in self.refusals.most_common()]
        return found + [f"FAILED, {count} times: {kind}" for kind, count in self.kinds.most_common()]


class Fuzzer:
    """Draws and runs programs for one number of ranks.

    Args:
        world: the number of ranks.
        seed: of the first program; the next one has the next number.
        share: how many programs of those that may be compiled are.
        out: where scripts go; None writes none.
        shrink_s: how long to shrink a failure; of one kind the first few are.
        without: programs with one of these traits are left out.
        device: where programs make their tensors.
    """

    def __init__(self, world: int, seed: int, share: float, out: pathlib.Path | None, shrink_s: float, counts: Counts,
                 without: frozenset[str] = frozenset(), device: str = "cpu") -> None:  # fmt: skip
        self.world, self.seed, self.share, self.out, self.shrink_s = world, seed, share, out, shrink_s
        self.counts, self.pool, self.without = counts, Pool(world, device), without
        self._waiting: dict[tuple[bool, int], list[Program]] = collections.defaultdict(list)
        self._rng = random.Random(seed)

    def chunk(self, size: int = _CHUNK) -> None:
        """Run some programs operator by operator, and compile some of those that ran."""
        programs = [draw(self.seed + n, self.world) for n in range(size)]
        self.seed += size
        programs = [program for program in programs if not program.traits & self.without]
        self._run([[program] for program in programs], self._collect)
        for waiting in self._waiting.values():
            while len(waiting) >= _TOGETHER:
                together, waiting[:] = waiting[:_TOGETHER], waiting[_TOGETHER:]
                self.compile(together)

    def _collect(self, job: Job, verdict: Verdict) -> None:
        program = job[0]
        # With all options of its own it ran; compiled it runs with those of others.
        if verdict.status == "right" and not program.traits - _HARMLESS and self._rng.random() < self.share:
            # With others that are traced as often: all are compiled anew when one of them is.
            self._waiting[program.options.donate, verdict.traces].append(program)

    def compile(self, programs: Sequence[Program]) -> None:
        """Compile programs as one step; if that fails, each by itself, so that it is known which one it was."""
        options = dataclasses.replace(programs[0].options, compile=True)
        job = [dataclasses.replace(program, options=options) for program in programs]
        [verdict] = self.pool.run([job])
        if verdict.status == "right":
            self.counts.add(job, verdict)
            return
        before = len(self.counts.failures)
        self._run([[program] for program in job], lambda job, verdict: None)
        if len(self.counts.failures) == before and verdict.status == "failed":
            self._fail(job, verdict)

    def _run(self, jobs: Sequence[Job], then: object) -> None:
        for job, verdict in zip(jobs, self.pool.run(jobs), strict=False):
            self.counts.add(job, verdict)
            if verdict.status == "failed":
                self._fail(job, verdict)
            then(job, verdict)  # type: ignore[operator]

    def _fail(self, job: Job, verdict: Verdict) -> None:
        self.counts.kinds[verdict.kind] += 1
        job = tuple(job)
        if len(job) == 1 and self.shrink_s and self.counts.kinds[verdict.kind] <= 3:

            def fails(program: Program) -> bool:
                [again] = self.pool_of(program.world).run([[program]])
                if again.status == "failed" and again.kind == verdict.kind:
                    found.append(again)
                    return True
                return False

            found = [verdict]
            job = (shrunk(job[0], fails, self.shrink_s),)
            verdict = found[-1]
        failure = Failure(job, verdict)
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            how = "compiled" if job[0].options.compile else "op-by-op"
            failure.path = self.out / f"seed-{job[0].seed}-ranks-{job[0].world}-{how}.py"
            failure.path.write_text(script(job, f"{verdict.kind}\n{verdict.text}"))
            print(f"FAILED ({verdict.kind}): {failure.path}", flush=True)
        self.counts.failures.append(failure)

    def pool_of(self, world: int) -> Pool:
        """A pool for a program that has shrunk to fewer ranks."""
        if world == self.world:
            return self.pool
        if not hasattr(self, "_fewer"):
            self._fewer: dict[int, Pool] = {}
        return self._fewer.setdefault(world, Pool(world, self.pool.device))

    def close(self) -> None:
        self.pool.close()
        for pool in getattr(self, "_fewer", {}).values():
            pool.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a program failed."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on")
    parser.add_argument(
        "--ranks",
        default="1,2,3,4",
        help="numbers of ranks, in turn: 2, or 1,2,3; four are on a mesh",
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first program; by default it is drawn, and printed"
    )
    parser.add_argument("--programs", type=int, default=None, help="stop after so many")
    parser.add_argument("--compiled", type=float, default=0.3, help="which share of programs is compiled as well")
    parser.add_argument(
        "--shrink", type=float, default=60.0, help="seconds for each failure; 0 leaves them as they are"
    )
    parser.add_argument("--without", default="", help="traits of programs to leave out: turns,same bytes,closed,data")
    parser.add_argument("--device", default="cpu", help="where programs make their tensors: cpu or cuda")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(".fuzz"), help="where scripts of failures go")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seed = random.SystemRandom().randrange(10**9) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    counts, start = Counts(), time.monotonic()
    without = frozenset(filter(None, chosen.without.split(",")))
    fuzzers = [
        Fuzzer(int(world), seed, chosen.compiled, chosen.out, chosen.shrink, counts, without, chosen.device)
        for world in chosen.ranks.split(",")
    ]
    said, turn = start, 0
    try:
        while time.monotonic() - start < chosen.seconds:
            if chosen.programs is not None and counts.total("op by op") >= chosen.programs:
                break
            fuzzers[turn % len(fuzzers)].chunk()
            turn += 1
            if time.monotonic() - said > 30:
                said = time.monotonic()
                print(f"{said - start:.0f} s: {counts.summary()}; next seed {fuzzers[0].seed}", flush=True)
    finally:
        for fuzzer in fuzzers:
            fuzzer.close()
    restarts = sum(fuzzer.pool.restarts for fuzzer in fuzzers)
    spent = time.monotonic() - start
    print(f"\n{counts.summary()}, in {spent:.0f} s; ranks were started anew {restarts} times")
    print("\n".join(counts.lines()), flush=True)
    return int(bool(counts.failures))


if __name__ == "__main__":
    raise SystemExit(main())
