"""A warning if monitors cannot reach each other, as behind a firewall: training goes on, the watch does not."""

from __future__ import annotations

import warnings

from fdp.distributed.liveness.watched import Watched


def warn_of_unreached(watched: Watched) -> None:
    """Warn, once for each group, of monitors that this rank's cannot reach.

    Args:
        watched: the ranks of the group, of which there is news.
    """
    found = watched.unreached()
    if not found or watched.has_warned:
        return
    watched.has_warned = True
    others = "; ".join(f"that of rank {rank} at {where} ({why})" for rank, where, why in found)
    warnings.warn(
        f"fdp: the process that watches rank {watched.rank} cannot reach {others}. Training goes on. Until they reach "
        "each other, a rank on the other side that is frozen, raises, or is cut off is not named, and not noticed "
        "before the process group's own time limit; one that ends is noticed when the backend says so. Remedy: let "
        "these machines connect to each other at all ports that programs are given (on Linux those of the setting "
        "net.ipv4.ip_local_port_range); one direction is enough. FDP_LIVENESS_S=0 turns the watch off, and this "
        "warning.",
        stacklevel=2,
    )
