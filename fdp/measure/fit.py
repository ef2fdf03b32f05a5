"""From seconds of messages to the numbers of a network: plain arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from fdp.errors import ArgumentError, build_message

MOST_IN_FLIGHT = 8
"""Larger numbers of messages at once are not distinguished."""


def fit_line(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit seconds = base + slope * bytes: of the lines through two of the points, the one with the smallest error.

    One of the two is among the two largest messages. Most bytes of a step are in large ones, and small ones may be
    quicker than their bytes, where there is memory on the way.

    The error of a message is a ratio, so that a small message, which shows the latency, counts as much as a large one,
    which shows the bandwidth; and logarithms of factors are summed, not squared, so that one message that
    was held up does not bend the line. Lines through one point with no base take part, too.

    Args:
        sizes_bytes: of the messages; two different ones at least.
        seconds: that each took, positive.

    Returns:
        Base in seconds, and slope in seconds a byte, which is positive; the base is not negative.

    Raises:
        ArgumentError: there are fewer than two sizes, or none took less time than the largest.

    Example:
        >>> fit_line([0, 1000, 2000, 3000], [1.0, 2.0, 3.0, 40.0])
        (1.0, 0.001)
    """
    points = sorted((float(size), second) for size, second in zip(sizes_bytes, seconds, strict=True))
    lines = [(0.0, second / size) for size, second in points[-2:] if size > 0]
    for (x1, y1), (x2, y2) in itertools.combinations(points, 2):
        if x1 != x2 and x2 >= points[-2][0]:
            slope = (y2 - y1) / (x2 - x1)
            lines.append((y1 - slope * x1, slope))
    lines = [(base, slope) for base, slope in lines if base >= 0 and slope > 0]
    if len(set(sizes_bytes)) < 2 or points[-1][1] <= min(seconds):
        raise ArgumentError(
            build_message(
                "latency and bandwidth cannot be computed from the messages that were timed.",
                [f"{size} bytes: {second:g} s" for size, second in zip(sizes_bytes, seconds, strict=True)],
                remedy="give the network by hand: fdp.Network(latency_s=, bandwidth_bytes_per_s=).",
            )
        )

    def deviation(line: tuple[float, float]) -> tuple[float, tuple[float, float]]:
        base, slope = line
        if base == 0 and any(size == 0 for size, _ in points):
            return math.inf, line
        return sum(abs(math.log((base + slope * size) / second)) for size, second in points), line

    return min(lines, key=deviation)


def ring_numbers(base_s: float, slope_s_per_byte: float, world_size: int) -> tuple[float, float]:
    """Latency and bandwidth of the links of a ring, from the times of an all-reduce over it.

    An all-reduce over a ring is 2(N-1) rounds, in each of which every rank sends an N-th of the bytes.

    Args:
        base_s: seconds of a message of no bytes.
        slope_s_per_byte: seconds that each byte adds.
        world_size: number of ranks N, two at least.

    Returns:
        Seconds of one round without bytes, and bytes a second of a link.

    Example:
        >>> ring_numbers(6e-3, 1.5e-9, world_size=4)
        (0.001, 1000000000.0)

    References:
        Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH (IJHPCA 2005),
        section 4.5.
    """
    rounds = 2 * (world_size - 1)
    return base_s / rounds, rounds / (world_size * slope_s_per_byte)


def in_flight_of(one_s: float, many_s: float, count: int) -> int:
    """How many messages run at once, from the time of many small ones that are started together.

    With F in flight a message may start T / F after the one before, and takes T: all are there after
    T + (count - 1) * T / F.

    Args:
        one_s: seconds of one small message.
        many_s: seconds of `count` of them.
        count: how many, two at least.

    Returns:
        F, from 1 to `MOST_IN_FLIGHT`.

    Example:
        >>> in_flight_of(1.0, 8.0, 8), in_flight_of(1.0, 4.5, 8), in_flight_of(1.0, 1.0, 8)
        (1, 2, 8)
    """
    later_s = many_s - one_s
    found = math.inf if later_s <= 0 else (count - 1) * one_s / later_s
    return MOST_IN_FLIGHT if found >= MOST_IN_FLIGHT else max(1, round(found))


def slowdown_of(alone_s: float, beside_s: float) -> float:
    """Share of its speed that computing loses beside messages, 0 to 0.95.

    Args:
        alone_s: seconds of a piece of computing alone.
        beside_s: seconds of the same piece while messages were under way.

    Returns:
        The share.

    Example:
        >>> slowdown_of(1.0, 1.25), slowdown_of(1.0, 0.9)
        (0.19999999999999996, 0.0)
    """
    return min(max(1 - alone_s / beside_s, 0.0), 0.95)
