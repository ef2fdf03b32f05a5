"""Run published models on two ranks beside plain autograd, and print the tables of docs/reference/models.md.

`make models` runs those of all libraries that are installed; ARGS="--library timm" those of one, ARGS="--only GPT-2"
one model, and ARGS="--write" puts the tables of the libraries that ran into the page.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator

import checked_families
import checked_library_models
import ranks
import tables_of_models as tables
from family_forms import RIGHT
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LIBRARIES = ("transformers", "timm", "torchvision", "diffusers", "torch_geometric")


def library_of(name: str) -> str:
    """The library of a model."""
    chosen = checked_library_models.EVERY.get(name)
    return "transformers" if chosen is None else chosen.library


def verdict_on(name: str) -> tuple[str, str]:
    """What to write of a model: "yes", "refused" or "wrong"; and the line that a refusal names, or the error."""
    if library_of(name) == "transformers":
        found = list(checked_families.worst([name]).values())
    else:
        found = ranks.run(2, checked_library_models.verdict_on, name)
    kind, message = next((each for each in found if each[0] != RIGHT), (RIGHT, ""))
    if kind == RIGHT:
        return "yes", ""
    lines = message.splitlines()
    return ("refused", lines[1].strip()) if kind == "TraceError" else ("wrong", message)


def verdicts(names: list[str], console: Console) -> Iterator[tuple[str, str]]:
    """The verdict on each model, while a line shows how far it is."""
    columns = (TextColumn("{task.description:32}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            verdict, why = verdict_on(name)
            if why:
                console.print(f"{name}: {verdict}: {why}", highlight=False, markup=False, soft_wrap=True)
                ranks.close_pools()  # a refusal on one rank leaves the group desynchronised
            progress.advance(task)
            yield name, verdict


def main() -> int:
    """Run what the command line asks for; returns how many models are wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models alone, by their names in the tables")
    parser.add_argument("--write", action="store_true", help="put whole tables into docs/reference/models.md")
    asked = parser.parse_args()
    expected = tables.expected()
    every = {name: library_of(name) for name in expected}
    if unknown := sorted(set(asked.only or ()) - set(every)):
        parser.error(f"no such model: {', '.join(unknown)}")
    there = [each for each in asked.library if importlib.util.find_spec(each) is not None]
    whole = {"transformers"} <= set(there), set(LIBRARIES[1:]) <= set(there)
    if asked.write and (asked.only or not any(whole)):
        parser.error(f"--write needs whole tables: transformers, or all of {', '.join(LIBRARIES[1:])}; and no --only")
    console = Console(stderr=True)
    for each in sorted(set(asked.library) - set(there)):
        console.print(f"{each} is not installed: its models are left out")
    names = [name for name, library in every.items() if library in there and name in (asked.only or every)]
    found = dict(verdicts(names, console))
    made = tables.table_of_families(found), tables.table_of_libraries(found)
    for head, rows, is_whole in zip(tables.HEADS.values(), made, whole, strict=True):
        if rows:
            print("\n".join([head, "|" + "---|" * (head.count("|") - 1), *rows]), end="\n\n")
        if asked.write and is_whole:
            tables.PAGE.write_text(tables.with_table(tables.PAGE.read_text(), head, rows))
    unexpected = sorted(name for name in found if found[name] != expected[name])
    for name in unexpected:
        console.print(f"{name}: {found[name]}, where the tests demand {expected[name]}")
    return len(unexpected)


if __name__ == "__main__":
    sys.exit(main())
