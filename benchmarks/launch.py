"""Starts gloo ranks on this machine, one thread each, and collects what they return."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def _rank_main(rank: int, world: int, port: int, conn: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if sys.platform == "linux":  # gloo otherwise resolves the hostname, which need not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler otherwise reports its start and stop
    try:
        torch.set_num_threads(1)
        timeout = datetime.timedelta(seconds=120)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        conn.send((True, fn(*args)))
        dist.destroy_process_group()
    except Exception:  # the parent raises it
        conn.send((False, traceback.format_exc()))


def on_ranks(world: int, fn: Callable[..., Any], *args: Any, deadline_s: float = 600.0) -> list[Any]:
    """Runs a module-level function on fresh ranks.

    Args:
        world: number of processes.
        fn: a module-level function; it and its arguments are pickled.
        args: its arguments.
        deadline_s: seconds until the ranks are taken down.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RuntimeError: a rank raised, died or ran past the deadline.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Spawned, not forked: a rank's memory is measured, and must hold nothing of its parent's.
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(rank, world, store.port, theirs, fn, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(deadline_s):
                raise RuntimeError(f"rank {rank} did not finish within {deadline_s} s")
            try:
                ok, value = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if not ok:
                raise RuntimeError(f"rank {rank} raised\n{value}")
            results.append(value)
        return results
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
