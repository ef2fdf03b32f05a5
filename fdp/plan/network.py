"""How long messages take on a network: a few numbers, and the arithmetic of the algorithms that use it.

References: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH (IJHPCA 2005),
sections 4.4 and 4.5; Li et al., PyTorch Distributed (VLDB 2020), section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """The network between ranks, as latency and bandwidth.

    Attributes:
        latency_s: seconds that one message of no bytes takes from one host to another.
        bandwidth_bytes_per_s: bytes a second that one host sends, while it receives as many.
        algorithm: how ranks reduce: "ring", "tree" (double binary trees) or "hierarchical" (within hosts, then a ring
            between them).
        ranks_per_host: ranks that share a host's link.
        inner_latency_s: as `latency_s`, within a host; None where ranks_per_host is 1.
        inner_bandwidth_bytes_per_s: bytes a second between ranks of one host; None where ranks_per_host is 1.
        in_flight: messages that the backend works on at once: the latencies of so many overlap, their bytes do not.
        compute_slowdown: share of its speed that computing loses while a message is under way, 0 to 1: on CPUs the
            backend needs the cores as well.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    algorithm: str = "ring"
    ranks_per_host: int = 1
    inner_latency_s: float | None = None
    inner_bandwidth_bytes_per_s: float | None = None
    in_flight: int = 1
    compute_slowdown: float = 0.0
