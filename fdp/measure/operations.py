"""Seconds for each operation of a step, from runs of the program that carries out a plan of it.

An interpreter of the graph would measure other times: the program writes results into their places, joins calls and
drops views. It runs on this rank alone; nothing is sent.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fdp.compare import give_back_memory, inputs_for_one_run, undisturbed
from fdp.emit.codegen.lines import ProgramPart
from fdp.measure.agreed import agreed_costs
from fdp.measure.clock import Clock, clock_for, cost_of_a_stamp
from fdp.measure.link import measure_link
from fdp.plan import Plan, Run
from fdp.plan.cost.costs import Costs
from fdp.runtime import Emitted
from fdp.trace.operators.effects import list_arguments

_REPEATS, _BUDGET_S = 3, 0.5
"""So many runs are timed, or fewer once they have taken so long: noise is small beside what long steps take."""


def measure_costs(emitted: Emitted, tensors: Sequence[torch.Tensor], start_s: float) -> Costs:
    """Measure the seconds of a step's operations on this rank, by running it a few times on copies of its inputs.

    The program of the plan runs with a stamp between one operation and the next. What a stamp takes is subtracted, and
    then all is scaled so that the sum is what the step takes without stamps, and without messages (of a long step
    stamps are next to nothing, and it is not); if it is compiled, or else runs in another way, what it then takes.
    Entries of one call share its seconds by their bytes.

    Args:
        emitted: the step. Its buckets do not matter much: which results are written straight into them does not depend
            on how they are cut.
        tensors: its inputs, in the order of `Trace.inputs`; they are not changed. Random numbers go on afterwards as if
            none had been drawn.
        start_s: seconds that it takes to start a message, which nothing that runs alone can tell.

    Returns:
        The costs, of this rank; see `agreed_costs`.
    """
    plan, clock = emitted.plan, clock_for(item.device for item in emitted.plan.trace.inputs)
    stamps: list[Any] = []

    def tick() -> None:
        stamps.append(clock.stamp())

    timed = emitted.timed(tick, apart=True)
    runs: list[list[float]] = []
    totals: list[float] = []
    with undisturbed(emitted):
        timed.dry_run(inputs_for_one_run(plan, tensors))  # kernels are chosen, memory is taken
        begun = time.perf_counter()
        for _ in range(_REPEATS):
            if runs and time.perf_counter() - begun > _BUDGET_S:
                break
            inputs = inputs_for_one_run(plan, tensors)
            stamps.clear()
            timed.dry_run(inputs)
            seconds = clock.seconds(stamps[0], stamps)
            runs.append([after - before for before, after in itertools.pairwise(seconds)])
            # Of a long step stamps are a small part.
            if not emitted.backend.by_operation or time.perf_counter() - begun <= _BUDGET_S:
                totals.append(_time(clock, emitted, inputs_for_one_run(plan, tensors)))
    timed.residence.release()
    give_back_memory()
    stamp_s = cost_of_a_stamp(clock)
    usual = [max(statistics.median(seconds) - stamp_s, 0.0) for seconds in zip(*runs, strict=True)]
    sends = emitted.group.size > 1
    # There are two or three of these, and what disturbs one only adds to it.
    total_s = min(totals) if totals else None
    return _costs(plan, timed.program.parts, usual, total_s, sends, start_s)


def measure_agreed_costs(emitted: Emitted, tensors: Sequence[torch.Tensor]) -> Costs:
    """As `measure_costs`, for all ranks of the step's group together: the same on every rank, to the bit.

    Args:
        emitted: the step, on two ranks or more.
        tensors: its inputs on this rank.

    Returns:
        The costs, averaged over ranks.

    Raises:
        AgreementError: another rank does something else, or did not come in time.
        PeerError: another rank died or stopped answering.
    """
    device = device_of_messages(emitted.plan)
    link = measure_link(emitted.group, device)
    return agreed_costs(emitted.group, device, measure_costs(emitted, tensors, link.start_s))


def device_of_messages(plan: Plan) -> torch.device:
    """The device of most bytes of a plan's messages; the CPU if there are none."""
    sizes: defaultdict[torch.device, int] = defaultdict(int)
    for bucket in plan.buckets:
        sizes[bucket.device] += bucket.size_bytes
    return max(sizes, key=lambda device: (sizes[device], str(device)), default=torch.device("cpu"))


def _time(clock: Clock, step: Emitted, inputs: list[torch.Tensor]) -> float:
    clock.settle()
    first = clock.stamp()
    step.dry_run(inputs)
    (second,) = clock.seconds(first, [clock.stamp()])
    return second


def _costs(
    plan: Plan,
    parts: Sequence[ProgramPart],
    seconds: Sequence[float],
    total_s: float | None,
    sends: bool,
    start_s: float,
) -> Costs:
    """Divide the seconds of a program's parts among operations.

    Args:
        plan: that the program carries out.
        parts: of the program.
        seconds: of each part.
        total_s: seconds of the whole step without stamps; None if they are those of its parts.
        sends: whether that step packs buckets, too.
        start_s: passed on.

    Returns:
        The costs.
    """
    by_kind: defaultdict[str, float] = defaultdict(float)
    for part, second in zip(parts, seconds, strict=True):
        by_kind[part.kind] += second
    counted_s = sum(by_kind.values()) if sends else by_kind["run"]
    scale = total_s / counted_s if total_s is not None and counted_s > 0 else 1.0
    operations_s = [0.0] * len(plan.trace.operations)
    owners, shares = _owners(plan), _shares(plan)
    for part, second in zip(parts, seconds, strict=True):
        if part.kind == "run" and (owner := owners[max(part.index, 0)]) is not None:
            weights = [shares[operation] for operation in owner.operations]
            for operation, weight in zip(owner.operations, weights, strict=True):
                operations_s[operation] += scale * second * weight / sum(weights)
    packed_bytes = sum(bucket.size_bytes for bucket in plan.buckets)
    pack_s_per_byte = scale * by_kind["pack"] / packed_bytes if packed_bytes else 0.0
    return Costs(tuple(operations_s), start_s, pack_s_per_byte, "measured")


def _owners(plan: Plan) -> list[Run | None]:
    """For each position of a schedule, whom what happens there is charged to: the operation itself, or for views and
    copies around messages, which cost nothing in a plan, the one before (at the beginning the one behind)."""
    operations = plan.trace.operations
    owners: list[Run | None] = []
    last: Run | None = None
    for item in plan.schedule:
        if isinstance(item, Run) and not operations[item.operations[0]].view:
            last = item
        owners.append(last)
    first = next((owner for owner in owners if owner is not None), None)
    return [first if owner is None else owner for owner in owners]


def _shares(plan: Plan) -> list[float]:
    """Divide the seconds of a call among its entries, by their bytes."""
    return [
        1.0 if operation.entry is None else _entry_bytes(plan.trace.nodes[operation.node], operation.entry)
        for operation in plan.trace.operations
    ]


def _entry_bytes(node: fx.Node, entry: int) -> float:
    values = [
        value[entry].meta["val"] for _, value in list_arguments(node) if len(value) > entry and _is_node(value[entry])
    ]
    return max(float(sum(value.numel() * value.itemsize for value in values)), 1.0)


def _is_node(value: object) -> bool:
    return isinstance(value, fx.Node)
