"""Starts processes on this machine, one thread each, as ranks of a group or alone, and has them do what they are asked.

Between two questions the processes block in a read and take no processor time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

Tell = Callable[[int, int], None]
"""Called by a measurement with the number of finished parts and of all parts."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where contenders run.

    Attributes:
        world: number of processes.
        backend: of their process group; None for no process group at all.
        cache: the folder where the compiler keeps what it has compiled; None for wherever it does by itself.
        tree: the folder of another working tree of fdp, which is measured in place of this one; None for this one.
    """

    world: int
    backend: str | None
    cache: str | None = None
    tree: str | None = None

    def apart(self, contender: str) -> Place:
        """The same place, with a cache of a contender's own if there is one."""
        return self if self.cache is None else dataclasses.replace(self, cache=os.path.join(self.cache, contender))

    def without_group(self) -> Place:
        """As many processes that compute at the same time, each without other ranks."""
        return dataclasses.replace(self, backend=None)

    def why_not(self) -> str | None:
        """Why nothing can run there; None if something can."""
        return None

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """A context in which a process that is started finds the tree's fdp first; the benchmarks are this tree's."""
        if self.tree is None:
            yield
            return
        sys.path.insert(0, os.path.abspath(self.tree))
        try:
            yield
        finally:
            sys.path.pop(0)

    def check_tree(self) -> None:
        """Make sure that this process has the tree's fdp."""
        import fdp

        if self.tree is not None and not fdp.__file__.startswith(os.path.abspath(self.tree)):
            raise RuntimeError(f"fdp was imported from {fdp.__file__}, and not from {self.tree}")

    def opened(self) -> contextlib.AbstractContextManager[None]:
        """A context inside of which the place exists."""
        return contextlib.nullcontext()

    def join(self, rank: int, port: int) -> None:
        """Makes this process a rank of the default process group, if there is to be one.

        Args:
            rank: of this process.
            port: of the starter's store, on this machine's loopback.
        """
        if self.backend is None:
            return
        timeout = datetime.timedelta(seconds=120)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        device = torch.device("cuda", rank) if self.backend == "nccl" else None
        dist.init_process_group(
            self.backend, store=store, rank=rank, world_size=self.world, timeout=timeout, device_id=device
        )


def _rank_main(place: Place, rank: int, port: int, conn: Any, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        torch.set_num_threads(1)
        if place.cache is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = place.cache  # asked for anew whenever something is compiled
        place.join(rank, port)
        worker = make(*args)
        place.check_tree()
        while True:
            try:
                method, asked = conn.recv()
            except EOFError:  # no more questions come
                break
            conn.send((True, getattr(worker, method)(*asked)))
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:
        with contextlib.suppress(OSError):  # the parent raises it, unless another rank's error made it leave
            conn.send((False, traceback.format_exc()))


class Crew:
    """Fresh processes with an object of their own in each, to be used in a `with` statement.

    Args:
        place: how many, and their process group.
        make: a module-level class or function that each process calls for its object.
        args: what it is called with; all of it is pickled.
    """

    def __init__(self, place: Place, make: Callable[..., Any], *args: Any):
        if sys.platform == "linux":  # gloo otherwise resolves the hostname, which need not resolve
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # The profiler otherwise reports its start and stop, and memory that is freed which it never saw.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # The compiler otherwise reports that it leaves DDP's profiler ranges out.
        os.environ.setdefault("TORCH_LOGS", "-dynamo")
        # Kept, since the ranks meet there, and may do so whenever a group is made.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # Not forked from here: a rank's memory is measured, and must hold nothing of this process's. The fork server
        # has imported modules (also those that torch.optim imports when it is first used) and done nothing else, which
        # saves each rank the seconds that the imports take.
        # Of another tree's fdp it knows nothing. Nor is a rank on a card forked: what imports inductor opens the card,
        # and no fork may use it then.
        forked = place.tree is None and place.backend != "nccl"
        context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
        if forked:
            context.set_forkserver_preload(["torch", "torch.profiler", "torch._dynamo", "fdp"])
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(place.world):
            ours, theirs = context.Pipe()
            arguments = (place, rank, self._store.port, theirs, make, args)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            with place.importing():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, method: str, *args: Any, deadline_s: float = 900.0) -> list[Any]:
        """Calls a method of every process's object, and waits until all have answered.

        Args:
            method: its name.
            args: what it is called with; pickled.
            deadline_s: seconds to wait for the answers.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RuntimeError: a rank raised, died or did not answer in time.
        """
        deadline = time.monotonic() + deadline_s
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it is gone; what it sent before that says why
                pipe.send((method, args))
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [rank for rank in range(len(self._pipes)) if rank not in answers]
                raise RuntimeError(f"ranks {late} did not answer {method!r} in {deadline_s:.0f} s")
            for rank, pipe in enumerate(self._pipes):
                if pipe not in ready:
                    continue
                try:
                    fine, value = pipe.recv()
                except (EOFError, OSError):
                    raise RuntimeError(f"rank {rank} died in {method!r}") from None
                if not fine:
                    raise RuntimeError(f"rank {rank} raised\n{value}")
                answers[rank] = value
        return [answers[rank] for rank in range(len(self._pipes))]

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            # After an error the ranks may wait for each other, and do not notice a closed pipe.
            process.join(0 if kind is not None else 5)
            if process.is_alive():
                process.kill()
                process.join()


class _Caller:
    """Calls functions."""

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Calls one."""
        return fn(*args)


def run_in(place: Place, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs a module-level function in fresh processes.

    Args:
        place: how many, and their process group.
        fn: a module-level function.
        args: its arguments; pickled.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RuntimeError: a rank raised, died or ran past the deadline.
    """
    with Crew(place, _Caller) as crew:
        return crew.ask("call", fn, args)
