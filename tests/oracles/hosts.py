"""Two machines: network namespaces on a bridge, whose cables can be pulled. Needs Linux, root, and `ip` of iproute2."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator

SUBNET = "10.77.93"
DEVICE = "net0"


def why_not() -> str | None:
    """What is missing to make hosts here; None if nothing is."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root, for network namespaces"
    if shutil.which("ip") is None:
        return "needs the command ip, of iproute2"
    try:
        with two_hosts("fdptry"):
            return None
    except subprocess.CalledProcessError as error:
        return f"hosts cannot be made here: {error.stderr.strip()}"


class Hosts:
    """Two hosts.

    Args:
        name: that their namespaces begin with.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def prefix(self, host: int) -> list[str]:
        """Words before a command that run it on a host."""
        return ["ip", "netns", "exec", f"{self.name}-h{host}"]

    def pull_cable(self, host: int) -> None:
        """What is sent to a host, or by it, is lost from now on; no connection is closed."""
        _ip(f"-n {self.name}-sw link set p{host} down")


def enter(name: str, host: int) -> None:
    """Go to a host with this process, which has to have one thread, for good.

    Args:
        name: of `Hosts`.
        host: which.
    """
    with open(f"/run/netns/{name}-h{host}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"this process cannot go to host {host}")


def address(host: int) -> str:
    """The address of a host."""
    return f"{SUBNET}.{host + 1}"


@contextlib.contextmanager
def two_hosts(name: str = f"fdptest{os.getpid()}") -> Iterator[Hosts]:
    """The hosts exist inside of this context."""
    switch, hosts = f"{name}-sw", [f"{name}-h{host}" for host in range(2)]
    try:
        for namespace in (switch, *hosts):
            _ip(f"netns add {namespace}")
        _ip(f"-n {switch} link add br0 type bridge stp_state 0 forward_delay 0")
        _ip(f"-n {switch} link set br0 up")
        for host, namespace in enumerate(hosts):
            _ip(f"-n {namespace} link set lo up")
            _ip(f"-n {namespace} link add {DEVICE} type veth peer name p{host} netns {switch}")
            _ip(f"-n {switch} link set p{host} master br0 up")
            _ip(f"-n {namespace} addr add {address(host)}/24 dev {DEVICE}")
            _ip(f"-n {namespace} link set {DEVICE} up")
        yield Hosts(name)
    finally:
        for namespace in (*hosts, switch):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True)
