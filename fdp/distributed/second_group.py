"""A second process group of the same ranks, made so that a rank that is gone meanwhile is noticed.

torch connects the ranks of a new group to each other. Where one of them is gone, it waits in the store for as long as
messages of the group may take, and keeps other threads of the process from the store.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from fdp.distributed.desynchronised import mark_desynchronised
from fdp.distributed.group import Group, time_limit_of
from fdp.distributed.liveness.elsewhere import Elsewhere
from fdp.distributed.liveness.patience import explain, until
from fdp.distributed.liveness.watch import has_met
from fdp.pytorch.group_names import named

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many groups were made beside a group. Each of its ranks took part in all of them, so the numbers agree."""

_MEETS_S = 10.0
"""So long monitors may take to find each other, when all ranks are there: they look once a second at least."""


def group_beside(ranks: Group, what: str) -> dist.ProcessGroup:
    """Make a process group of the same ranks, for messages beside theirs, which are paired by their order.

    Every rank takes part, just after all of them have exchanged something.

    Args:
        ranks: the ranks.
        what: it is made for, for errors.

    Returns:
        The group, by gloo, with the time limit of theirs. It is not kept alive by anything but the process's list.

    Raises:
        PeerError: another rank is gone.
        RuntimeError: the backend failed, and it is not known why.
    """
    process_group, made = ranks.process_group, list[dist.ProcessGroup | None]()
    assert process_group is not None
    # They look for each other in the store, which does not answer while the group is made.
    until(lambda: has_met(process_group), process_group, _MEETS_S, what)
    everybody = dist.get_process_group_ranks(process_group)
    number = _made[process_group] = _made.get(process_group, 0) + 1

    def make() -> None:
        with named(f"fdp beside {process_group.group_name}, {number}"):
            made.append(dist.new_group(everybody, time_limit_of(ranks), backend="gloo", use_local_synchronization=True))

    making = Elsewhere(make, what)
    try:
        making.comes(process_group)
    except (RuntimeError, dist.DistError) as error:
        if (explained := explain(process_group, what)) is not None:
            raise explained from error
        raise
    except BaseException as error:
        if making.is_running:
            mark_desynchronised(ranks, f"{what} was left in the middle by {type(error).__name__}")
        raise
    (group,) = made
    assert group is not None
    return group
