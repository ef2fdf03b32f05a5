"""Programs of several ranks, each started with the variables that torchrun would set."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

from forked import Forked
from torchrun import ROOT


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_ranks(
    script: pathlib.Path,
    arguments: Sequence[str],
    size: int,
    address: str = "127.0.0.1",
    forked: Collection[int] = (),
    **variables: str,
) -> Sequence[subprocess.Popen[str] | Forked]:
    """Start the ranks of a script; rank 0 holds the store.

    Args:
        script: what each runs.
        arguments: of the script.
        size: number of ranks.
        address: at which rank 0 can be reached.
        forked: ranks that come from a process that has torch imported already, which is quicker; they end otherwise.
        variables: of the environment.
    """
    started: list[subprocess.Popen[str] | Forked] = []
    common = {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", **variables,
    }  # fmt: skip
    for rank in range(size):
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if rank in forked:
            started.append(Forked(script, arguments, environment))
            continue
        started.append(
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return started


def end_ranks(started: Sequence[subprocess.Popen[str] | Forked], deadline_s: float) -> list[str]:
    """What each rank printed, errors included; those that do not end in time are killed."""
    end_s = time.monotonic() + deadline_s
    printed = []
    for process in started:
        try:
            texts = process.communicate(timeout=max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            texts = (*process.communicate(), "\n(killed: it did not end in time)")
        printed.append("".join(text for text in texts if text))
    return printed


def printed_events(folder: pathlib.Path) -> list[dict[str, Any]]:
    """What ranks have written into a folder, in the order in which they did."""
    lines = [json.loads(line) for path in folder.glob("rank*") for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["when_s"])


def errors_of_others(
    script: pathlib.Path, kind: str, victim: int, folder: pathlib.Path, forked: Collection[int], deadline_s: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Let one of three ranks fail, and see each of the others raise.

    Args:
        script: what each runs: it takes the kind of fault, the victim and the folder.
        kind: of the fault.
        victim: the rank that fails, and is killed when the others have ended.
        folder: where ranks write what happens.
        forked: as for `start_ranks`.
        deadline_s: seconds in which the others have to end.

    Returns:
        The event of the fault, and those of the errors: one of each other rank.
    """
    started = start_ranks(script, [kind, str(victim), str(folder)], 3, forked=forked, FDP_LIVENESS_S="3")
    others = [process for rank, process in enumerate(started) if rank != victim]
    printed = "\n".join(end_ranks(others, deadline_s))  # though a message is pending and the victim may be there
    started[victim].kill()
    end_ranks([started[victim]], 10)
    assert "it did not end in time" not in printed, printed
    lines = printed_events(folder)
    (fault,) = [line for line in lines if line["event"] == "fault"]
    errors = [line for line in lines if line["event"] == "error"]
    assert sorted(error["rank"] for error in errors) == sorted({0, 1, 2} - {victim}), printed
    return fault, errors
