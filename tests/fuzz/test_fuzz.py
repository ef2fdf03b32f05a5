"""Part of `make fuzz`, with seeds that do not change; and the fuzzer itself: a fault is found, and made small."""

from __future__ import annotations

import dataclasses
import pathlib
import random
from collections.abc import Iterator

import pytest
import ranks
import torch
from forked import Forked
from samples import ALL_SAMPLES, exhaustive

from fdp.trace import OutsideValues
from fuzz import plain
from fuzz.author import Author, Refused, place
from fuzz.compare import Judge
from fuzz.execute import Report, run_programs
from fuzz.fault import emitter_takes_the_minimum
from fuzz.generate import draw
from fuzz.pool import Job, work
from fuzz.program import Leaf, Options, Program, Result, flat
from fuzz.refusals import reason
from fuzz.script import script
from fuzz.shrink import shrunk
from fuzz.verdict import Verdict, judge

OPEN: frozenset[str] = frozenset()
"""Traits of programs that fdp is known to be wrong about. Empty it when the defects are fixed."""


def drawn(world: int, count: int) -> Iterator[Program]:
    """The first programs for so many ranks."""
    programs = (draw(seed, world) for seed in range(count))
    return (program for program in programs if not program.traits & OPEN)


def run(world: int, jobs: list[Job]) -> list[Verdict]:
    """What comes of jobs, on the session's ranks."""
    found = ranks.run(world, work, jobs, deadline_s=400.0)
    assert all(len(reports) == len(jobs) for reports in found), [reports[-1].text for reports in found]
    return [judge(job, reports) for job, reports in zip(jobs, zip(*found, strict=True), strict=True)]


def look_at(jobs: list[Job], verdicts: list[Verdict], folder: pathlib.Path) -> None:
    """No verdict is a failure; of each that is, a script is left."""
    failed = []
    for job, verdict in zip(jobs, verdicts, strict=True):
        if verdict.status == "failed":
            path = folder / f"seed-{job[0].seed}.py"
            path.write_text(script(job, verdict.text))
            failed.append(f"{path}: {verdict.kind}\n{verdict.text}")
    assert not failed, "\n\n".join(failed)


@pytest.mark.parametrize(("world", "count"), [(1, 60), (2, 24), pytest.param(3, 18, marks=exhaustive)])
def test_random_programs_compute_what_plain_pytorch_computes(world: int, count: int, tmp_path: pathlib.Path) -> None:
    jobs: list[Job] = [[program] for program in drawn(world, count if ALL_SAMPLES else count // 3)]
    verdicts = run(world, jobs)
    look_at(jobs, verdicts, tmp_path)
    right = [verdict for verdict in verdicts if verdict.status == "right"]
    # A generator whose programs are all refused, or an oracle that excuses everything, would find nothing.
    assert len(right) > 0.7 * len(jobs)
    assert world == 3 or sum(verdict.exact for verdict in right) > 0.4 * len(right)  # a third is rounded
    assert sum(verdict.excused > 0 for verdict in right) < 0.05 * len(right)


@pytest.mark.parametrize("world", [pytest.param(1, marks=exhaustive), 2])
def test_random_programs_compiled_as_one_step_compute_it_too(world: int, tmp_path: pathlib.Path) -> None:
    harmless = {"turns", "same bytes"}
    programs = [program for program in drawn(world, 40) if not program.traits - harmless and not program.options.donate]
    programs = [program for program in programs if ".unfold(" not in program.text]  # no compiler writes through these
    options = dataclasses.replace(programs[0].options, compile=True)
    jobs: list[Job] = [
        [dataclasses.replace(program, options=options) for program in programs[: 4 if ALL_SAMPLES else 2]]
    ]
    verdicts = run(world, jobs)
    look_at(jobs, verdicts, tmp_path)
    assert [verdict.status for verdict in verdicts] == ["right"]


# --- the fuzzer itself -------------------------------------------------------------------------------


def verdict_on(program: Program) -> Verdict:
    return judge([program], [run_programs([program])])


def failing(program: Program) -> bool:
    return verdict_on(program).status == "failed"


def test_a_program_with_a_list_among_its_options_is_made_smaller() -> None:
    program = draw(0, 1)
    several = dataclasses.replace(program, options=dataclasses.replace(program.options, bucket_cap_mb=[1e-05, 25.0]))
    small = shrunk(several, lambda candidate: candidate.options.bucket_cap_mb == [1e-05, 25.0], seconds=5)
    assert small.options.bucket_cap_mb == [1e-05, 25.0] and len(small.text) < len(several.text)


def test_a_broken_emitter_is_found_and_shrunk_to_a_script_that_fails_by_itself(tmp_path: pathlib.Path) -> None:
    # The programs before, some of them long, take the maximum where it makes no difference.
    programs = (draw(seed, 1) for seed in range(0 if ALL_SAMPLES else 150, 400))
    with emitter_takes_the_minimum():
        found = next(p for p in programs if "torch.maximum" in p.text and failing(p))
        kind = verdict_on(found).kind  # a smaller program may fail otherwise, in plain PyTorch as well
        small = shrunk(found, lambda p: (one := verdict_on(p)).status == "failed" and one.kind == kind, seconds=30)
        assert len(small.body) <= 10, small.text
        assert "torch.maximum" in small.text
    assert not failing(small)  # it is the fault that makes it fail
    path = tmp_path / "found.py"
    path.write_text(script([small], "the minimum is taken"))
    with_the_fault = tmp_path / "with_the_fault.py"
    with_the_fault.write_text('import runpy\n\nrunpy.run_module("fuzz.fault", run_name="__main__")\n')
    for command in ([path], [with_the_fault, path]):
        done, broken = Forked(command[0], [str(each) for each in command[1:]], {}), len(command) == 2
        printed, errors = done.communicate(timeout=120)
        assert done.returncode == int(broken), printed + errors
        assert ("expected" in printed or "FAILED" in printed) == broken, printed


def test_what_a_step_reads_from_outside_changes_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs fail if nothing looks for it."""
    changing = [program for program in drawn(1, 120 if ALL_SAMPLES else 40) if program.reads_what_changes]
    assert not any(map(failing, changing))
    monkeypatch.setattr(OutsideValues, "version", lambda self, static=(): 0)
    assert sum(map(failing, changing)) > 0.15 * len(changing) > 1


def program_of(body: list[str], results: list[Result], world: int = 1, **options: object) -> Program:
    """A program by hand, with a state of one matrix."""
    return Program(
        seed=0,
        world=world,
        exact=True,
        leaves=(Leaf("a", "kit.num((4, 4), 1)", "a"),),
        tree=flat(["a"]),
        batch=(("x", (4, 4)),),
        setup=(),
        closed=(),
        body=tuple(body),
        results=tuple(results),
        options=Options(**options),  # type: ignore[arg-type]
    )


def test_ranks_in_one_process_are_each_other_s_collectives() -> None:
    """The oracle against numbers worked out by hand: a mean, a sum, a stack, and a gradient through them."""
    body = ["m = fdp.pmean(x)", "g = fdp.grad(lambda p: (fdp.psum(p * x).sum() * (1 + fdp.axis_index())))(a)"]
    program = program_of(body, [Result("m", False), Result("g", False), Result("fdp.all_gather(x)", False)], world=3)
    calls = Judge([program]).calls
    xs = [plain.numbers((4, 4), 0 + 10 * rank + 7, True) for rank in range(3)]
    found = dict(calls[1][0].leaves)
    assert torch.equal(found["[1][0][0]"], (xs[0] + xs[1] + xs[2]) / 3)
    # The sum over ranks is counted once by each rank, 1, 2 and 3 times; the mean over ranks of 6 x.
    assert torch.equal(found["[1][0][1]"], (xs[0] * 6 + xs[1] * 6 + xs[2] * 6) / 3)
    assert torch.equal(found["[1][0][2]"], torch.stack(xs))


def test_parts_of_ranks_in_one_process() -> None:
    """Likewise, of collectives that give each rank a part of its own."""
    body = [
        "p = fdp.psum_scatter(x, 1)", "e = fdp.all_to_all(x, 0, 1)", "s = fdp.ppermute(x, [(1, 0)])",
        "g = fdp.grad(lambda p: (fdp.psum_scatter(p * x) * (1 + fdp.axis_index())).sum())(a)",
    ]  # fmt: skip
    results = [Result("p", True), Result("e", True), Result("s", True), Result("g", False)]
    calls = Judge([program_of(body, results, world=2)]).calls
    one, two = (plain.numbers((4, 4), 0 + 10 * rank + 7, True) for rank in range(2))
    first, second = (dict(calls[rank][0].leaves) for rank in range(2))
    assert torch.equal(first["[1][0][0]"], (one + two)[:, :2]) and torch.equal(second["[1][0][0]"], (one + two)[:, 2:])
    assert torch.equal(second["[1][0][1]"], torch.cat([one[2:], two[2:]], 1))
    assert torch.equal(first["[1][0][2]"], two) and not second["[1][0][2]"].any()
    # The upper half goes to rank 0, the lower one to rank 1, which counts it twice; then the mean over ranks.
    weights = torch.tensor([1.0, 1.0, 2.0, 2.0])[:, None]
    assert torch.equal(first["[1][0][3]"], (one + two) * weights / 2)


def test_a_lost_update_is_never_excused_as_rounding() -> None:
    program = program_of(["b = torch.tanh(a) * 1.1"], [Result("b + x * 1e-5", True)])
    judge_of = Judge([program])
    right = judge_of.calls[0][0].leaves
    assert judge_of.compare(0, 0, right) == []
    lost = [(path, leaf if path == "[0][0]['a']" else torch.tanh(right[0][1]) * 1.1) for path, leaf in right]
    assert [mismatch.path for mismatch in judge_of.compare(0, 0, lost)] == ["[1][0][0]"]


def test_a_mean_that_a_compiler_rounds_is_excused_in_compiled_steps_alone() -> None:
    program = program_of(["m = torch.var_mean(a[::2])[1]"], [Result("m", False), Result("m - a[::2].mean()", False)])
    compiled = dataclasses.replace(program, options=dataclasses.replace(program.options, compile=True))
    right = Judge([program]).calls[0][0].leaves
    last = [(path, leaf + 2**-23 if "[1]" in path else leaf) for path, leaf in right]
    wrong = [(path, leaf + 2**-6 if "[1]" in path else leaf) for path, leaf in right]
    assert [Judge([compiled]).compare(0, 0, each) == [] for each in (right, last, wrong)] == [True, True, False]
    assert [Judge([program]).compare(0, 0, each) == [] for each in (right, last, wrong)] == [True, False, False]
    sums = dataclasses.replace(compiled, body=("m = a[::2].mean()",))
    assert Judge([sums]).compare(0, 0, last)  # a mean of short numbers by their sum is exact


@pytest.mark.parametrize("world", [2, 3])
def test_a_mean_over_three_ranks_may_round_in_another_order(world: int) -> None:
    """Where plain PyTorch's order of them gives short numbers by luck."""
    program = program_of([], [Result("fdp.pmean(fdp.psum(x))", False)], world=world)
    judge_of = Judge([program])
    right = judge_of.calls[0][0].leaves
    last, wrong = ([(path, leaf + by if "[1]" in path else leaf) for path, leaf in right] for by in (2**-21, 2**-8))
    assert [judge_of.compare(0, 0, each) == [] for each in (right, last, wrong)] == [True, world == 3, False]


def test_only_documented_refusals_are_allowed() -> None:
    undeclared = program_of([], [Result("x", False)], world=1)
    verdict = judge([undeclared], [run_programs([undeclared])])
    assert (verdict.status, verdict.kind.split(":")[0]) == ("refused", "ReplicationError")  # two ranks would differ
    # On two ranks its part of `a` has one column, and two cannot be multiplied with it.
    scattered = program_of(["b = fdp.psum_scatter(a, 1) @ x"], [Result("x + b", False)], world=1)
    assert run_programs([scattered]).status == "invalid"
    equal = program_of([], [Result("a", False)], world=1)
    assert judge([equal], [Report("refused", "ReplicationError", "it varies")]).status == "failed"
    written = program_of(["x.add_(1)"], [])
    report = run_programs([written])
    assert (report.status, report.kind, report.written) == ("refused", "PurityError", ("batch",))
    assert reason(written, report) is not None
    assert reason(program_of([], []), dataclasses.replace(report, written=())) is None


def test_a_line_that_is_taken_back_leaves_the_account_of_its_memory() -> None:
    """`resize_` moves memory, also where the line is refused for the values that it brings in."""
    author = Author(random.Random(0), True, {"x": torch.ones(1), "torch": torch})
    author.add("x", varying=True, fixed=True, given=True)
    with pytest.raises(Refused):
        author.write("x.resize_(4096).fill_(1e9)")
    assert author.env["x"].tolist() == [1.0] and author.varies("x")
    assert all(place(author.env["x"]) in places for places in (author.fixed, author.inputs))
