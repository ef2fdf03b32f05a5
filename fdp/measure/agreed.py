"""Measurements of ranks, made equal on all of them, so that plans from them are equal, too.

They are sent as whole numbers of picoseconds: sums of integers do not depend on the order in which a backend adds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fdp.distributed.desynchronised import mark_desynchronised, why_desynchronised
from fdp.distributed.group import Group
from fdp.distributed.messages import start_all_reduce
from fdp.errors import ArgumentError, PeerError, build_message
from fdp.plan.cost.costs import Costs

_A_SECOND = 10**12


def agreed_seconds(group: Group, device: torch.device, seconds: Sequence[float], op: str) -> list[float]:
    """Combine seconds over the ranks, element by element.

    Args:
        group: the ranks; all of them call this together.
        device: that the group's backend carries tensors of.
        seconds: as many on every rank.
        op: "mean", "max" or "min".

    Returns:
        The same numbers on every rank, to the bit.

    Raises:
        PeerError: another rank died or stopped answering.
    """
    if group.size == 1:
        return list(seconds)
    own = torch.tensor([round(second * _A_SECOND) for second in seconds], dtype=torch.int64, device=device)
    with talking(group):
        start_all_reduce(own, "sum" if op == "mean" else op, group)()
        found = own.tolist()
    share = _A_SECOND * group.size if op == "mean" else _A_SECOND
    return [number / share for number in found]


def agreed_costs(group: Group, device: torch.device, costs: Costs) -> Costs:
    """Average the costs of a step over the ranks.

    Each rank's measurement is off by noise of its own, which an average takes out and a maximum would add up.

    Args:
        group: the ranks; all of them call this together, for the same trace.
        device: that the group's backend carries tensors of.
        costs: of this rank.

    Returns:
        The same costs on every rank, to the bit.

    Raises:
        PeerError: another rank died or stopped answering.
    """
    # Seconds a byte are too small for picoseconds; seconds a GiB are not.
    own = [*costs.operations_s, costs.start_s, costs.pack_s_per_byte * 2**30]
    *operations, start_s, pack_s = agreed_seconds(group, device, own, "mean")
    return dataclasses.replace(costs, operations_s=tuple(operations), start_s=start_s, pack_s_per_byte=pack_s / 2**30)


def refuse_left(group: Group) -> None:
    """Refuse to measure on a group on which this rank is desynchronised.

    Raises:
        PeerError: it has.
    """
    if (why := why_desynchronised(group)) is not None:
        raise _lost(group, why)


@contextmanager
def talking(group: Group) -> Iterator[None]:
    """Send the messages of a measurement: errors are raised as what they are, and the group counts as left.

    Raises:
        PeerError: another rank died or stopped answering; or this rank has left the others before.
    """
    refuse_left(group)
    try:
        yield
    except ArgumentError:
        raise  # of numbers that all ranks share: they leave together, and nothing is under way
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        mark_desynchronised(group, f"a measurement was left in the middle by {text}")
        if isinstance(error, (RuntimeError, dist.DistError)):
            raise _lost(group, text) from error
        raise


def _lost(group: Group, why: str) -> PeerError:
    others = [rank for rank in range(group.size) if rank != group.rank]
    return PeerError(
        build_message(
            f"rank {group.rank} lost contact with the other ranks while it measured with them.",
            [f"one of ranks {others} died, stopped, or did not come", why],
            remedy="look for the first error among the logs of all ranks; start the job again.",
        )
    )
