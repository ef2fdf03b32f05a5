"""The run that survives its ranks: killed, started again on other numbers of ranks, and as if nothing had happened."""

from __future__ import annotations

import os
import pathlib
import random
import re
import signal
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchrun import DEADLINE_S, ROOT, start, torchrun

SCRIPT = ROOT / "examples" / "resume.py"


def ended_with(text: str) -> str:
    found = re.findall(r"squares of all parameters (\S+)", text)
    assert len(found) == 1, text
    return str(found[0])


def ranks_of(launcher: int) -> list[int]:
    """The processes that a launcher has started, and that have not ended."""
    return [int(pid) for pid in pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def newest(folder: pathlib.Path) -> int:
    """The step of the newest checkpoint that is whole: one that is being written has no index yet."""
    return max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
def test_killed_three_times_it_ends_with_the_same_bits(tmp_path: pathlib.Path) -> None:
    arguments = ("--steps", "80", "--save-every", "5")
    alone = torchrun(SCRIPT, *arguments, "--folder", str(tmp_path / "alone"))
    assert alone.returncode == 0, alone.stderr
    chance = random.Random(5)
    job = start(SCRIPT, *arguments, "--folder", str(tmp_path / "killed"), options=("--max-restarts", "3"))
    kills, reached, end = 0, 0, time.monotonic() + DEADLINE_S
    while kills < 3 and job.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
        if newest(tmp_path / "killed") > reached:  # so this attempt has gone on from there
            time.sleep(0.1 * chance.random())
            running = ranks_of(job.pid)
            os.kill(chance.choice(running), signal.SIGKILL)
            kills += 1
            while not set(running).isdisjoint(ranks_of(job.pid)) and time.monotonic() < end:
                time.sleep(0.005)
            reached = newest(tmp_path / "killed")
    out, err = job.communicate(timeout=DEADLINE_S)
    assert (job.returncode, kills) == (0, 3), err
    assert out.count("goes on from step") == 3
    assert ended_with(out) == ended_with(alone.stdout)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_on_other_numbers_of_ranks_it_goes_on_with_the_same_batches(tmp_path: pathlib.Path) -> None:
    folder, alone = str(tmp_path / "run"), str(tmp_path / "alone")
    for ranks, steps in ((2, 6), (4, 12), (1, 18)):
        ended = torchrun(SCRIPT, "--steps", str(steps), "--folder", folder, ranks=ranks)
        assert ended.returncode == 0, ended.stderr
    assert torchrun(SCRIPT, "--steps", "18", "--folder", alone, ranks=1).returncode == 0
    like: dict[str, torch.Tensor] = {}
    found = []
    for each in (folder, alone):
        saved = dcp.FileSystemReader(f"{each}/18").read_metadata().state_dict_metadata
        like = {
            name: torch.empty(kept.size, dtype=kept.properties.dtype)
            for name, kept in saved.items()
            if "params" in name
        }
        dcp.load(like, checkpoint_id=f"{each}/18", no_dist=True)
        found.append(like)
    assert len(found[0]) == 6
    for name in like:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-3, atol=1e-4)
