"""Keeps a step within a memory limit: sharded state is gathered again, or the step is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fdp.emit.memory.peak import forecast_memory
from fdp.errors import ArgumentError, build_message
from fdp.plan import Plan
from fdp.plan.buckets import MIB
from fdp.tables import format_bytes
from fdp.trace import Trace


def resolve_limit(memory_limit_mb: Any) -> int | None:
    """Turn `memory_limit_mb` into bytes; None for no limit.

    Raises:
        ArgumentError: it is no positive number.
    """
    if memory_limit_mb is None or memory_limit_mb == math.inf:
        return None
    number = isinstance(memory_limit_mb, (int, float)) and not isinstance(memory_limit_mb, bool)
    if not number or not memory_limit_mb > 0:
        raise ArgumentError(
            build_message(f"memory_limit_mb={memory_limit_mb!r}.", remedy="pass a positive number of MiB, or None.")
        )
    return int(memory_limit_mb * MIB)


def fits(plan: Plan, limit_bytes: int) -> bool:
    """Whether a plan stays within a limit."""
    return forecast_memory(plan).peak_bytes <= limit_bytes


def trace_within(
    name: str,
    limit_bytes: int,
    trace: Callable[[bool], Trace],
    plan: Callable[[Trace], Plan],
) -> Trace:
    """Trace a step so that it stays within a limit.

    Args:
        name: the user's function, for messages.
        limit_bytes: the most that a rank may hold.
        trace: traces the step. Its argument says whether sharded state is gathered again for the
            backward pass, which takes less memory and more messages.
        plan: plans a trace with messages as small as they may be.

    Returns:
        The first trace that fits.

    Raises:
        ArgumentError: none does; it names the least that would do.
    """
    found = trace(False)
    forecast = forecast_memory(plan(found))
    if forecast.peak_bytes <= limit_bytes:
        return found
    if found.whole is not None:
        again = trace(True)
        other = forecast_memory(plan(again))
        if other.peak_bytes <= limit_bytes:
            return again
        forecast = min(forecast, other, key=lambda each: each.peak_bytes)
    advice = "" if found.whole is not None else "shard state with fdp.shard, "
    raise ArgumentError(
        build_message(
            f"step {name!r} does not fit in memory_limit_mb={limit_bytes / MIB:g}.",
            str(forecast).splitlines(),
            remedy=f"memory_limit_mb={_rounded_up(forecast.peak_bytes)} is the least that can be kept "
            f"({format_bytes(forecast.peak_bytes)}). To take less, {advice}donate the state (donate_argnums), "
            "accumulate over microbatches, or compute activations again (docs/how-to/memory.md).",
        )
    )


def _rounded_up(size_bytes: int) -> float:
    """In MiB, to two digits behind the point."""
    return -(-size_bytes * 100 // MIB) / 100
