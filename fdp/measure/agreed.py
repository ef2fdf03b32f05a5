"""Numbers that ranks measured, made equal on all of them: plans that are made from them are then equal, too.

They travel as whole numbers of picoseconds: sums of integers do not depend on the order in which a backend adds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fdp.errors import PeerError, build_message
from fdp.group import Group, leave_behind, start_all_reduce
from fdp.plan.costs import Costs

_A_SECOND = 10**12


def agreed_seconds(group: Group, device: torch.device, seconds: Sequence[float], op: str) -> list[float]:
    """Combine seconds over the ranks, element by element.

    Args:
        group: the ranks; all of them call this together.
        device: that the group's backend carries tensors of.
        seconds: as many on every rank.
        op: "mean" or "max".

    Returns:
        The same numbers on every rank, to the bit.

    Raises:
        PeerError: another rank died or stopped answering.
    """
    if group.size == 1:
        return list(seconds)
    own = torch.tensor([round(second * _A_SECOND) for second in seconds], dtype=torch.int64, device=device)
    with talking(group):
        start_all_reduce(own, "max" if op == "max" else "sum", group)()
        found = own.tolist()
    return [number / (_A_SECOND if op == "max" else _A_SECOND * group.size) for number in found]


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
    return dataclasses.replace(
        costs, operations_s=tuple(operations), start_s=start_s, pack_s_per_byte=pack_s / 2**30
    )


class talking:
    """Around messages of a measurement: an error in them is told as what it is, and the group is given up.

    Raises:
        PeerError: in place of what the backend raised.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        leave_behind(self._group, f"a measurement was left in the middle by {text}")
        if isinstance(error, (RuntimeError, dist.DistError)):
            others = [rank for rank in range(self._group.size) if rank != self._group.rank]
            raise PeerError(
                build_message(
                    f"rank {self._group.rank} lost contact with the other ranks while they measured together.",
                    [f"one of ranks {others} died, stopped, or did not come", text],
                    remedy="look for the first error among the logs of all ranks; start the job again.",
                )
            ) from error
