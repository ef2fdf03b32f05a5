"""`bucket_cap_mb="auto"`: ranks measure a step and their network together, and choose buckets by cost.

The choice is remembered for the gradients that are sent. So a rank that alone gets a signature with the same gradients
(a shorter last batch) takes the same buckets. It needs no other rank, and the agreed schedule stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fdp.distributed.exchange import known_to_all, tell_all
from fdp.distributed.group import Group
from fdp.errors import AgreementError, ArgumentError, build_message
from fdp.measure import agreed_costs, measure_costs, measure_link
from fdp.measure.operations import device_of_messages
from fdp.plan import Machine, Network, Plan, plan_trace
from fdp.plan.buckets import AUTO_CAP_MB, key_of_messages, upstream_of
from fdp.plan.build import plan_groups
from fdp.plan.cost.costs import Costs
from fdp.plan.cost.forecast import Forecast
from fdp.runtime import Emitted
from fdp.step.buckets_on_disk import Groups, find_groups, keep_groups, stored_plan_name
from fdp.step.progress import Progress
from fdp.trace import Trace

LEAST_BYTES = 2**20
"""Steps that send less are not measured: they have one small bucket, and send it at once."""

_SPREAD = 0.2
"""Messages beside a real backward pass need not take as long as those that are measured beside a small product."""


class Automatic:
    """Chooses the buckets of one step.

    Args:
        network: between the ranks, if the user gave it; None to measure it.
        keeps: whether to choose at the next start of the program what was chosen at this one: the step is compiled.
    """

    def __init__(self, network: Network | None, keeps: bool = False) -> None:
        self._network, self._keeps = network, keeps
        self._chosen: dict[Any, tuple[Groups, Any, Forecast | None]] = {}

    def plan_ahead(self, trace: Trace, group: Group) -> Plan:
        """Plan without the other ranks: with buckets chosen before, or by estimated costs if a network is given, or by
        caps."""
        return self.remembered(trace, group) or plan_trace(trace, "auto", network=self._network)

    def remembered(self, trace: Trace, group: Group) -> Plan | None:
        """The plan of a trace, if nothing has to be measured for it; else None."""
        sent = sum(reduction.size_bytes for reduction in trace.reductions)
        if group.size == 1 or sent < LEAST_BYTES or len(trace.reductions) < 2:
            return plan_trace(trace, AUTO_CAP_MB, network=self._network)
        chosen = self._chosen.get((group, key_of_messages(trace)))
        if chosen is None:
            return None
        groups, work, forecast = chosen
        # Another signature with the same gradients has other costs.
        return plan_groups(trace, groups, forecast=forecast if work == _work(trace) else None)

    def choose(self, emitted: Emitted, tensors: list[torch.Tensor], progress: Progress) -> Plan:
        """Choose buckets, on all ranks together.

        Args:
            emitted: the step, with any buckets.
            tensors: its inputs, which are not changed.
            progress: is told what is being done.

        Returns:
            The same buckets on every rank.

        Raises:
            AgreementError: another rank does something else, or could not measure the step.
            PeerError: another rank died or stopped answering.
        """
        trace, group = emitted.plan.trace, emitted.group
        with progress.stage("waiting for other ranks"):
            emitted.consensus.agree(tensors)
        with progress.stage("looking for kept buckets") if self._keeps else contextlib.nullcontext():
            kept, where = self._kept(emitted) if self._keeps else (None, "")
        if kept is not None:
            return self.remember(plan_groups(trace, kept), group)
        device = device_of_messages(emitted.plan)
        if self._network is None:
            try:
                with progress.stage("measuring the network"):
                    link = measure_link(group, device, _dtype_of_messages(emitted.plan))
            except ArgumentError as error:
                # Of numbers that all ranks share: all come here, and a step that could run must not fail for them.
                reason = str(error).splitlines()[0]
                warnings.warn(
                    f"fdp: buckets of step {trace.name!r} have caps of 1 and 25 MiB, as the network could not be "
                    f"measured: {reason} To choose them by cost give network=fdp.Network(...).",
                    stacklevel=9,
                )
                return self.remember(emitted.plan, group)
            network, start_s = link.network, link.start_s
        else:
            network, start_s = self._network, Machine().start_s
        # A rank that fails must not leave the others waiting in a message.
        costs: Costs | None = None
        failure: Exception | None = None
        try:
            with progress.stage("measuring the step"):
                costs = measure_costs(emitted, tensors, start_s)
        except Exception as error:
            failure = error
        own = {"measured": failure is None, "operations": _digest(_planned_by(trace)), "chain": _digest(_chain(trace))}
        with progress.stage("waiting for other ranks"):
            found = _tell(emitted, own)
        with known_to_all():
            if failure is not None:
                raise failure
            if not all(other["measured"] for other in found):
                raise AgreementError(
                    build_message(
                        f"step {trace.name!r} could not be measured on another rank, so ranks cannot choose its "
                        "buckets.",
                        remedy="look for the first error among the logs of all ranks; a number as bucket_cap_mb "
                        "measures nothing.",
                    )
                )
        assert costs is not None
        with progress.stage("planning"):
            plan = self.remember(self._by_costs(emitted, costs, network, found), group)
        if self._keeps and group.rank == 0:
            keep_groups(where, _groups(plan))
        return plan

    def remember(self, plan: Plan, group: Group) -> Plan:
        """Choose the buckets of a plan from now on for gradients like those of its step; returns the plan."""
        self._chosen[group, key_of_messages(plan.trace)] = _groups(plan), _work(plan.trace), plan.forecast
        return plan

    def _by_costs(self, emitted: Emitted, costs: Costs, network: Network, found: Sequence[dict[str, Any]]) -> Plan:
        """The plan of all ranks, by what each has measured of its own trace.

        Ranks send the same messages, but need not run the same operators: one unrolls a longer sequence. Then there are
        no costs to average, and all take the buckets of rank 0; or if those could make a circle on another rank, as
        reductions depend on each other in another way there, the ones that all have agreed on.
        """
        trace, group = emitted.plan.trace, emitted.group
        spread = _SPREAD if self._network is None else 0.0
        if len({other["operations"] for other in found}) == 1:
            device = device_of_messages(emitted.plan)
            return plan_trace(trace, "auto", agreed_costs(group, device, costs), network, spread=spread)
        if len({other["chain"] for other in found}) > 1:
            return emitted.plan
        plan = plan_trace(trace, "auto", costs, network, spread=spread) if group.rank == 0 else emitted.plan
        chosen = _tell(emitted, {"groups": _groups(plan)})[0]["groups"]
        return plan if group.rank == 0 else plan_groups(trace, [tuple(members) for members in chosen])

    def _kept(self, emitted: Emitted) -> tuple[Groups | None, str]:
        """The buckets that rank 0 has stored, for all ranks alike, and the name under which they are stored."""
        trace, group = emitted.plan.trace, emitted.group
        backend = group.backend_for(device_of_messages(emitted.plan))
        others = _tell(emitted, {"host": socket.gethostname(), "chain": _digest(_chain(trace))})
        where = stored_plan_name(trace, backend, [str(other["host"]) for other in others], repr(self._network))
        groups = None
        if group.rank == 0 and len({other["chain"] for other in others}) == 1:
            groups = find_groups(where, {index for index, reduction in enumerate(trace.reductions) if reduction.numel})
        stored = _tell(emitted, {"groups": groups})[0]["groups"]
        return None if stored is None else tuple(tuple(members) for members in stored), where


def _tell(emitted: Emitted, own: dict[str, Any]) -> list[Any]:
    """Exchange a value with all ranks while buckets are chosen."""
    return tell_all(emitted.group, own, f"step {emitted.plan.trace.name!r}", "is to be planned")


def _groups(plan: Plan) -> Groups:
    return tuple(bucket.members for bucket in plan.buckets)


def _chain(trace: Trace) -> list[int]:
    """Which reductions depend on the results of which: buckets of one trace may be a circle in another."""
    return upstream_of(trace.reductions, trace.operations)


def _work(trace: Trace) -> Any:
    """Everything that costs depend on, except the machine."""
    return trace.operations, trace.inputs


def _planned_by(trace: Trace) -> Any:
    """Everything that a plan depends on, besides costs and what ranks compare anyway."""
    operations = [(o.node, o.target, o.needs, o.entry, o.reduction, o.view, o.backward) for o in trace.operations]
    return operations, [(reduction.position, reduction.operation) for reduction in trace.reductions]


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _dtype_of_messages(plan: Plan) -> torch.dtype:
    """The dtype of the largest bucket."""
    return max(plan.buckets, key=lambda bucket: bucket.size_bytes).dtype
