"""Where a monitor can be reached: the addresses of this machine, and what names the machine."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


def host_name() -> str:
    """What names this machine, and its network: containers on one machine cannot reach each other's loopback."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def own_addresses() -> list[str]:
    """Addresses at which other machines may reach this one, the likeliest first.

    Those of the interface that gloo or NCCL is set to use come first.
    """
    wanted = {
        name.lstrip("=^")
        for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        for name in os.environ.get(variable, "").split(",")
        if name and not name.startswith("^")
    }
    found = [(name not in wanted, address) for name, address in (*_ipv4(), *_ipv6())]
    return [address for _, address in sorted(found, key=lambda each: each[0])]


def _ipv4() -> Iterator[tuple[str, str]]:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
                address = socket.inet_ntoa(answer[20:24])
                if not ipaddress.ip_address(address).is_loopback:
                    yield name, address


def _ipv6() -> Iterator[tuple[str, str]]:
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, _, _, scope, _, name = line.split()
            if scope == "00":  # reachable from everywhere
                yield name, str(ipaddress.ip_address(int(digits, 16)))
