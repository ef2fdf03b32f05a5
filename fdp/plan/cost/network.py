"""How long messages take on a network: a few numbers, and the arithmetic of the algorithms that use it.

References: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH (IJHPCA 2005),
sections 4.4 and 4.5 (rings); Sanders, Speck and Träff, Two-Tree Algorithms for Full Bandwidth Broadcast, Reduction and
Scan (Parallel Computing 2009); Li et al., PyTorch Distributed (VLDB 2020), section 2.3.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

from fdp.distributed.collective import COLLECTIVES, Collective
from fdp.errors import ArgumentError, build_message
from fdp.tables import count, of_fields
from fdp.tracebacks import hiding_frames

ALGORITHMS = ("ring", "tree", "hierarchical")

_LONGEST_S, _SLOWEST_BYTES_PER_S, _MOST = 1e6, 1e-3, 2**31
"""Beyond these a number is a mistake, and arithmetic with it may overflow."""


@dataclass(frozen=True, repr=False)
class Network:
    """The network between ranks, as latency and bandwidth.

    A message takes a latency part, which does not depend on its bytes, and a byte part, which is proportional to
    them. With N ranks on as many hosts, and m bytes, an all-reduce takes

    - "ring": 2 (N - 1) latencies, and 2 (N - 1) / N m bytes over each link;
    - "tree": 2 log2(N) latencies, log2(N) rounded up, and 2 m bytes over the busiest link (m if N is 2): double binary
      trees, in pieces so small that filling the pipe counts as latency;
    - "hierarchical": a reduce-scatter within hosts, a ring between them, and an all-gather within hosts, one after the
      other.

    Where ranks share hosts, a ring leaves and enters each host once and goes at the pace of its slowest link, and
    trees span hosts, with a chain of ranks in each. An all-gather is a ring where the algorithm says "tree".

    A reduce-scatter is half of an all-reduce where the algorithm says "hierarchical". Elsewhere it goes from each rank
    to each, and so does an all-to-all whatever the algorithm: N - 1 latencies, and (N - 1) / N m bytes over each link.
    A permutation takes one latency and m bytes.

    Attributes:
        latency_s: seconds that one message of no bytes takes from one host to another.
        bandwidth_bytes_per_s: bytes a second that one host sends, while it receives as many.
        algorithm: how ranks reduce: "ring", "tree" (double binary trees) or "hierarchical" (within hosts, then a ring
            between them).
        ranks_per_host: ranks that share a host's link.
        inner_latency_s: as `latency_s`, within a host; None where ranks_per_host is 1.
        inner_bandwidth_bytes_per_s: bytes a second between ranks of one host; None where ranks_per_host is 1.
        in_flight: messages that the backend works on at once: the latencies of so many overlap, their bytes do not.
        compute_slowdown: share of its speed that computing loses while a message is under way, 0 up to (not
            including) 1: on CPUs the backend needs the cores as well.

    Raises:
        ArgumentError: a number has no meaning, or those within hosts are missing.

    Example:
        >>> network = Network(latency_s=1e-5, bandwidth_bytes_per_s=1e9)
        >>> round(network.message_s("mean", 4_000_000, world_size=4), 6)
        0.00606
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    algorithm: str = "ring"
    ranks_per_host: int = 1
    inner_latency_s: float | None = None
    inner_bandwidth_bytes_per_s: float | None = None
    in_flight: int = 1
    compute_slowdown: float = 0.0

    def __post_init__(self) -> None:
        wrong = []
        if not _is_latency(self.latency_s):
            wrong.append(f"latency_s={self.latency_s!r}: seconds, 0 to 1e6")
        if not _is_rate(self.bandwidth_bytes_per_s):
            wrong.append(f"bandwidth_bytes_per_s={self.bandwidth_bytes_per_s!r}: bytes a second, 0.001 or more")
        if self.algorithm not in ALGORITHMS:
            wrong.append(f"algorithm={self.algorithm!r}: one of {', '.join(map(repr, ALGORITHMS))}")
        inner = {name: getattr(self, name) for name in ("inner_latency_s", "inner_bandwidth_bytes_per_s")}
        if not _is_count(self.ranks_per_host):
            wrong.append(f"ranks_per_host={self.ranks_per_host!r}: a whole number, 1 to 2**31")
        elif self.ranks_per_host == 1:
            wrong += [f"{k}={v!r}: None, as ranks_per_host is 1" for k, v in inner.items() if v is not None]
        else:
            if not _is_latency(self.inner_latency_s):
                wrong.append(f"inner_latency_s={self.inner_latency_s!r}: seconds, 0 to 1e6, as ranks share hosts")
            if not _is_rate(self.inner_bandwidth_bytes_per_s):
                rate = self.inner_bandwidth_bytes_per_s
                wrong.append(
                    f"inner_bandwidth_bytes_per_s={rate!r}: bytes a second, 0.001 or more, as ranks share hosts"
                )
        if not _is_count(self.in_flight):
            wrong.append(f"in_flight={self.in_flight!r}: a whole number, 1 to 2**31")
        if not _is_latency(self.compute_slowdown) or self.compute_slowdown >= 1:
            wrong.append(f"compute_slowdown={self.compute_slowdown!r}: a share, 0 up to but not including 1")
        if wrong:
            raise ArgumentError(
                build_message(
                    "a Network with numbers that have no meaning.",
                    wrong,
                    remedy='for example fdp.Network(latency_s=20e-6, bandwidth_bytes_per_s=1.25e9, algorithm="ring").',
                )
            )

    def __repr__(self) -> str:
        return of_fields(self)  # all of it: buckets that are kept on disk are named by it

    @hiding_frames
    def message_s(self, op: str, size_bytes: float, world_size: int) -> float:
        """The seconds of one message on a network that is otherwise idle.

        Args:
            op: the name of a collective: "mean", "sum", "max", "min", "all_gather", "broadcast", "sum_scatter",
                "mean_scatter", "all_to_all" or "permute".
            size_bytes: bytes on one rank: what this rank contributes.
            world_size: number of ranks.

        Returns:
            Seconds; zero for a single rank.

        Raises:
            ArgumentError: there is no such operation, or no such number of ranks.
        """
        latency_s, s_per_byte = self.parts(op, world_size)
        return latency_s + s_per_byte * size_bytes

    def parts(self, op: str, world_size: int) -> tuple[float, float]:
        """The costs of a message: seconds for any size, and seconds for each byte.

        Args:
            op: as for `message_s`.
            world_size: likewise.

        Returns:
            Both numbers; zeros for a single rank.

        Raises:
            ArgumentError: there is no such operation, or no such number of ranks.
        """
        world_size = rank_count(world_size)
        return self._parts(op, world_size, min(self.ranks_per_host, world_size), 1)

    def parts_along(self, op: str, size: int, stride: int, world_size: int) -> tuple[float, float]:
        """The costs of a message along one dimension of a mesh, while all other ranks send along it as well.

        Args:
            op: as for `message_s`.
            size: number of ranks along the dimension.
            stride: the distance of two neighbours along it, in ranks.
            world_size: number of ranks of the mesh.

        Returns:
            As `parts`.
        """
        together = min(self.ranks_per_host, world_size)
        within = min(max(together // stride, 1), size)
        # So many messages share the link that leaves a host.
        return self._parts(op, size, within, together // within)

    def _parts(self, op: str, size: int, within: int, sharing: int) -> tuple[float, float]:
        """The costs of a message of so many ranks, some in each host; so many messages share a host's link."""
        if (collective := COLLECTIVES.get(op)) is None:
            raise ArgumentError(
                build_message(
                    f"a message {op!r}.", remedy=f"the operation is one of {', '.join(map(repr, COLLECTIVES))}."
                )
            )
        if size == 1:
            return 0.0, 0.0
        hosts = -(-size // within)
        outer = (self.latency_s, sharing / self.bandwidth_bytes_per_s) if hosts > 1 else (0.0, 0.0)
        inner = (0.0, 0.0)
        if within > 1:
            assert self.inner_latency_s is not None and self.inner_bandwidth_bytes_per_s is not None
            inner = (self.inner_latency_s, 1 / self.inner_bandwidth_bytes_per_s)
        combines = self.algorithm == "hierarchical" and collective.reduction is not None
        if (collective.splits or collective.paired) and not combines:
            return _directly(collective, hosts, within, outer, inner)
        if self.algorithm == "hierarchical":
            return _hierarchical(collective, hosts, within, outer, inner)
        if self.algorithm == "tree" and not collective.gathers:
            return _tree(collective, hosts, within, outer, inner)
        # Every rank of a ring waits for the slowest link at each step.
        return _ring(collective, size, (max(outer[0], inner[0]), max(outer[1], inner[1])))


_Link = tuple[float, float]
"""Seconds of a message of no bytes, and seconds for each byte."""


def _ring(collective: Collective, size: int, link: _Link) -> _Link:
    latency_s, s_per_byte = link
    if collective.rooted:  # a chain, in small pieces
        return (size - 1) * latency_s, s_per_byte
    if collective.gathers:
        return (size - 1) * latency_s, (size - 1) * s_per_byte
    return 2 * (size - 1) * latency_s, 2 * (size - 1) / size * s_per_byte


def _directly(collective: Collective, hosts: int, within: int, outer: _Link, inner: _Link) -> _Link:
    """Each rank sends its part to each other rank in turn; in a permutation each sends to one, as in a ring."""
    if collective.paired:
        return max(outer[0], inner[0]), max(outer[1], inner[1])
    others = (hosts - 1) * within, within - 1
    size = hosts * within
    latency_s = others[0] * outer[0] + others[1] * inner[0]
    # Links within a host and between hosts are used at once; the ranks of a host share the one that leaves it.
    return latency_s, max(within * others[0] / size * outer[1], others[1] / size * inner[1])


def _tree(collective: Collective, hosts: int, within: int, outer: _Link, inner: _Link) -> _Link:
    depth = (hosts - 1).bit_length()
    once = depth * outer[0] + (within - 1) * inner[0]
    if collective.rooted:
        return once, max(outer[1], inner[1])
    # Each host is inside one tree and a leaf of the other, and half of the bytes go through each: up and down, one
    # host sends them twice. Two hosts send only half of them up and half of them down. A chain is alike.
    sent = [min(count - 1, 2) * s_per_byte for count, (_, s_per_byte) in ((hosts, outer), (within, inner))]
    return 2 * once, max(sent)


def _hierarchical(collective: Collective, hosts: int, within: int, outer: _Link, inner: _Link) -> _Link:
    between = _ring(collective, hosts, outer) if hosts > 1 else (0.0, 0.0)
    inside = _ring(collective, within, inner) if within > 1 else (0.0, 0.0)
    if collective.gathers:
        # Ranks of one place in their hosts gather first, all over the same link; then each host exchanges the results.
        return between[0] + inside[0], within * between[1] + hosts * inside[1]
    # The reduce-scatter and the all-gather within a host are the two halves of a ring's all-reduce; between hosts each
    # rank sends its share, and together they send all. A reduce-scatter is the first half of both.
    share = 0.5 if collective.splits else 1.0
    return share * (between[0] + inside[0]), share * (between[1] + inside[1])


def network_text(network: Network) -> str:
    """A network in words."""
    text = f"{network.algorithm}: {network.latency_s * 1e6:g} us and {network.bandwidth_bytes_per_s / 1e9:g} GB/s"
    if network.inner_latency_s is not None and network.inner_bandwidth_bytes_per_s is not None:
        inner = f"{network.inner_latency_s * 1e6:g} us and {network.inner_bandwidth_bytes_per_s / 1e9:g} GB/s"
        text += f" between hosts of {count(network.ranks_per_host, 'rank')}, {inner} within"
    if network.in_flight > 1:
        text += f"; {network.in_flight} messages in flight"
    return text + (f"; computing {network.compute_slowdown:.0%} slower" if network.compute_slowdown else "")


def rank_count(world_size: Any) -> int:
    """A number of ranks as a plain integer.

    Args:
        world_size: any integer, of NumPy for example.

    Returns:
        The same number.

    Raises:
        ArgumentError: it is none, or there cannot be so many ranks.
    """
    try:
        size = operator.index(world_size)
    except TypeError:
        size = 0
    if isinstance(world_size, bool) or not _is_count(size):
        raise ArgumentError(
            build_message(f"world_size={world_size!r} is no number of ranks.", remedy="pass a whole number, 1 or more.")
        )
    return size


def _is_latency(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _LONGEST_S


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and _SLOWEST_BYTES_PER_S <= value <= math.inf


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST
