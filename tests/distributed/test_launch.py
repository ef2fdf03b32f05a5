"""Joining the ranks that a launcher started, by the variables that it sets."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist
from forked import Forked
from programs import free_port
from samples import exhaustive
from torchrun import torchrun

import fdp
from fdp.distributed.launch import Launch, launch_of

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "one", "MASTER_PORT": "29501"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "3",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
ORTED = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
"""What a rank inherits from the daemon of mpirun that srun started on its machine."""
AT_TWO = {"MASTER_ADDR": "two", "MASTER_PORT": "5000"}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", **AT_TWO}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # a batch script
        (TORCHRUN, Launch("torchrun", 3, 4, 1, "one", 29501)),
        (SRUN, Launch("srun", 2, 4, 0, "gpu07", 20000 + 123459 % 20000)),
        ({**SRUN, "MASTER_ADDR": "a", "MASTER_PORT": "7"}, Launch("srun", 2, 4, 0, "a", 7)),
        ({**SRUN, **TORCHRUN}, Launch("torchrun", 3, 4, 1, "one", 29501)),  # torchrun, started by srun
        (MPIRUN, Launch("mpirun", 1, 2, 1, "127.0.0.1", 29400)),
        (MPICH, Launch("mpirun", 0, 2, None, "two", 5000)),
        # mpirun in an allocation of Slurm: its own variables are those of this rank.
        (
            {**ORTED, **MPIRUN, "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", **AT_TWO},
            Launch("mpirun", 5, 8, 1, "two", 5000),
        ),
        ({**ORTED, **MPICH}, Launch("mpirun", 0, 2, None, "two", 5000)),
        ({**ORTED, **MPIRUN}, Launch("mpirun", 1, 2, 1, "127.0.0.1", 29400)),
        # srun --mpi=pmix and --mpi=pmi2 say the same twice.
        ({**SRUN, "PMIX_RANK": "2"}, Launch("srun", 2, 4, 0, "gpu07", 20000 + 123459 % 20000)),
        ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "4"}, Launch("srun", 2, 4, 0, "gpu07", 20000 + 123459 % 20000)),
        ({**TORCHRUN, "PMIX_RANK": "0"}, Launch("torchrun", 3, 4, 1, "one", 29501)),
    ],
)
def test_who_started_this_process(environment: dict[str, str], expected: Launch | None) -> None:
    assert launch_of(environment) == expected


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RANK": "0"}, "but not WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "but not RANK"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "but not MASTER_ADDR"),
        ({**TORCHRUN, "RANK": "first"}, "RANK='first'"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1'"),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "but not MASTER_ADDR"),
        ({**ORTED, **MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "but not MASTER_ADDR"),
        ({"PMIX_RANK": "0"}, "but not WORLD_SIZE.\n  PMIX_RANK is set"),
        ({**ORTED, "PMIX_RANK": "5"}, "but not WORLD_SIZE"),  # of one of PRRTE's daemons
    ],
)
def test_what_is_missing_is_named(environment: dict[str, str], named: str) -> None:
    with pytest.raises(fdp.ArgumentError, match=named):
        launch_of(environment)


def test_a_plain_process_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SRUN, *MPIRUN, *MPICH):
        monkeypatch.delenv(name, raising=False)
    fdp.initialize()
    assert not dist.is_initialized()
    assert fdp.axis_size() == 1


JOINS = """
    import os, signal, sys, torch, fdp
    fdp.initialize(timeout=60)
    fdp.initialize()  # again, as in a notebook
    fdp.initialize("gloo")
    found = float(fdp.psum(torch.tensor(1.0 + fdp.axis_index())))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    try:
        fdp.initialize("nccl")
    except fdp.ArgumentError as error:
        found += "with 'gloo'" not in str(error) and "with 'cpu:gloo" not in str(error)
    os.write(1, f"attempt {attempt} sum {found}\\n".encode())  # at once: both ranks write to one pipe
    if sys.argv[1:] and attempt < 2:
        if fdp.axis_index() == attempt:
            os.kill(os.getpid(), signal.SIGKILL)
        fdp.psum(torch.ones(1))
    torch.distributed.destroy_process_group()
"""


@exhaustive
def test_each_attempt_of_torchrun_meets_anew(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(JOINS))
    ended = torchrun(tmp_path / "job.py", "dies", options=("--max-restarts", "2"))
    assert ended.returncode == 0, ended.stderr
    for attempt in range(3):
        assert f"attempt {attempt} sum 3.0" in ended.stdout


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_ranks_that_others_started_meet(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(JOINS))
    port = str(free_port())
    each: list[Forked] = []
    for rank in "01":
        own = {**SRUN, "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
        if launcher == "mpirun":
            own = {**MPIRUN, "OMPI_COMM_WORLD_RANK": rank}
        each.append(Forked(tmp_path / "job.py", [], {**own, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}))
    assert [process.communicate(timeout=120)[0] for process in each] == ["attempt 0 sum 3.0\n"] * 2


def test_ranks_that_cannot_be_reached_are_a_peer_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(fdp.PeerError, match=r"rank 3 of 4, started by torchrun, could not join .* 127\.0\.0\.1:1"):
        fdp.initialize(timeout=0.5)


WAITS_IN_VAIN = """
    import fdp
    try:
        fdp.initialize(timeout=2)
    except fdp.PeerError as error:
        print(error.ranks, error)
"""


def test_a_rank_that_never_starts_is_named_by_the_holder_of_the_store_too(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(WAITS_IN_VAIN))
    environment = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [Forked(tmp_path / "job.py", [], {**environment, "RANK": rank}) for rank in "01"]
    for process in started:
        said = process.communicate(timeout=120)[0]
        assert said.startswith("(2,) fdp.initialize: rank ") and "rank 2 did not join within 2 seconds" in said, said


def test_a_variable_that_makes_no_sense_is_refused_before_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "FDP_LIVENESS_S": "abc"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(fdp.ArgumentError, match="FDP_LIVENESS_S='abc'"):
        fdp.initialize(timeout=0.5)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "5"])
def test_a_time_limit_that_is_none_is_refused_before_anybody_waits(
    timeout: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(fdp.ArgumentError, match=r"was given timeout=(.|\n)*Remedy: pass seconds above 0"):
        fdp.initialize(timeout=timeout)  # type: ignore[arg-type]
