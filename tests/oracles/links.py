"""How long a message keeps a link from the next one, said once more for the tests."""

from __future__ import annotations

import fdp


def occupancy_s(network: fdp.Network, op: str, size_bytes: float, world_size: int) -> float:
    """A message that begins at s is done at s + L + B, with L its latency part and B its byte part; the next one may
    begin at s + max(B, (L + B) / in_flight): latencies overlap, and bytes do not."""
    latency_s, s_per_byte = network.parts(op, world_size)
    return max(s_per_byte * size_bytes, (latency_s + s_per_byte * size_bytes) / network.in_flight)
