"""Ranks agree before they talk: they compare schedules through the store, with a time limit, before any collective.

A process group does not check what it is given: ranks that send different buckets hang, or add up numbers that
have nothing to do with each other.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from fdp.distributed.comparable import comparable, without_addresses
from fdp.distributed.exchange import known_to_all, tell_all_once
from fdp.distributed.fingerprint import fingerprint
from fdp.distributed.group import Group
from fdp.distributed.mesh import mesh_text
from fdp.errors import AgreementError, ReplicationError, build_message
from fdp.plan import Plan

_ARITHMETIC = "computes "
"""How a line about the arithmetic of replicated results begins."""


def schedule_text(plan: Plan, made: str = "") -> str:
    """Everything about a plan, and about how its program is made, that must be equal on all ranks."""
    lines = [f"step {plan.trace.name}", *([made] if made else [])]
    if plan.trace.dimensions:
        lines.append(f"mesh of {mesh_text(plan.trace.dimensions)}")
    lines += [
        f"{item.container.state} {item.name} {list(item.shape)} {item.dtype}"
        for item in plan.trace.inputs
        if item.role != "batch"  # which need not be of the same shape on every rank
    ]
    lines += plan.messages.splitlines()
    lines += [f"argument {name} = {value}" for name, value in plan.trace.replicated_constants]
    lines += [
        f"output {output.name} = {comparable(output.constant)}" for output in plan.trace.outputs if output.node is None
    ]
    lines += [_ARITHMETIC + call for call in plan.trace.replicated_calls]
    # Key paths are written by the authors of the containers: what they hold of addresses must not refuse a step either.
    return without_addresses("\n".join(lines))


def digest(plan: Plan, made: str = "") -> str:
    """A short name for a schedule: plans with one name need not be compared again."""
    return hashlib.sha256(schedule_text(plan, made).encode()).hexdigest()


def agree(
    plan: Plan, group: Group, tensors: Sequence[torch.Tensor], compare_state: bool, made: str = "", because: str = ""
) -> tuple[int, bool]:
    """Compare a plan, and the state that it starts from, with those of the other ranks.

    Args:
        plan: this rank's plan.
        group: the ranks.
        tensors: the inputs of the call, in the order of `Trace.inputs`.
        compare_state: whether replicated inputs and closed-over tensors are compared bit for bit.
        made: how its program is made, as a line of text; empty if ranks need not compare that.
        because: why there is another plan than before, for messages; empty for the first.

    Returns:
        The number of this agreement, the same on all ranks and no other one's on the group; and whether all ranks
        compare state.

    Raises:
        AgreementError: schedules differ, another rank could not make its plan, or one did not come in time.
        ReplicationError: ranks start from different values of what should be replicated.
    """
    marks = _marks(plan, tensors) if compare_state else {}
    parts = _marks_of_parts(plan, tensors, group.rank) if compare_state else {}
    own = {"schedule": schedule_text(plan, made), "marks": marks, "parts": parts, "compares": compare_state}
    name = plan.trace.name
    subject = f"step {name!r}{f', traced again ({because})' if because else ''}"
    number, found = tell_all_once(group, own, subject, "has a new communication schedule")
    with known_to_all():
        _refuse_differences(name, found, list(marks))
    return number, all(other["compares"] for other in found)


def _refuse_differences(name: str, found: Sequence[dict[str, Any]], marked_here: Sequence[str]) -> None:
    """Refuse what ranks have told of a step, if it differs; `marked_here` is what this rank compares."""
    for rank, other in enumerate(found):
        if "failed" in other:
            raise AgreementError(
                build_message(
                    f"rank {rank} could not prepare step {name!r}, so the ranks cannot run it together.",
                    [f"rank {rank}: {other['failed']}"],
                    remedy=f"fix the error on rank {rank}; the other ranks wait for it in vain.",
                )
            )
    first = found[0]
    for rank, other in enumerate(found):
        if other["schedule"] != first["schedule"]:
            raise _disagreement(name, rank, _first_difference(first["schedule"], other["schedule"], rank))
    # A rank that does not compare has sent nothing to compare with.
    marked = [(rank, other["marks"]) for rank, other in enumerate(found) if other["marks"]]
    offenders = [
        f"{key}: rank {rank} differs from rank {marked[0][0]}"
        for key in marked_here
        for rank, other in marked
        if other.get(key) != marked[0][1].get(key)
    ]
    offenders += _differing_copies([other["parts"] for other in found])
    if offenders:
        raise ReplicationError(
            build_message(
                f"step {name!r} was called with replicated arguments, or closes over tensors, that do not hold the "
                "same bits on every rank.",
                offenders,
                remedy="start from one rank's values: state = fdp.replicate(state); an argument that is meant to "
                "differ belongs in batch_argnums.",
            )
        )


def _marks(plan: Plan, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    marks = {
        item.name: fingerprint(tensor)
        for item, tensor in zip(plan.trace.inputs, tensors, strict=True)
        if item.replicated
    }
    for target, name in plan.trace.closed_over:
        label = f"closed-over tensor {name}"
        label = label if label not in marks else f"{label} ({target})"
        marks[label] = fingerprint(getattr(plan.trace.graph, target))
    return marks


def _marks_of_parts(plan: Plan, tensors: Sequence[torch.Tensor], rank: int) -> dict[str, int]:
    """Of sharded state on a mesh: along all dimensions but one, ranks hold the same part."""
    if not plan.trace.dimensions:
        return {}
    place = plan.trace.place_along(rank, plan.trace.sharded_along)
    return {
        f"part {place} of {item.name}": fingerprint(tensor)
        for item, tensor in zip(plan.trace.inputs, tensors, strict=True)
        if item.part is not None
    }


def _differing_copies(parts: Sequence[dict[str, int]]) -> list[str]:
    """The parts of which ranks hold copies that differ, from the marks of each rank."""
    held: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for rank, marks in enumerate(parts):
        for key, mark in marks.items():
            held[key].append((rank, mark))
    return [
        f"{key}: rank {rank} differs from rank {first_rank}"
        for key, ((first_rank, first_mark), *others) in held.items()
        for rank, mark in others
        if mark != first_mark
    ]


def _disagreement(name: str, rank: int, difference: list[str]) -> AgreementError:
    if all(f": {_ARITHMETIC}" in line or "nothing of the kind" in line for line in difference):
        return AgreementError(
            build_message(
                f"ranks 0 and {rank} compute the replicated results of step {name!r} in different ways. "
                "The first difference:",
                difference,
                remedy="let no Python number or branch that differs between ranks (the rank, the length of a batch) go "
                "into a replicated result; pass such numbers to fdp.psum or pmean(weight=), or as batch tensors. Give "
                "state the same strides on every rank (.contiguous()).",
            )
        )
    return AgreementError(
        build_message(
            f"ranks 0 and {rank} have different communication schedules for step {name!r}. The first difference:",
            difference,
            remedy="call the step with state of the same structure, shapes, strides and dtypes on every rank, "
            "under the same static arguments, bucket_cap_mb, compile, wire_dtype and accumulate_dtype.",
        )
    )


def _first_difference(first: str, other: str, rank: int) -> list[str]:
    """What one rank has and the other has not; if that is nothing, where their orders part."""
    one, two = first.splitlines(), other.splitlines()
    only_first = next((line for line in one if line not in set(two)), None)
    only_other = next((line for line in two if line not in set(one)), None)
    if only_first is None and only_other is None:
        only_first, only_other = next(
            (pair for pair in itertools.zip_longest(one, two) if pair[0] != pair[1]), (None, None)
        )
    return [f"rank 0: {only_first or 'nothing of the kind'}", f"rank {rank}: {only_other or 'nothing of the kind'}"]
