"""Which tests take the time of the processors: a table at the end of a run with `-p processor_times`.

Wall time says little where several files run at once. What counts is what the process of a test took, with all that it
has started: ranks, examples, compilers. What ends without being waited for by its parent is missed. Linux alone tells.
"""

from __future__ import annotations

import collections
import os
import pathlib
from collections.abc import Generator
from typing import Any

import pytest

_BEGAN = pytest.StashKey[float]()
_SHOWN = 40


def seconds_of_tree(root: int) -> float:
    """Processor time of a process and all below it, with that of children that have ended and were waited for."""
    ticks, children = dict[int, int](), collections.defaultdict[int, list[int]](list)
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text()
        except OSError:  # it has ended
            continue
        parent, *others = text[text.rindex(")") + 4 :].split()  # the name may have brackets and spaces
        children[int(parent)].append(int(folder.name))
        ticks[int(folder.name)] = sum(map(int, others[9:13]))
    total, left = 0, [root]
    while left:
        each = left.pop()
        total += ticks.get(each, 0)
        left += children[each]
    return total / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    item.stash[_BEGAN] = seconds_of_tree(os.getpid())
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    try:
        return (yield)
    finally:
        item.user_properties.append(("processor_s", seconds_of_tree(os.getpid()) - item.stash[_BEGAN]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = [
        (seconds, report.nodeid)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "teardown"
        for name, seconds in report.user_properties
        if name == "processor_s"
    ]
    folders = collections.Counter[str]()
    for seconds, test in rows:
        folders["/".join(test.split("::")[0].split("/")[:2])] += seconds
    terminalreporter.section(f"processor time: {sum(folders.values()):.0f} s in {len(rows)} tests")
    for title, lines in (
        ("", sorted(((seconds, folder) for folder, seconds in folders.items()), reverse=True)),
        ("the longest:", sorted(rows, reverse=True)[:_SHOWN]),
    ):
        terminalreporter.line(title)
        for seconds, what in lines:
            terminalreporter.line(f"{seconds:8.1f} s  {what}")
