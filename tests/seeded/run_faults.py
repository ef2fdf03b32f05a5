"""Make each seeded fault by itself, in a process of its own, and see which numbers change and what the validator says.

    make faults                                every fault that steps meet operator by operator
    make faults ARGS="--compiled"              those of compiled steps
    make faults ARGS="place wait --workers 1"   those with one of these in their name or group

A fault that changes a number has to be caught before the number is computed. The exit code is 1 if one is not, or if
the validator refuses a program that has no fault.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import multiprocessing.connection
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fault_reports import Outcome, Report
from seeded_fault import Fault
from seeded_faults import COMPILED_FAULTS, COMPILED_PROGRAMS, FAULTS

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "oracles")]
PACKAGE = ROOT / "fdp"
DEADLINE_S = 150.0
_PRELOADED = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.utils.checkpoint",
    "optree",
    "rich.console",
)


def source_with(fault: Fault) -> str:
    """The text of a file with a mistake in it.

    Raises:
        ValueError: what the mistake replaces is not there, or more than once.
    """
    source = (PACKAGE / fault.file).read_text()
    if (count := source.count(fault.old)) != 1:
        raise ValueError(f"fault {fault.name!r}: what it replaces is {count} times in {fault.file}")
    return source.replace(fault.old, fault.new)


class _Seeding(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module with a mistake in it."""

    def __init__(self, fault: Fault) -> None:
        self.module = "fdp." + fault.file.removesuffix(".py").replace("/", ".")
        self._source = source_with(fault)
        importlib.machinery.SourceFileLoader.__init__(self, self.module, str(PACKAGE / fault.file))

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.module else None

    def get_code(self, fullname: str) -> Any:
        return compile(self._source, self.path, "exec")


_CAN_BE_FAULTY = ("fdp.timeline", "fdp.plan", "fdp.verify", "fdp.emit", "fdp.runtime")
_FROM_BELOW = ("fdp.distributed.by_collective", "fdp.distributed.header")


def _forget_what_can_be_faulty() -> None:
    """Let what plans, emits and verifies be imported once more, from sources with a mistake in them.

    What is for compiled steps stays: it defines operators, which torch takes once in a process.
    """
    for name in list(sys.modules):
        part = ".".join(name.split(".")[:2])
        if name in ("emitted_runs", *_FROM_BELOW) or (
            part in _CAN_BE_FAULTY and not name.startswith("fdp.emit.compiled")
        ):
            del sys.modules[name]


def run_one(
    fault: Fault | None, programs: Sequence[str], prepared: Mapping[str, Any] | None, tell: Callable[[Any], None]
) -> None:
    """Run programs in this process.

    Args:
        fault: what to make first.
        programs: names of those to run.
        prepared: the traces of programs that are to run operator by operator. None to compile them: then this process
            must not have imported fdp yet.
        tell: called with (name, `Outcome`), twice for each program: before its numbers are computed, which may end this
            process, and after.
    """
    if prepared is None:
        assert "fdp" not in sys.modules, "fdp has been imported without the fault"
    else:
        _forget_what_can_be_faulty()
    seeding = None if fault is None else _Seeding(fault)
    if seeding is not None:
        sys.meta_path.insert(0, seeding)
    import emitted_runs
    import traced_programs

    assert seeding is None or sys.modules[seeding.module].__loader__ is seeding, "the fault was not imported"
    ways = emitted_runs.ways_of(prepared is None)
    for name in programs:
        one = traced_programs.prepare(name) if prepared is None else prepared[name]
        for outcome in emitted_runs.outcomes_of(one, ways):
            tell((name, outcome))


def _child(to: Any, job: _Running, prepared: Mapping[str, Any] | None) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        run_one(job.fault, job.left, prepared, to.send)
        to.send(None)
    except BaseException as error:
        to.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


@dataclasses.dataclass
class _Running:
    """A process that runs programs under a fault, and its reports so far."""

    fault: Fault | None
    process: Any
    end: float
    outcomes: dict[str, Outcome]
    left: list[str]

    def report(self, error: str | None = None) -> Report:
        return Report(self.fault, self.outcomes, error)


def run_all(
    faults: Sequence[Fault | None],
    programs: Sequence[str] = (),
    compiled: bool = False,
    workers: int = 2,
    shown_by: Mapping[str, str] | None = None,
) -> Iterator[Report]:
    """Make faults one at a time, each in a process that is forked from this one.

    Args:
        faults: None for the sources as they are.
        programs: names of those to run; all if empty.
        compiled: whether steps are compiled.
        workers: how many processes at a time.
        shown_by: for faults by their names the one program to run.

    Returns:
        A report for each fault, as they come.
    """
    for name in _PRELOADED:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    prepared = None
    if compiled:
        names = list(programs or COMPILED_PROGRAMS)
    else:
        import traced_programs

        names = list(programs or traced_programs.PROGRAMS)
        prepared = {name: traced_programs.prepare(name) for name in names}
    context = multiprocessing.get_context("fork")
    one = {} if shown_by is None else shown_by
    pending = [
        _Running(fault, None, 0.0, {}, [one[fault.name]] if fault is not None and fault.name in one else list(names))
        for fault in faults
    ]
    running: dict[Any, _Running] = {}
    try:
        while pending or running:
            while pending and len(running) < workers:
                job = pending.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                job.process = context.Process(target=_child, args=(theirs, job, prepared), daemon=True)
                job.process.start()
                theirs.close()
                job.end = time.monotonic() + DEADLINE_S
                running[ours] = job
            ready = multiprocessing.connection.wait(list(running), timeout=1.0)
            for ours, job in list(running.items()):
                over, error = False, None
                if ours in ready:
                    over, error = _hear(ours, job)
                elif time.monotonic() > job.end:
                    job.process.kill()
                    over, error = True, f"the process did not end within {DEADLINE_S:g} s"
                if not over:
                    continue
                job.process.join()
                del running[ours]
                if error is None and job.left:  # it died in the middle of a program: the others are still to be run
                    pending.insert(0, job)
                else:
                    yield job.report(error)
    finally:
        for job in running.values():
            job.process.kill()


def _hear(pipe: Any, job: _Running) -> tuple[bool, str | None]:
    """Take what a process tells; whether it is over, and why nothing more can be run."""
    try:
        report = pipe.recv()
    except EOFError:
        job.process.join()
        if not job.left or job.left[0] not in job.outcomes:
            return True, f"the process died with exit code {job.process.exitcode}"
        name = job.left.pop(0)
        raised = f"{job.outcomes[name].raised}, with exit code {job.process.exitcode}"
        job.outcomes[name] = dataclasses.replace(job.outcomes[name], raised=raised)
        return True, None
    if report is None or isinstance(report, str):
        job.left = []
        return True, report
    name, outcome = report
    if name in job.outcomes and job.left[0] == name:
        job.left.pop(0)
    job.outcomes[name] = outcome
    return False, None


def selected(words: Sequence[str], compiled: bool) -> list[tuple[str, Fault]]:
    """The faults with one of some words in their name or group, with their group."""
    table = COMPILED_FAULTS if compiled else FAULTS
    every = [(group, fault) for group, faults in table.items() for fault in faults]
    return [(g, f) for g, f in every if not words or any(word in f"{g} {f.name}" for word in words)]


def _line(group: str, report: Report, details: bool) -> str:
    assert report.fault is not None
    shown = f"{', '.join(report.changed[:3])}{', ...' if len(report.changed) > 3 else ''}"
    caught = sum(name not in report.uncaught for name in report.changed)
    text = (
        f"{group:10} {report.fault.name:44} {len(report.changed):3} changed ({shown or '-'}), {caught} of them caught, "
        f"{len(report.raised)} raised, {len(report.refused)} refused: {report.verdict}"
    )
    if report.error is not None:
        text += f"\n    {report.error.splitlines()[-1]}"
    listed = report.outcomes if details else report.uncaught
    for name in listed:
        found = report.outcomes[name]
        text += "".join(
            f"\n    {name}: {what} {value}"
            for what, value in (("numbers:", found.numbers), ("raised:", found.raised), ("refused:", found.refusal),
                                ("the user gets:", found.user))
            if value is not None
        )  # fmt: skip
    return text


def main() -> int:
    """Run what the command line asks for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults with one of these in their name or group")
    parser.add_argument("--compiled", action="store_true", help="compiled steps")
    parser.add_argument("--programs", nargs="+", default=[], help="only these programs")
    parser.add_argument(
        "--shown-by", nargs="+", default=[], metavar="FAULT=PROGRAM", help="run these faults on these programs alone"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--details", action="store_true", help="print what became of each program")
    options = parser.parse_args()
    chosen = selected(options.words, options.compiled)
    began, reports = time.monotonic(), list[Report]()
    groups = {fault.name: group for group, fault in chosen}
    faults: list[Fault | None] = [None, *(fault for _, fault in chosen)]
    shown_by = dict(pair.split("=") for pair in options.shown_by)
    for report in run_all(faults, options.programs, options.compiled, options.workers, shown_by):
        if report.fault is None:
            wrong = {n: o for n, o in report.outcomes.items() if o.numbers or o.raised or o.refusal or o.user}
            print(f"without a fault: {wrong or report.error or 'every number is right, no program is refused'}")
            sound = not wrong and report.error is None
        else:
            reports.append(report)
            print(_line(groups[report.fault.name], report, options.details), flush=True)
    count = {verdict: sum(r.verdict == verdict for r in reports) for verdict in sorted({r.verdict for r in reports})}
    changed = sum(bool(report.changed) for report in reports)
    print(f"{len(reports)} faults in {time.monotonic() - began:.0f} s; {changed} change a number; {count}")
    return int(not sound or any(report.uncaught for report in reports))


if __name__ == "__main__":
    sys.exit(main())
