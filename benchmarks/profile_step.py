"""Where the time of a step goes: fdp beside its best peer, by kind of operator.

    python benchmarks/profile_step.py --case NAME [--setting ranks|one] [--steps N] [--operators N]

First all contenders take turns without a profiler, which says who the best peer is and how long a step takes. Then
fdp and that peer run under torch.profiler. Its figures are self time on the CPU: of an operator without the
operators that it calls. The profiler makes each operator some microseconds slower, on both sides, so small operators
weigh more in it than without: compare the sides of a row, not the rows with the step time. While a rank waits for
another one, no operator runs; fdp has a range of its own for that, which counts as communication, and DDP has none: its
waiting is in the rows of its wrapper and of what is outside of operators.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys

import torch
from cases import CASES, COMPILED_CASES, CPU_CASES
from contenders import CONTENDERS
from figures import Figures
from launch import run_in
from rich.console import Console
from run import ONE, RANKS
from step_time import measure_step_times
from tables import markdown_table, milliseconds, quartiles

GROUPS = (
    # The first that matches; names as the profiler has them.
    ("communication", r"^(c10d::|gloo:|nccl:|fdp[:/ ]|.*\b(bucket|all_?reduce|broadcast|barrier)\b)"),
    ("optimizer", r"^(aten::_fused_|Optimizer)"),
    ("matrix products", r"^aten::(mm|addmm|bmm|baddbmm|mv|addmv|matmul|linear|dot)\b"),
    ("convolutions", r"^aten::.*(conv|mkldnn)"),
    ("attention", r"^aten::.*(attention)"),
    ("normalisation", r"^aten::.*(batch_norm|layer_norm)"),
    ("copies and fills", r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|fill_|zero_|zeros|zeros_like|ones|ones_like|"
     r"_foreach_copy_|_foreach_zero_|embedding_dense_backward)\b"),
    ("memory", r"^aten::(empty\w*|new_empty\w*|resize_|set_)"),
    ("views", r"^aten::(t|view|_unsafe_view|transpose|permute|as_strided|expand|detach\w*|slice|select|split\w*|narrow|"
     r"reshape|_reshape_alias|squeeze|unsqueeze|flatten|unbind|chunk|alias|numpy_T)$|^detach$"),
    ("autograd", r"(Backward\d*$|^autograd::|^torch::autograd|AccumulateGrad)"),
    ("module wrapper", r"^DistributedDataParallel|^Torch-Compiled"),
    ("other operators", r"^aten::"),
)  # fmt: skip
_OUTSIDE = "outside of operators: Python, waiting"
_THREADS = "other threads (beside the step)"

Totals = dict[str, tuple[float, float]]
"""Name to microseconds of self time and number of calls, a step."""


def _group(name: str) -> str:
    return next((group for group, pattern in GROUPS if re.search(pattern, name)), "the rest")


def _on_rank(case_name: str, contender: str, steps: int) -> tuple[Totals, Totals]:
    running = CONTENDERS[contender](CASES[case_name])
    for _ in range(5):
        running.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        running.step()  # the first step under a profiler is slower than the ones after it
        with torch.profiler.record_function("measured"):
            for _ in range(steps):
                running.step()
    return _totals(profile, steps)


def _totals(profile: torch.profiler.profile, steps: int) -> tuple[Totals, Totals]:
    events = [event for event in profile.events() if event.name != "[memory]"]
    window = next(event for event in events if event.name == "measured")
    groups: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    operators: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for event in events:
        if not window.time_range.start <= event.time_range.start < window.time_range.end:
            continue
        if event is window:
            group, calls = _OUTSIDE, 0
        elif event.thread != window.thread:
            group, calls = _THREADS, 1
        else:
            group, calls = _group(event.name), 1
        # Of a bucket's range what is done and not what is in it, which is longer than a line.
        operator = re.sub(r"^(fdp: bucket \d+ [^:]*):.*", r"\1", event.name)
        for totals, key in ((groups, group), (operators, operator)):
            totals[key][0] += event.self_cpu_time_total / steps
            totals[key][1] += calls / steps
    return ({name: (us, calls) for name, (us, calls) in groups.items()},
            {name: (us, calls) for name, (us, calls) in operators.items() if name != "measured"})  # fmt: skip


def main() -> int:
    """Profiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = dict.fromkeys(case.name for case in (*CPU_CASES, *COMPILED_CASES))
    parser.add_argument("--case", required=True, choices=list(cases))
    parser.add_argument("--setting", choices=[RANKS.name, ONE.name], default=RANKS.name)
    parser.add_argument("--steps", type=int, default=20, help="steps under the profiler, and rounds timed before")
    parser.add_argument("--operators", type=int, default=0, help="also print so many single operators")
    args = parser.parse_args()
    setting = RANKS if args.setting == RANKS.name else ONE

    console = Console(width=max(Console().width, 200))
    times = Figures(measure_step_times(setting.place, args.case, [*setting.peers, setting.ours], args.steps), {})
    peer = times.fastest(setting.peers)
    names = [setting.ours, peer]
    ours, theirs = milliseconds(times, setting.ours), milliseconds(times, peer)
    ratio = quartiles(times.time_ratio(setting.ours, peer))
    console.print(f"{args.case}, {setting.title}: fdp {ours} ms, {peer} {theirs} ms a step, ratio {ratio}")
    console.print("self time on the CPU of rank 0 under the profiler, a step:\n")
    totals = {name: run_in(setting.place, _on_rank, args.case, name, args.steps)[0] for name in names}
    columns = [f"{name}, {what}" for what in ("us", "calls") for name in names]
    for kind in range(2 if args.operators else 1):
        rows = {name: totals[name][kind] for name in names}
        keys = sorted({key for row in rows.values() for key in row}, key=lambda key: -_most(rows, key))
        beside = [key for key in keys if key == _THREADS]
        keys = [key for key in keys if key != _THREADS][: args.operators if kind else None]
        out = markdown_table("operator" if kind else "kind of operator", *columns)
        for key in keys:
            out.add_row(key, *_cells(rows, names, key))
        if not kind:
            sums = {name: {"sum": tuple(sum(row[key][i] for key in keys if key in row) for i in range(2))}
                    for name, row in rows.items()}  # fmt: skip
            out.add_row("sum", *_cells(sums, names, "sum"))
            for key in beside:
                out.add_row(key, *_cells(rows, names, key))
        console.print(out)
    return 0


def _most(rows: dict[str, Totals], key: str) -> float:
    return max(row[key][0] for row in rows.values() if key in row)


def _cells(rows: dict[str, Totals], names: list[str], key: str) -> list[str]:
    found = [rows[name].get(key, (0.0, 0.0)) for name in names]
    return [f"{us:.0f}" for us, _ in found] + [f"{calls:.0f}" for _, calls in found]


if __name__ == "__main__":
    sys.exit(main())
