"""Run module-level functions on real ranks, each in a process of its own, and never hang.

`run(world, fn, *args)` sends a job to a pool of ranks that lives as long as the test session, since
importing torch costs seconds and joining a process group costs a fraction of one.
`run_fresh(world, fn, *args)` starts ranks for one job alone: for jobs that kill ranks, wreck the process
group or need their own environment. Ranks speak gloo, or `cpu:gloo,cuda:nccl`; with NCCL several ranks may
share one card. Every wait has a deadline; when one passes, the ranks' Python stacks
are in the failure message and the ranks are gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

# Long enough for two slow shared cores, short enough that a lost message fails a test and not the session.
COLLECTIVE_TIMEOUT_S = 60.0
JOB_DEADLINE_S = 150.0
START_DEADLINE_S = 90.0
# After one rank has failed the others get this long to say what they saw: usually they wait in a collective
# that will never complete, and their stacks are not the interesting ones.
GRACE_S = 10.0


@dataclasses.dataclass(frozen=True)
class RemoteError:
    """An exception as another process saw it: its class names (most derived first), message and traceback."""

    names: tuple[str, ...]
    message: str
    traceback: str

    @property
    def name(self) -> str:
        return self.names[0]

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        names = tuple(c.__name__ for c in type(error).__mro__)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(names, str(error), text)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank came to: a value, an error, or the exit code it died with."""

    rank: int
    value: Any = None
    error: RemoteError | None = None
    exitcode: int | None = None
    log: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode is None

    def describe(self) -> str:
        if self.error is not None:
            return f"rank {self.rank} raised\n{self.error.traceback}"
        if self.exitcode is not None:
            return f"rank {self.rank} died with exit code {self.exitcode}\n{self.log}"
        return f"rank {self.rank} returned"


class RankError(AssertionError):
    """A rank raised or died during a job that was expected to return; `outcomes` holds all ranks."""

    def __init__(self, outcomes: list[Outcome]):
        self.outcomes = outcomes
        super().__init__("\n".join(o.describe() for o in outcomes))


class RankTimeout(RankError):
    """A job ran past its deadline; the message holds the stacks of the ranks that had not answered."""

    def __init__(self, what: str, late: list[int], outcomes: list[Outcome], stacks: str):
        super().__init__(outcomes)
        self.late = late
        text = f"{what}: ranks {late} did not answer in time"
        self.args = ("\n".join([text, *(o.describe() for o in outcomes), stacks]),)


# --- in the rank's process ----------------------------------------------------------------------------


def _serve(rank: int, world: int, port: int | None, backend: str, conn: Any, log: str, env: Mapping[str, str]) -> None:
    """The main loop of a rank: join the group, then run jobs until it is stopped or the parent is gone."""
    gc.freeze()  # what the forkserver has imported stays
    os.environ.update(env)
    if "nccl" in backend:
        # Ranks of one host must have a card each. Ranks that seem to be on hosts of their own may share one.
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
    handle = open(log, "a", buffering=1)  # noqa: SIM115 (lives as long as the process)
    # Straight to the file, past Python: gloo and the interpreter's last words (a segfault) come this way.
    os.dup2(handle.fileno(), 1)
    os.dup2(handle.fileno(), 2)
    faulthandler.enable(handle)
    faulthandler.register(signal.SIGUSR1, handle, all_threads=True)
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if port is not None:
        timeout = datetime.timedelta(seconds=float(env.get("RANKS_TIMEOUT_S", COLLECTIVE_TIMEOUT_S)))
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    conn.send_bytes(pickle.dumps(("ready", None)))
    while True:
        try:
            request = pickle.loads(conn.recv_bytes())
        except (EOFError, OSError):
            break
        if request is None:
            break
        conn.send_bytes(_answer(*request))
    if dist.is_initialized():
        dist.destroy_process_group()


def _answer(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    # The same seed on every rank: a test that wants ranks to draw different numbers has to say so.
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            # A program that fails its proof is a defect, though a plainer one that passes takes its place.
            warnings.filterwarnings("error", message="fdp: a faster program")
            return pickle.dumps(("value", fn(*args, **kwargs)))
    except BaseException as error:  # whatever it is, the test has to see it
        return pickle.dumps(("error", RemoteError.of(error)))


# --- in the test's process ----------------------------------------------------------------------------


def context(backend: str = "gloo") -> Any:
    """Forkserver where there is one: ranks then start from a process that has imported what most of them need.

    On cards each imports for itself: inductor, once imported, has opened the card, and no fork may use it then.

    However they start, they get this process's `sys.path`: what a test imports, its ranks import.
    """
    if "nccl" in backend or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fdp", "torch.distributed", "torch._inductor.compile_fx", "hypothesis", "pytest"])
    return context


class Ranks:
    """`world` processes in one group that run jobs together; `init=False` leaves them ungrouped."""

    def __init__(self, world: int, env: Mapping[str, str] | None = None, init: bool = True, backend: str = "gloo"):
        self.world = world
        self._store: dist.TCPStore | None = None
        self._logs = pathlib.Path(tempfile.mkdtemp(prefix="fdp-ranks-"))
        port = None
        if init:
            # Held here, as torchrun's agent holds it: the store outlives any rank that a test kills.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        # Should ranks disagree about whether to agree, that must not take fdp's default of minutes to show.
        environment = {"FDP_AGREE_TIMEOUT_S": "45", **(env or {})}
        if sys.platform == "linux":  # gloo otherwise resolves the hostname, which need not resolve
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        start = context(backend)
        self._conns: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(world):
            ours, theirs = start.Pipe()
            process = start.Process(
                target=_serve,
                args=(rank, world, port, backend, theirs, str(self._log(rank)), environment),
                daemon=True,
                name=f"rank{rank}of{world}",
            )
            process.start()
            theirs.close()
            self._conns.append(ours)
            self._processes.append(process)
        started = self._collect(START_DEADLINE_S, GRACE_S, "start of the ranks")
        if not all(o.ok for o in started):
            self.kill()
            raise RankError(started)

    def _log(self, rank: int) -> pathlib.Path:
        return self._logs / f"rank{rank}.log"

    def _read_log(self, rank: int) -> str:
        path = self._log(rank)
        return path.read_text(errors="replace")[-6000:] if path.exists() else ""

    def pid(self, rank: int) -> int:
        return int(self._processes[rank].pid)

    def submit(
        self,
        fn: Callable[..., Any],
        *args: Any,
        deadline_s: float = JOB_DEADLINE_S,
        grace_s: float = GRACE_S,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Runs `fn(*args, **kwargs)` on every rank; the outcomes in rank order, whatever they are."""
        request = pickle.dumps((fn, args, kwargs))
        for conn in self._conns:
            conn.send_bytes(request)
        return self._collect(deadline_s, grace_s, f"{fn.__module__}.{fn.__qualname__}")

    def _collect(self, deadline_s: float, grace_s: float, what: str) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        end = time.monotonic() + deadline_s
        while len(outcomes) < self.world:
            waiting = {r: self._conns[r] for r in range(self.world) if r not in outcomes}
            left = end - time.monotonic()
            if left <= 0:
                break
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout=left)
            for rank, conn in waiting.items():
                if conn in ready:
                    outcomes[rank] = self._receive(rank, conn)
                    if not outcomes[rank].ok:
                        end = min(end, time.monotonic() + grace_s)
        late = [r for r in range(self.world) if r not in outcomes]
        if late:
            stacks = self._stacks(late)
            self.kill()
            raise RankTimeout(what, late, [o for _, o in sorted(outcomes.items())], stacks)
        return [outcomes[r] for r in range(self.world)]

    def _receive(self, rank: int, conn: Any) -> Outcome:
        try:
            kind, payload = pickle.loads(conn.recv_bytes())
        except (EOFError, OSError):
            # The end of the pipe comes a moment before the exit code.
            self._processes[rank].join(10)
            code = self._processes[rank].exitcode
            return Outcome(rank, exitcode=-1 if code is None else code, log=self._read_log(rank))
        if kind == "error":
            return Outcome(rank, error=payload, log=self._read_log(rank))
        return Outcome(rank, value=payload)

    def _stacks(self, late: list[int]) -> str:
        for rank in late:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(1.0)  # for faulthandler to write
        return "\n".join(f"--- rank {r}, last output and stack ---\n{self._read_log(r)}" for r in late)

    def close(self) -> None:
        """Asks the ranks to leave and takes them down if they do not."""
        for conn in self._conns:
            with contextlib.suppress(OSError):
                conn.send_bytes(pickle.dumps(None))
        for process in self._processes:
            process.join(5)
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(120)  # at once, but on a machine that has no time for it
            process.close()
        for conn in self._conns:
            conn.close()
        self._processes, self._conns = [], []
        self._store = None
        shutil.rmtree(self._logs, ignore_errors=True)

    @property
    def usable(self) -> bool:
        return bool(self._processes) and all(p.is_alive() for p in self._processes)


_pools: dict[tuple[int, str], Ranks] = {}


def run(world: int, fn: Callable[..., Any], *args: Any, backend: str = "gloo", **kwargs: Any) -> list[Any]:
    """Runs a job on the session's pool of `world` ranks and returns their values in rank order.

    Args:
        world: number of ranks.
        fn: a module-level function; it and its arguments are pickled.
        args, kwargs: its arguments; `deadline_s` is for the harness.
        backend: of the process group.

    Raises:
        RankError: a rank raised or died. The pool is thrown away, since its ranks may be out of step.
        RankTimeout: the deadline passed; the message shows where the ranks were.
    """
    kind = (world, backend)
    pool = _pools.get(kind)
    if pool is None or not pool.usable:
        pool = _pools[kind] = Ranks(world, backend=backend)
    try:
        outcomes = pool.submit(fn, *args, **kwargs)
    except RankTimeout:
        _pools.pop(kind, None)
        raise
    if not all(o.ok for o in outcomes):
        _pools.pop(kind).kill()
        raise RankError(outcomes)
    return [o.value for o in outcomes]


def run_fresh(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    init: bool = True,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[Outcome]:
    """Runs one job on ranks of its own and returns every rank's outcome, deaths and errors included.

    Args:
        world: number of ranks.
        fn: a module-level function.
        env: environment variables for the ranks.
        init: whether the ranks form a process group first.
        backend: of that group.
        args, kwargs: as for `run`.

    Raises:
        RankTimeout: the deadline passed.
    """
    ranks = Ranks(world, env=env, init=init, backend=backend)
    try:
        return ranks.submit(fn, *args, **kwargs)
    finally:
        ranks.close()


def close_pools() -> None:
    """Ends the session's ranks."""
    while _pools:
        _pools.popitem()[1].close()
