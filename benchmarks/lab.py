"""A network of hosts on this machine: network namespaces, joined by a bridge, with shaped links.

Each host is a namespace with one interface; the bridge has a namespace of its own, so that nothing of the machine's
own network is touched. What a host sends, and what it gets, passes a token bucket (tc-tbf) of the link's rate. Needs
Linux, root, and the commands `ip` and `tc`.

The namespaces are named after the process that made them. They are removed at the end, also after an error, a
Ctrl-C or a SIGTERM; those of a process that was killed are removed by the next one that makes a lab.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import os
import pathlib
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator

import torch.distributed as dist
from launch import Place

_CLONE_NEWNET = 0x40000000
_FOLDER = pathlib.Path("/run/netns")
_DEVICE = "net0"


@dataclasses.dataclass(frozen=True)
class LabPlace(Place):
    """Ranks on hosts, with gloo.

    Attributes:
        bits_per_s: what each link carries, in each direction.
        maker: the process that makes the hosts.
        ranks_per_host: ranks that share a host, and its link.
    """

    bits_per_s: float = 1e9
    maker: int = 0
    ranks_per_host: int = 1

    def why_not(self) -> str | None:
        """What is missing to make hosts here; None if nothing is."""
        if not hasattr(os, "geteuid") or os.geteuid() != 0:
            return "needs root, for network namespaces"
        missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
        if missing:
            return f"needs the command {' and '.join(missing)}, of iproute2"
        try:
            with self._built(f"{self._name}-try"):
                return None
        except subprocess.CalledProcessError as error:
            return f"hosts cannot be made here: {' '.join(error.cmd)}: {error.stderr.strip()}"

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """The hosts exist inside of this context."""
        _remove_left_over()
        with self._built(self._name):
            yield

    @contextlib.contextmanager
    def _built(self, name: str) -> Iterator[None]:
        switch, hosts = f"{name}-sw", [f"{name}-h{host}" for host in range(self.world // self.ranks_per_host)]
        with _namespaces([switch, *hosts]):
            _ip(f"-n {switch} link add br0 type bridge stp_state 0 forward_delay 0")
            _ip(f"-n {switch} link set br0 up")
            for number, host in enumerate(hosts):
                _ip(f"-n {host} link set lo up")
                _ip(f"-n {host} link add {_DEVICE} type veth peer name p{number} netns {switch}")
                _ip(f"-n {switch} link set p{number} master br0 up")
                _ip(f"-n {host} addr add {_address(number)}/24 dev {_DEVICE}")
                _ip(f"-n {host} link set {_DEVICE} up")
                self._shape(host, _DEVICE)
                self._shape(switch, f"p{number}")
            yield

    def join(self, rank: int, port: int) -> None:
        """Moves this process to its host, and makes it a rank there; rank 0 has the store."""
        _enter(self._host(rank))
        os.environ["GLOO_SOCKET_IFNAME"] = _DEVICE
        timeout = datetime.timedelta(seconds=120)
        # No other group of the starter has its port.
        store = dist.TCPStore(_address(0), port, self.world, is_master=rank == 0, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.world, timeout=timeout)

    @property
    def _name(self) -> str:
        return f"fdplab-{self.maker}"

    def _host(self, rank: int) -> str:
        return f"{self._name}-h{rank // self.ranks_per_host}"

    def _shape(self, namespace: str, device: str) -> None:
        # A bucket of a millisecond, so that rates are exact over a message, and of at least two packets of the largest
        # size that the kernel hands over at once.
        burst = int(min(max(self.bits_per_s / 8 * 1e-3, 2**17), 2**21))
        command = f"tc qdisc replace dev {device} root tbf rate {self.bits_per_s:.0f}bit burst {burst} latency 50ms"
        _ip(f"netns exec {namespace} {command}")


def lab_place(bits_per_s: float, hosts: int = 2, ranks_per_host: int = 1) -> LabPlace:
    """Hosts of so many ranks each, which this process makes when the place is opened."""
    ranks = hosts * ranks_per_host
    return LabPlace(ranks, "gloo", bits_per_s=bits_per_s, maker=os.getpid(), ranks_per_host=ranks_per_host)


def _address(host: int) -> str:
    return f"10.77.91.{host + 1}"


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def _namespaces(names: list[str]) -> Iterator[None]:
    made: list[str] = []
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        for name in names:
            made.append(name)
            _ip(f"netns add {name}")
        yield
    finally:
        # An impatient user may interrupt this as well.
        with _without_interruption():
            for name in made:
                _remove(name)
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _without_interruption() -> Iterator[None]:
    before = {which: signal.signal(which, signal.SIG_IGN) for which in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _remove(name: str) -> None:
    """Ends what runs in a namespace, and removes it; without either, does nothing."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _remove_left_over() -> None:
    for path in _FOLDER.glob("fdplab-*"):
        found = re.fullmatch(r"fdplab-(\d+)-[\w-]+", path.name)
        if found and not pathlib.Path("/proc", found[1]).exists():
            _remove(path.name)


def _enter(namespace: str) -> None:
    with open(_FOLDER / namespace) as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"namespace {namespace} cannot be entered")
