"""The rank's side: starts the monitor, tells it what the rank does, and knows what it has heard of other ranks.

Relied on in torch: nothing private. Where ranks find each other's monitors is written into the store of the group.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.util
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from fdp.distributed.liveness import status as status_of
from fdp.distributed.liveness.addresses import host_name, own_addresses
from fdp.distributed.liveness.fault import Fault
from fdp.distributed.liveness.status import SIZE_BYTES, Status
from fdp.distributed.liveness.tree import parent_of
from fdp.errors import ArgumentError, PeerError, build_message, first_line

_START_S = 20.0
"""So long a monitor may take to start; without it there is a warning, and no ranks are watched."""

_BOOTSTRAP = (
    # As a package without its __init__, which imports torch.
    "import sys, types; fdp = types.ModuleType('fdp'); fdp.__path__ = [sys.argv.pop(1)]; sys.modules['fdp'] = fdp; "
    "from fdp.distributed.liveness.monitor import main; main()"
)


def liveness_s() -> float:
    """Seconds after which a rank that is silent, or stopped, counts as lost: FDP_LIVENESS_S, or 10; 0 for never.

    Raises:
        ArgumentError: it is no number.
    """
    text = os.environ.get("FDP_LIVENESS_S", "10")
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(
            build_message(
                f"the environment has FDP_LIVENESS_S={text!r}.",
                remedy="set it to a number of seconds, or to 0 to watch nobody.",
            )
        ) from None


@dataclass
class Watched:
    """The ranks of a group, as far as this one knows.

    Attributes:
        key: of the group, in messages to the monitor.
        rank: this one's.
        size: number of ranks.
        monitor: the process beside this rank.
        calls: of steps on the group on this rank, as far as all messages of theirs were there.
        calling: which call is under way, from 1 on; None between calls.
        step: the name of the step that was called last.
        number: which call of that step.
        raised: whether the last call ended in an error that other ranks may wait for.
        desynchronised: whether it left a call in the middle of its messages, and cannot go on.
        version: of the news that were read last.
        news: what the monitor has heard.
        awaited: says what a step waits for, or waited for last; None outside of steps.
        waits_since_s: since when this rank waits for others, by the monotonic clock; None if it does not.
    """

    key: str
    rank: int
    size: int
    monitor: _Beside
    calls: int = 0
    calling: int | None = None
    step: str = ""
    number: int = 0
    raised: bool = False
    desynchronised: bool = False
    version: int = -1
    news: dict[str, Any] = field(default_factory=dict)
    awaited: Callable[[], str] | None = None
    waits_since_s: float | None = None
    _phase: int = status_of.IDLE

    def begin(self, step: str, number: int) -> None:
        """A call of a step begins."""
        if self.raised:
            self.raised = False
            self.monitor.command(do="clear", group=self.key)
        self.calling, self.step, self.number = self.calls + 1, step, number
        self._phase = status_of.CALLING
        self.monitor.status.say(self._phase, number, step)

    def prepares(self, whether: bool) -> None:
        """Whether the call that is under way traces, or compiles: its messages come later."""
        self._phase = status_of.PREPARING if whether else status_of.CALLING
        self.monitor.status.say(self._phase, self.number, self.step)

    def messages_are_there(self) -> None:
        """All messages of the call are through: whatever happens to it now, no other rank waits for it."""
        if self.calling is not None:
            self.calls = self.calling

    def end(self, error: BaseException | None) -> None:
        """The call has ended."""
        left, self.calling, self.awaited = self.calling, None, None
        if error is not None and not isinstance(error, PeerError) and left is not None and left > self.calls:
            if self.desynchronised:
                self.monitor.command(do="leave", group=self.key, reason="raised", text=_text_of(error))
            else:
                self.raised = True
                self.monitor.command(do="raised", group=self.key, text=_text_of(error), call=left)
        self._phase = status_of.IDLE
        self.monitor.status.say(self._phase, self.number, self.step)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """This rank waits for others meanwhile."""
        self.wait_begins()
        try:
            yield
        finally:
            self.wait_ends()

    def wait_begins(self) -> None:
        """This rank waits for others."""
        self.waits_since_s = time.monotonic()
        self.monitor.status.say(status_of.WAITING, self.number, self.step)

    def wait_ends(self) -> None:
        """It does not any more."""
        self.waits_since_s = None
        self.monitor.status.say(self._phase, self.number, self.step)

    @property
    def has_news(self) -> bool:
        """Whether the monitor has heard something that was not read yet, or that is of faults."""
        return self.monitor.status.version != self.version or bool(self.news.get("story"))

    def _read(self) -> dict[str, Any]:
        version = self.monitor.status.version
        if version != self.version:
            news = self.monitor.status.news()
            if news is not None:
                self.version, self.news = version, news.get(self.key, {})
        return self.news

    def faults(self, believing: bool) -> list[Fault]:
        """What became of other ranks, in the order in which it was noticed.

        Args:
            believing: whether to believe what is only suspected, since this rank has waited for some time.
        """
        found = [Fault.from_json(each) for each in self._read().get("story", ())]
        return [
            fault
            for fault in found
            if fault.rank != self.rank
            and (believing or not fault.suspected)
            # A rank that raised in a call, and goes on, keeps waiting only those that are in that call.
            and (fault.call is None or fault.call == self.calling)
        ]

    def busy(self) -> list[tuple[int, str, float]]:
        """Ranks that do not wait for others: which, what they do, and since how many seconds; the longest first."""
        return [(rank, text, age_s) for rank, text, age_s in self._read().get("busy", ())]


class _Beside:
    """The monitor beside this process."""

    def __init__(self, liveness_s: float, everywhere: bool) -> None:
        self.pid, self._lock = os.getpid(), threading.Lock()
        self.closing = threading.Event()
        with _memory() as memory:
            memory.truncate(SIZE_BYTES)
            self.status = Status(memory.fileno())
            self.status.say(status_of.NEW, 0, "")
            reading, self._writing = os.pipe()
            try:
                arguments = [self.pid, memory.fileno(), reading, liveness_s, int(everywhere), host_name()]
                self.port, self.token = _start(memory.fileno(), reading, [str(argument) for argument in arguments])
            except BaseException:
                os.close(self._writing)
                raise
            finally:
                os.close(reading)
        os.set_blocking(self._writing, False)

    def command(self, **command: Any) -> None:
        """Tell the monitor something; it is lost if the monitor has gone."""
        with self._lock, contextlib.suppress(OSError):
            os.write(self._writing, json.dumps(command).encode() + b"\n")


def _memory() -> IO[bytes]:
    """A file that is in memory, if the system has such files."""
    try:
        return os.fdopen(os.memfd_create("fdp"), "r+b")
    except (AttributeError, OSError):
        return tempfile.TemporaryFile()


def _start(memory: int, reading: int, arguments: list[str]) -> tuple[int, str]:
    package = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, package, *arguments]
    # Not by fork: no other descriptor goes along, or connections of this process would outlive it.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(memory, reading)
    ) as process:
        try:
            said, errors = process.communicate(timeout=_START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    if process.returncode:
        raise OSError(errors.decode(errors="replace").strip().splitlines()[-1:] or "it said nothing")
    found = json.loads(said)
    return int(found["port"]), str(found["token"])


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Watched | None] = weakref.WeakKeyDictionary()
_own: list[_Beside] = []
_starting = threading.Lock()


def all_watched() -> list[Watched]:
    """The groups whose ranks are watched."""
    return [watched for watched in _groups.values() if watched is not None]


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether it has been decided if the ranks of a group are watched."""
    return group in _groups


def described_status(watched: Watched) -> str:
    """What this rank is doing, in words."""
    what, call, text, _ = watched.monitor.status.doing()
    return status_of.described(what, call, text)


def watched_ranks(group: dist.ProcessGroup | None) -> Watched | None:
    """What is known of the ranks of a group; None if they are not watched."""
    return None if group is None else _groups.get(group)


def watch(group: dist.ProcessGroup, name: str, rank: int, size: int, store_of: Callable[[], Any]) -> Watched | None:
    """Watch the ranks of a group from now on, and let them watch this one; other ranks need not be there yet.

    Args:
        group: the group.
        name: the same on all ranks, and no other group's.
        rank: of this process in it.
        size: number of ranks.
        store_of: gives the store of the group.

    Returns:
        What is known of them; None if they are not watched: FDP_LIVENESS_S=0, a store that is not shared by processes,
        or no monitor could be started, of which there is a warning.
    """
    if group in _groups:
        return _groups[group]
    with _starting:
        if group in _groups:
            return _groups[group]
        store, limit_s = store_of(), liveness_s()
        address = _address_of(store)
        # On other systems nothing here tells of a process what Linux does.
        if size < 2 or limit_s <= 0 or address is None or not sys.executable or sys.platform != "linux":
            _groups[group] = None
            return None
        try:
            if not _own or _own[0].pid != os.getpid():  # a child by fork has none
                _own[:] = [_Beside(limit_s, everywhere=address not in ("127.0.0.1", "localhost", "::1"))]
                multiprocessing.util.Finalize(None, _leave, args=(_own[0],), exitpriority=100)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            _groups[group] = None
            warnings.warn(
                f"fdp could not start the process that watches rank {rank}: {type(error).__name__}: {error}. A rank "
                "that stops is noticed when the process group's own time limit has passed. FDP_LIVENESS_S=0 avoids "
                "this warning.",
                stacklevel=2,
            )
            return None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        try:
            key = f"{name}/{attempt}/{store.add(f'fdp/liveness/{name}/{attempt}/{rank}', 1)}"
        except (RuntimeError, dist.DistError):  # whoever needs the store next says so
            _groups[group] = None
            return None
        made = _groups[group] = Watched(key, rank, size, _own[0])
        made.monitor.command(do="join", group=key, rank=rank, size=size)
        weakref.finalize(group, _leave, made.monitor, key).atexit = False
        threading.Thread(target=_introduce, args=(made, store), name="fdp: ranks meet", daemon=True).start()
        return made


def _address_of(store: Any) -> str | None:
    """The address of what holds a store that several processes share; "" for a file, None for any other store."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return str(store.host)
    return "" if isinstance(store, dist.FileStore) else None  # type: ignore[attr-defined]


def _introduce(made: Watched, store: Any) -> None:
    """Write into the store where this rank's monitor is, and find its parent's there, which may come much later."""
    monitor, pause_s = made.monitor, 0.01
    with contextlib.suppress(RuntimeError, dist.DistError, ValueError):
        own = {
            "addresses": own_addresses(), "port": monitor.port, "token": monitor.token, "host": host_name(),
        }  # fmt: skip
        store.set(f"fdp/liveness/{made.key}/at/{made.rank}", json.dumps(own))
        parent = parent_of(made.rank)
        if parent is None:
            return
        name = f"fdp/liveness/{made.key}/at/{parent}"
        while not store.check([name]):
            if monitor.closing.wait(pause_s):
                return
            pause_s = min(2 * pause_s, 1.0)
        found = json.loads(store.get(name))
        addresses = ["127.0.0.1"] if found["host"] == own["host"] else found["addresses"]
        monitor.command(do="parent", group=made.key, addresses=addresses, port=found["port"], token=found["token"])


def _leave(monitor: _Beside, key: str | None = None) -> None:
    """Say that this rank leaves a group, or all of them as the process ends; and why."""
    if monitor.pid != os.getpid():
        return
    error: BaseException | None = None
    if key is None:
        monitor.closing.set()
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    reason, text = "left", "it has destroyed the process group" if key is not None else "its program has ended"
    if isinstance(error, SystemExit):
        text = f"its program has ended with exit code {error.code}"
    elif error is not None and not isinstance(error, PeerError):
        reason, text = "raised", _text_of(error)
    monitor.command(do="leave", group=key, reason=reason, text=text)


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:1000]


def age(seconds: float) -> str:
    """Seconds in words.

    Example:
        >>> age(12.3), age(400)
        ('12 s', '6 min 40 s')
    """
    return f"{seconds:.0f} s" if seconds < 120 else f"{int(seconds) // 60} min {int(seconds) % 60} s"
