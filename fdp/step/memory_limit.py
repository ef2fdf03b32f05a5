"""Keeps a step within a memory limit: some sharded state is gathered again, or the step is refused.

What a step takes depends on the batch, of which each rank has its own. So ranks tell each other what each of them
needs, and all do what the one does that needs most. They remember it: a rank that alone gets another batch with which
that is enough (a shorter last one) needs no other rank. If a later batch needs more, ranks agree anew, and what they
have prepared before is outdated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from fdp.distributed.exchange import tell_all
from fdp.distributed.group import Group
from fdp.emit.memory.peak import forecast_memory
from fdp.errors import ArgumentError, build_message
from fdp.plan import Plan, plan_trace
from fdp.plan.buckets import MIB, key_of_messages
from fdp.tables import format_bytes
from fdp.trace import Choice, Trace, gather_once

_PROBES = 16
"""A search for how much is gathered again tries at most so many numbers, beside none."""

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
        outdates: whether ranks have agreed on something else than before, so that earlier programs of the step do not
            fit to new ones on other ranks.
    """

    def __init__(self, limit_bytes: int | None, by_caps: Callable[[Trace], Plan] | None) -> None:
        self._limit_bytes, self._by_caps = limit_bytes, by_caps
        self.is_set = limit_bytes is not None
        self._agreed: dict[Hashable, int] = {}
        self.outdates = False

    def smallest(self, trace: Trace) -> Plan:
        """A plan of small messages, unless the user has set their size."""
        return plan_trace(trace, _SMALL_CAP_MB) if self._by_caps is None else self._by_caps(trace)

    def within(self, plan: Plan) -> Plan:
        """The plan, or one of small messages if that exceeds the limit and the user has not set their size."""
        return plan if self._fits(plan) else self.smallest(plan.trace)

    def within_on_all(self, plan: Plan, group: Group) -> Plan:
        """As `within`, of ranks that have planned together: if the plan is too much for one of them, none takes it."""
        if self._limit_bytes is None or self._by_caps is not None:
            return plan
        told = _tell(group, plan.trace, {"fits": self._fits(plan)})
        return plan if all(each["fits"] for each in told) else self.smallest(plan.trace)

    def traced(self, trace: Callable[[Choice], Trace], group: Group) -> Trace:
        """Trace a step so that it stays within the limit, without the other ranks.

        Args:
            trace: traces it; its argument chooses which sharded values are gathered again.
            group: the ranks.

        Raises:
            ArgumentError: it takes more.
        """
        return self._searched(trace, group)[0]

    def traced_on_all(
        self, trace: Callable[[Choice], Trace], group: Group, waiting: AbstractContextManager[None]
    ) -> Trace:
        """As `traced`, on all ranks of a group at once; `waiting` is entered while this one waits for the others.

        Raises:
            ArgumentError: it takes more.
            AgreementError: another rank does something else, or failed.
            PeerError: another rank died or stopped answering.
        """
        made, search = self._searched(trace, group)
        if search is None or made.whole is None or group.size == 1 or search.is_agreed:
            return made
        with waiting:
            told = _tell(group, made, {"gathered_again": search.count})
        most = max(int(each["gathered_again"]) for each in told)
        self.outdates |= self._agreed.get(search.key, most) != most
        self._agreed[search.key] = most
        return made if most == search.count else self._searched(trace, group, most)[0]

    def _searched(
        self, trace: Callable[[Choice], Trace], group: Group, count: int | None = None
    ) -> tuple[Trace, _GatherSearch | None]:
        """A trace within the limit, and how it was found; `count` values are gathered again, if that is given."""
        if self._limit_bytes is None:
            return trace(gather_once), None
        search = _GatherSearch(self._limit_bytes, self.smallest, group, self._agreed, count)
        made = trace(search.choose)
        check_limit(made, self.smallest(made), self._limit_bytes)
        return made, search

    def _fits(self, plan: Plan) -> bool:
        """Whether a plan stays within the limit, or nothing can be done about it."""
        limit = self._limit_bytes
        return limit is None or self._by_caps is not None or forecast_memory(plan).peak_bytes <= limit


def _tell(group: Group, trace: Trace, own: dict[str, Any]) -> Sequence[dict[str, Any]]:
    return tell_all(group, own, f"step {trace.name!r}", "is to be planned within a memory limit")


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


class _GatherSearch:
    """Chooses which sharded values are gathered again for the backward pass: as few as make a step fit.

    Values that are kept from the forward to the backward pass take memory; those that are gathered again take time.
    What the forward pass reads first is kept longest, so it is gathered again first. How many are is found by
    bisection, to a sixteenth of all; or one after the other, if to gather all again is too much, but some may do.

    Args:
        limit_bytes: the most that a rank may hold.
        plan: plans a trace with messages as small as they may be.
        group: the ranks.
        agreed: by ranks and messages, how many values all of them have last agreed to gather again.
        fixed: how many values are gathered again, whatever it takes; None to choose.

    Attributes:
        key: of this step in `agreed`.
        count: how many values are gathered again.
        is_agreed: whether ranks have agreed on that before.
    """

    def __init__(
        self,
        limit_bytes: int,
        plan: Callable[[Trace], Plan],
        group: Group,
        agreed: Mapping[Hashable, int],
        fixed: int | None,
    ) -> None:
        self._limit_bytes, self._plan, self._group = limit_bytes, plan, group
        self._agreed, self._fixed = agreed, fixed
        self.key: Hashable = None
        self.count, self.is_agreed = 0, False

    def choose(self, trace: Callable[[frozenset[str]], Trace]) -> Trace:
        """The trace that fits and gathers least again; if none fits, the one that takes least memory.

        Args:
            trace: traces the step; it is given the names of the values that are gathered again.
        """
        once = trace(frozenset())
        gathered = list(dict.fromkeys(link.whole for link in once.links if link.kind == "gathered"))
        self.key = self._group, key_of_messages(once)

        def again(count: int) -> Trace:
            return trace(frozenset(gathered[:count])) if count else once

        if self._fixed is not None:
            return again(self._fixed)
        if (count := self._agreed.get(self.key)) is not None:
            made = again(count)
            if self._peak_bytes(made) <= self._limit_bytes:
                self.count, self.is_agreed = count, True
                return made
        if not gathered or self._peak_bytes(once) <= self._limit_bytes:
            return once
        unit = max(1, len(gathered) // _PROBES)
        found = again(len(gathered))
        if self._peak_bytes(found) > self._limit_bytes:
            return self._least([0, *range(unit, len(gathered), unit), len(gathered)], again)
        few, enough = 0, len(gathered)
        while enough - few > unit:
            middle = (few + enough) // 2
            some = again(middle)
            if self._peak_bytes(some) <= self._limit_bytes:
                found, enough = some, middle
            else:
                few = middle
        self.count = enough
        return found

    def _least(self, counts: Sequence[int], again: Callable[[int], Trace]) -> Trace:
        """The first that fits, or the one that takes least. More that is gathered again need not take less memory."""
        found: tuple[int, int, Trace] | None = None
        for count in counts:
            made = again(count)
            peak = self._peak_bytes(made)
            if found is None or peak < found[0]:
                found = peak, count, made
            if peak <= self._limit_bytes:
                break
        assert found is not None
        _, self.count, made = found
        return made

    def _peak_bytes(self, made: Trace) -> int:
        return forecast_memory(self._plan(made)).peak_bytes


def _rounded_up(size_bytes: int) -> float:
    """In MiB, to two digits behind the point."""
    return -(-size_bytes * 100 // MIB) / 100
