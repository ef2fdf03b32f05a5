"""Scripts on two ranks of this machine as a reader launches them: by torchrun."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANKS = 2
DEADLINE_S = 240.0


def torchrun(
    script: pathlib.Path, *arguments: str, options: tuple[str, ...] = (), ranks: int = RANKS
) -> subprocess.CompletedProcess[str]:
    """Launch a script in its own folder; what it prints, and whether it failed."""
    started = start(script, *arguments, options=options, ranks=ranks)
    try:
        out, err = started.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        started.terminate()  # torchrun takes its ranks with it
        started.communicate()
        raise
    return subprocess.CompletedProcess(started.args, started.returncode, out, err)


def start(
    script: pathlib.Path, *arguments: str, options: tuple[str, ...] = (), ranks: int = RANKS
) -> subprocess.Popen[str]:
    """Launch a script in its own folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if sys.platform == "linux":  # gloo otherwise resolves the host name, which need not resolve
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*command, *options, str(script), *arguments],
        cwd=script.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
