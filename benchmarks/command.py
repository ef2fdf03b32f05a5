"""What the commands that measure contenders have in common: their options, their progress, and what they print."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import gpu
from figures import Setting, machine
from launch import Tell
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Begin = Callable[[str], Tell]
"""Given what is measured next; returns whom to tell how far that is."""


class Row(Protocol):
    """What was measured of one case."""

    def as_json(self) -> object:
        """All of it, as plain dicts and lists."""


RowT = TypeVar("RowT", bound=Row)


def options(
    description: str | None,
    settings: Mapping[str, Setting],
    memory: bool = True,
    rounds: str = "turns of each contender (default: by case, at least 30)",
) -> argparse.ArgumentParser:
    """A parser of the options that every command has.

    Args:
        description: the command's docstring.
        settings: what can be measured, by name.
        memory: whether the command measures memory.
        rounds: what to say about the number of rounds.

    Returns:
        The parser, to which more can be added.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for setting in settings.values() for case in setting.cases]
    parser.add_argument("--setting", action="append", choices=list(settings), help="only this one; may be repeated")
    parser.add_argument("--case", action="append", choices=list(dict.fromkeys(names)), help="only this one; repeatable")
    parser.add_argument("--rounds", type=positive, help=rounds)
    if memory:
        parser.add_argument("--no-memory", action="store_true", help="leave memory out")
    parser.add_argument("--json", type=pathlib.Path, help="write every single time to this file")
    return parser


def number(text: str, at_least: int = 0) -> int:
    """Reads a whole number of the command line that is not below some other."""
    found = int(text)
    if found < at_least:
        raise argparse.ArgumentTypeError(f"has to be at least {at_least}")
    return found


def positive(text: str) -> int:
    """Reads a number of the command line that is at least 1."""
    return number(text, 1)


def among(names: Sequence[str], setting: Setting) -> Setting:
    """A setting with some of its contenders beside fdp, and no others; as it is if none of its peers is among them."""
    peers, also = ([name for name in known if name in names] for known in (setting.peers, setting.also))
    return dataclasses.replace(setting, peers=tuple(peers), also=tuple(also)) if peers else setting


def carry_out(
    args: argparse.Namespace,
    settings: Mapping[str, Setting],
    measure: Callable[[Setting, str, Begin], RowT],
    tables: Callable[[Setting, Mapping[str, RowT]], Sequence[Table]],
) -> int:
    """Measures, prints, and writes the figures to a file if asked to.

    Args:
        args: what a parser from `options` made of the command line.
        settings: those that the parser was made for.
        measure: measures one case in one setting.
        tables: makes tables of a setting's cases.

    Returns:
        The exit status.
    """
    # Wide enough for a row on one line, also where the terminal's width is not known.
    console = Console(width=max(Console().width, 200))
    start = time.monotonic()
    found: dict[str, dict[str, RowT]] = {}
    for name in args.setting or settings:
        setting = settings[name]
        cases = [case.name for case in setting.cases if args.case is None or case.name in args.case]
        if not cases:
            continue
        if setting.place.backend == "nccl" and not gpu.measurable():
            console.print("GPU: not measured (no CUDA device, or no NCCL, here).\n")
            continue
        why_not = setting.place.why_not()
        if why_not is not None:
            console.print(f"{setting.title}: not measured ({why_not}).\n")
            continue
        with setting.place.opened(), _progress(console) as begin:
            found[name] = {case: measure(setting, case, begin) for case in cases}
        console.print(f"{setting.title}, one thread each, fused AdamW; {setting.ours} beside {setting.peer}\n")
        for table in tables(setting, found[name]):
            console.print(table)
    where = {
        **machine(),
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "minutes": round((time.monotonic() - start) / 60, 1),
    }
    console.print(", ".join(f"{k} {v}" for k, v in where.items()))
    if args.json:
        figures = {name: {case: row.as_json() for case, row in rows.items()} for name, rows in found.items()}
        args.json.write_text(json.dumps({"machine": where, "figures": figures}, indent=1) + "\n")
    return 0


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Begin]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:

        def begin(what: str) -> Tell:
            if not console.is_terminal:  # where a bar is not drawn, a line says what goes on
                print(what, file=sys.stderr, flush=True)
            for done_with in progress.task_ids:
                progress.remove_task(done_with)
            task = progress.add_task(what, total=None)
            progress.refresh()
            shown = time.monotonic()

            def tell(done: int, total: int) -> None:
                # Drawn here, between two steps, and by no thread, which would need a processor that is being timed.
                nonlocal shown
                progress.update(task, completed=done, total=total)
                if time.monotonic() - shown > 1.0:
                    shown = time.monotonic()
                    progress.refresh()

            return tell

        yield begin
