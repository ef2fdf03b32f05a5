"""Keeps a step within a memory limit: sharded state is gathered again, or the step is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from fdp.emit.memory.peak import forecast_memory
from fdp.errors import ArgumentError, build_message
from fdp.plan import Plan, plan_trace
from fdp.plan.buckets import MIB
from fdp.tables import format_bytes
from fdp.trace import Choice, Trace, gather_once

_SMALL_CAP_MB = 1.0
"""The size of messages where memory is scarce: of gradients no more are held back than that."""


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


class MemoryLimit:
    """The memory limit of a step, and what keeps to it.

    Args:
        limit_bytes: the most that a rank may hold; None for no limit.
        by_caps: plans a step by caps that the user has set; None where buckets are chosen by cost.

    Attributes:
        is_set: whether there is a limit.
    """

    def __init__(self, limit_bytes: int | None, by_caps: Callable[[Trace], Plan] | None) -> None:
        self._limit_bytes, self._by_caps = limit_bytes, by_caps
        self.is_set = limit_bytes is not None

    def smallest(self, trace: Trace) -> Plan:
        """A plan of small messages, unless the user has set their size."""
        return plan_trace(trace, _SMALL_CAP_MB) if self._by_caps is None else self._by_caps(trace)

    def within(self, plan: Plan) -> Plan:
        """The plan, or one of small messages if that exceeds the limit and the user has not set their size."""
        limit = self._limit_bytes
        if limit is None or self._by_caps is not None or forecast_memory(plan).peak_bytes <= limit:
            return plan
        return self.smallest(plan.trace)

    def traced(self, trace: Callable[[Choice], Trace]) -> Trace:
        """Trace a step so that it stays within the limit.

        Args:
            trace: traces it; its argument chooses whether sharded values are gathered again.

        Raises:
            ArgumentError: it takes more.
        """
        if self._limit_bytes is None:
            return trace(gather_once)
        made = trace(partial(gather_within, self._limit_bytes, self.smallest))
        check_limit(made, self.smallest(made), self._limit_bytes)
        return made


def check_limit(trace: Trace, plan: Plan, limit_bytes: int) -> None:
    """Refuse a step that does not stay within a limit.

    Args:
        trace: the step.
        plan: of it, with messages as small as they may be.
        limit_bytes: the most that a rank may hold.

    Raises:
        ArgumentError: it takes more; it names the least that would do.
    """
    forecast = forecast_memory(plan)
    if forecast.peak_bytes <= limit_bytes:
        return
    advice = "" if trace.whole is not None else "shard state with fdp.shard, "
    raise ArgumentError(
        build_message(
            f"step {trace.name!r} does not fit in memory_limit_mb={limit_bytes / MIB:g}.",
            str(forecast).splitlines(),
            remedy=f"memory_limit_mb={_rounded_up(forecast.peak_bytes)} is the least that can be kept "
            f"({format_bytes(forecast.peak_bytes)}). To take less, {advice}donate the state (donate_argnums), "
            "accumulate over microbatches, or compute activations again (docs/how-to/memory.md).",
        )
    )


def gather_within(limit_bytes: int, plan: Callable[[Trace], Plan], trace: Callable[[bool], Trace]) -> Trace:
    """Choose whether sharded values are gathered again for the backward pass: all of them, or none.

    Values that are kept from the forward to the backward pass take memory; those that are gathered again take time. A
    number in between would depend on the batch, of which each rank has its own, and ranks have to choose alike.

    Args:
        limit_bytes: the most that a rank may hold.
        plan: plans a trace with messages as small as they may be.
        trace: traces the step; its argument says whether values are gathered again.

    Returns:
        A trace that fits; if none does, the one that takes least.
    """

    def peak(made: Trace) -> int:
        return forecast_memory(plan(made)).peak_bytes

    once = trace(False)
    if (least := peak(once)) <= limit_bytes:
        return once
    again = trace(True)
    return again if peak(again) < least else once


def _rounded_up(size_bytes: int) -> float:
    """In MiB, to two digits behind the point."""
    return -(-size_bytes * 100 // MIB) / 100
