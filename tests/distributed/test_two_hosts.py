"""torchrun on two machines: when a rank dies, all ranks of both machines start again and meet."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

import hosts
import pytest
from programs import free_port
from samples import exhaustive
from torchrun import DEADLINE_S, ROOT

JOB = """
    import os, pathlib, signal, sys, torch, fdp

    fdp.initialize(timeout=60)
    folder = pathlib.Path(sys.argv[1])
    rank = fdp.axis_index()
    (folder / f"attempt-{rank}-{os.getpid()}").touch()

    @fdp.data_parallel(donate_argnums=0)
    def step(total, batch):
        return total + fdp.psum(batch.sum()), None

    with fdp.CheckpointManager(folder / "run") as manager:
        total, done = torch.zeros(()), 0
        if manager.latest_step() is not None:
            total, done = manager.restore(like=total)
        for number in range(done + 1, 21):
            total, _ = step(total, torch.full((2,), float(number + rank)))
            if number % 5 == 0:
                manager.save(number, total)
            if (rank, number) == (1, 8) and len(list(folder.glob("attempt-1-*"))) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"total-{rank}").write_text(str(float(total)))
    torch.distributed.destroy_process_group()
"""


@exhaustive
def test_all_ranks_meet_again(tmp_path: pathlib.Path) -> None:
    if (why := hosts.why_not()) is not None:
        pytest.skip(why)
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    common = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": hosts.DEVICE}
    port, agents = free_port(), []
    with hosts.two_hosts() as both:
        for host in range(2):
            options = [
                "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=job",
                f"--rdzv-endpoint={hosts.address(0)}:{port}", f"--rdzv-conf=is_host={1 - host}",
                f"--local-addr={hosts.address(host)}",
            ]  # fmt: skip
            command = [sys.executable, "-m", "torch.distributed.run", *options, "job.py", str(tmp_path)]
            with (tmp_path / f"log-{host}").open("w") as log:
                agents.append(
                    subprocess.Popen(
                        [*both.prefix(host), *command],
                        cwd=tmp_path,
                        env={**os.environ, **common},
                        stdout=log,
                        stderr=log,
                    )
                )
        try:
            ended = [agent.wait(DEADLINE_S) for agent in agents]
        finally:
            for agent in agents:
                agent.terminate()  # it takes its ranks with it
            for agent in agents:
                agent.wait()
    printed = "\n".join((tmp_path / f"log-{host}").read_text() for host in range(2))
    assert ended == [0, 0], printed
    total = float(sum(2 * (number + rank) for number in range(1, 21) for rank in range(2)))
    assert [float((tmp_path / f"total-{rank}").read_text()) for rank in range(2)] == [total] * 2
    # Each machine counts its own failures, so the counts may differ in an attempt: nothing may be named by them.
    for rank in range(2):
        assert len(list(tmp_path.glob(f"attempt-{rank}-*"))) == 2, printed
