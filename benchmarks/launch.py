"""Starts processes on this machine, one thread each, as ranks of a group or alone, and collects what they return."""

from __future__ import annotations

import dataclasses
import datetime
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Tell = Callable[[int, int], None]
"""Told by a measurement how many of how many parts are done."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where contenders run.

    Attributes:
        world: number of processes.
        backend: of their process group; None for no process group at all.
    """

    world: int
    backend: str | None


def _rank_main(place: Place, rank: int, port: int, conn: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    told = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        # Seldom, since to read it the parent needs one of the processors that are being timed.
        if rank == 0 and now - told > 1.0:
            told = now
            conn.send(("progress", (done, total)))

    try:
        torch.set_num_threads(1)
        if place.backend is not None:
            timeout = datetime.timedelta(seconds=120)
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
            device = torch.device("cuda", rank) if place.backend == "nccl" else None
            dist.init_process_group(
                place.backend, store=store, rank=rank, world_size=place.world, timeout=timeout, device_id=device
            )
        conn.send(("result", fn(tell, *args)))
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:  # the parent raises it
        conn.send(("error", traceback.format_exc()))


def run_in(
    place: Place, fn: Callable[..., Any], *args: Any, tell: Tell | None = None, deadline_s: float = 900.0
) -> list[Any]:
    """Runs a module-level function in fresh processes.

    Args:
        place: how many, and their process group.
        fn: a module-level function, called with a `Tell` and the arguments; all of them are pickled.
        args: its arguments.
        tell: told what rank 0 tells.
        deadline_s: seconds until the processes are taken down.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RuntimeError: a rank raised, died or ran past the deadline.
    """
    if sys.platform == "linux":  # gloo otherwise resolves the hostname, which need not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The profiler otherwise reports its start and stop, and memory that is freed which it never saw.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Not forked from here: a rank's memory is measured, and must hold nothing of this process's. The fork server has
    # imported modules and done nothing else, which saves each rank the seconds that the imports take.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.profiler", "fdp"])
    pipes, processes = [], []
    for rank in range(place.world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(place, rank, store.port, theirs, fn, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, tell, time.monotonic() + deadline_s)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(pipes: list[Any], tell: Tell | None, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(pipes)) if rank not in results]
            raise RuntimeError(f"ranks {late} did not finish in time")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if kind == "error":
                raise RuntimeError(f"rank {rank} raised\n{value}")
            if kind == "result":
                results[rank] = value
            elif tell is not None:
                tell(*value)
    return [results[rank] for rank in range(len(pipes))]
