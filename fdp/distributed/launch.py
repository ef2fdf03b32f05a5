"""Joining the other ranks: which launcher started this process, its rank, and the address of the store."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fdp.distributed.attempt import NotJoined, join_attempt
from fdp.distributed.group import resolve_group
from fdp.distributed.liveness.introduction import is_held_by_rank_0
from fdp.distributed.liveness.watch import liveness_s
from fdp.distributed.sending import watch_over
from fdp.errors import ArgumentError, PeerError, build_message, first_line
from fdp.tracebacks import hiding_frames


@dataclass(frozen=True)
class Launch:
    """How a launcher started this process.

    Attributes:
        launcher: its name, for messages.
        rank: of this process.
        size: number of processes.
        local_rank: of this process among those of its machine; None if that is not known.
        address: where rank 0 can be reached.
        port: likewise.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    address: str
    port: int


@hiding_frames
def initialize(backend: str | None = None, timeout: float | datetime.timedelta | None = None) -> None:
    """Join the ranks that a launcher started: torchrun, Slurm's srun, or mpirun.

    In a process that none of them started, nothing happens: it is a world of one. Nor does anything happen where the
    process group is there already. `torch.distributed.init_process_group` is as good, but under
    `torchrun --max-restarts`: there each attempt needs keys of its own in the store.

    Args:
        backend: as for `torch.distributed.init_process_group`; None for gloo, and for the accelerator's own beside it
            where there is one. Then each rank also takes the accelerator of its local rank as its current device.
        timeout: of messages, in seconds; None for the backend's own. Also how long other ranks may take to join; None
            for five minutes.

    Raises:
        ArgumentError: some of a launcher's variables are missing, or are no numbers, as is FDP_LIVENESS_S; names them.
            `timeout` is no such time. The process group is there already, with another backend.
        PeerError: other ranks have not joined, and it names them; or they cannot be reached.

    Example:
        >>> initialize()
        >>> torch.distributed.is_initialized()  # no launcher started other ranks
        False

    References:
        `jax.distributed.initialize`.
    """
    if dist.is_initialized():
        if backend is not None and dist.get_backend_config() not in (backend, f"cpu:{backend},cuda:{backend}"):
            raise ArgumentError(
                build_message(
                    f"fdp.initialize was given backend={backend!r}; the process group is there already, with "
                    f"{dist.get_backend_config()!r}.",
                    remedy="call it once, before anything else that communicates.",
                )
            )
        return
    found = launch_of(os.environ)
    if found is None:
        return
    liveness_s()  # a rank that is refused later, as one of the group, would be waited for
    limit = _limit_of(timeout)
    kind = None if backend is not None else _take_accelerator(found)
    try:
        store = _store(found, limit)
        dist.init_process_group(
            backend or _BACKENDS.get(kind, "gloo"), store=store, rank=found.rank, world_size=found.size, timeout=limit
        )
    except (NotJoined, dist.DistError, RuntimeError, OSError) as error:
        raise PeerError(
            build_message(
                f"fdp.initialize: rank {found.rank} of {found.size}, started by {found.launcher}, could not join the "
                f"others at {found.address}:{found.port}.",
                [first_line(error)],
                remedy="look for the first error among the logs of all ranks. Set MASTER_ADDR and MASTER_PORT to where "
                "rank 0 can be reached from all machines.",
            ),
            ranks=error.ranks if isinstance(error, NotJoined) else (),
        ) from error
    watch_over(resolve_group())


_BACKENDS: Mapping[str | None, str] = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}


def _limit_of(timeout: float | datetime.timedelta | None) -> datetime.timedelta | None:
    """A time limit that is more than none."""
    try:
        limit = datetime.timedelta(0, timeout) if isinstance(timeout, (int, float)) else timeout
        if limit is None or (isinstance(limit, datetime.timedelta) and limit > datetime.timedelta(0)):
            return limit
    except (ValueError, OverflowError):  # no number, or infinite
        pass
    raise ArgumentError(
        build_message(
            f"fdp.initialize was given timeout={timeout!r}.",
            remedy="pass seconds above 0, as a number or a datetime.timedelta, or None for five minutes.",
        )
    )


def _take_accelerator(found: Launch) -> str | None:
    """Make the accelerator of the local rank the current one; its kind, None if there is none."""
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        if module.is_available():
            local = found.rank if found.local_rank is None else found.local_rank
            module.set_device(local % module.device_count())
            return kind
    return None


def _store(found: Launch, limit: datetime.timedelta | None) -> Any:
    """The store of the ranks, with separate keys for each attempt."""
    # torchrun's agent may hold the store, for all attempts; otherwise rank 0 does.
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    wait = limit or datetime.timedelta(minutes=5)
    store = dist.TCPStore(
        found.address,
        found.port,
        found.size,
        is_master=found.rank == 0 and not agents,
        timeout=wait,
        wait_for_workers=False,  # which would not say for whom: `join_attempt` waits
        multi_tenant=True,
    )
    if not agents:
        is_held_by_rank_0(store)
    attempt = join_attempt(store, found.rank, found.size, wait.total_seconds())
    return dist.PrefixStore(f"fdp/attempt/{found.size}/{attempt}", store)


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """Which launcher started this process, by the variables of its environment.

    Args:
        environment: the variables.

    Returns:
        What they say; None if no launcher started it.

    Raises:
        ArgumentError: some are missing, or are no numbers.
    """
    read = _Variables(environment)
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return Launch(
            "torchrun",
            read.number("RANK"),
            read.number("WORLD_SIZE"),
            read.number_if("LOCAL_RANK"),
            read.text("MASTER_ADDR"),
            read.number("MASTER_PORT"),
        )
    mpi = next((names for names in _MPI if names[0] in environment), None)
    # mpirun in an allocation of Slurm starts a daemon on each machine by srun, and programs inherit its variables.
    if "SLURM_STEP_NUM_TASKS" in environment and _agrees_with_srun(environment, mpi):  # a batch script is no rank
        host = _first_host(read.text("SLURM_STEP_NODELIST"))
        port = 20000 + (read.number("SLURM_JOB_ID") + (read.number_if("SLURM_STEP_ID") or 0)) % 20000
        return Launch(
            "srun",
            read.number("SLURM_PROCID"),
            read.number("SLURM_STEP_NUM_TASKS"),
            read.number_if("SLURM_LOCALID"),
            environment.get("MASTER_ADDR", host),
            read.number_if("MASTER_PORT") or port,
        )
    if mpi is None:
        return None
    rank, size, local, local_size = mpi
    alone = local_size in environment and environment[local_size] == environment.get(size)
    return Launch(
        "mpirun",
        read.number(rank),
        read.number(size),
        read.number_if(local),
        "127.0.0.1" if alone and "MASTER_ADDR" not in environment else read.text("MASTER_ADDR"),
        29400 if alone and "MASTER_PORT" not in environment else read.number("MASTER_PORT"),
    )


_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # PMIx tells the size through its library alone. WORLD_SIZE may say it; if it does not, the error names it.
    ("PMIX_RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)
"""What launchers of MPI call the rank, the number of ranks, and both on one machine."""


def _agrees_with_srun(environment: Mapping[str, str], mpi: tuple[str, str, str, str] | None) -> bool:
    """Whether srun started this very rank: then MPI's variables, which `srun --mpi` sets as well, say the same."""
    if mpi is None:
        return True
    rank, size, *_ = mpi
    return environment[rank] == environment.get("SLURM_PROCID") and (
        environment.get(size, environment["SLURM_STEP_NUM_TASKS"]) == environment["SLURM_STEP_NUM_TASKS"]
    )


def _first_host(hosts: str) -> str:
    """The first host of a list as Slurm writes it, such as node[03-05,9],login.

    Example:
        >>> _first_host("node[03-05,9],login"), _first_host("gpu1-a,gpu2"), _first_host("rack2-n[7]")
        ('node03', 'gpu1-a', 'rack2-n7')
    """
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", hosts)
    return hosts if match is None else "".join(part or "" for part in match.groups())


class _Variables:
    """Variables of an environment, read with errors that name them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, name: str) -> str:
        found = self._environment.get(name)
        if not found:
            raise ArgumentError(
                build_message(
                    f"fdp.initialize found some of a launcher's variables, but not {name}.",
                    [f"{other} is set" for other in _TELLING if other in self._environment],
                    remedy=f"set {name}; or start the program with torchrun, srun or mpirun; or unset the others, for "
                    "one process alone.",
                )
            )
        return found

    def number(self, name: str) -> int:
        found = self.text(name)
        if not found.isdecimal():
            raise ArgumentError(
                build_message(f"fdp.initialize found {name}={found!r}.", remedy=f"let {name} be a number.")
            )
        return int(found)

    def number_if(self, name: str) -> int | None:
        return self.number(name) if name in self._environment else None


_TELLING = (
    "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_RANK", "PMI_RANK",
    "PMIX_RANK",
)  # fmt: skip
