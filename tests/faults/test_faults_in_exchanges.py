"""A rank stops, and the others wait for its part of a value: their errors name it, in messages of every kind."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import exhaustive
from torch.distributed.device_mesh import init_device_mesh

import fdp

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "psum_scatter": fdp.psum_scatter,
    "all_to_all": lambda x: fdp.all_to_all(x, 0, 0),
    "ppermute": lambda x: fdp.ppermute(x, [(0, 1), (1, 2), (2, 0)]),
    # On a mesh: in two levels; and within hosts, where not every rank waits for the one that stops.
    "pmean": fdp.pmean,
    "psum along local": lambda x: fdp.psum(fdp.psum(x, axis="local") * 2, axis="hosts"),
}


def waits(name: str, victim: int, in_step: bool, on_mesh: bool = False) -> tuple[str, Any, Any, str]:
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    x = torch.ones(3000 if on_mesh else 3 * 300_000)  # on a mesh in one piece, which is prepared sooner
    others = set(range(dist.get_world_size())) - {victim}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "local")) if on_mesh else None

    def call(x: torch.Tensor) -> Any:
        return CALLS[name](x)

    step = fdp.data_parallel(lambda s, b: fdp.per_rank(call(b)), group=mesh)
    for number in range(3):
        if number == 2 and rank == victim:
            store.set("victim", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            step(torch.ones(1), x) if in_step else call(x)
        except fdp.PeerError as error:
            store.set(f"rank {rank} knows", "")
            if rank == min(others):
                # Not before all know: from then on it has died, and is not frozen any more.
                store.wait([f"rank {other} knows" for other in others], datetime.timedelta(seconds=30))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(store.get("victim")), signal.SIGKILL)
            return type(error).__name__, error.ranks, error.reason, str(error)
    return "", (), "", ""


@pytest.mark.parametrize(
    ("name", "in_step"),
    [
        pytest.param("psum_scatter", True, marks=exhaustive),
        pytest.param("ppermute", False, marks=exhaustive),
        ("all_to_all", True),
    ],
)
def test_a_rank_that_stops_is_named(name: str, in_step: bool) -> None:
    outcomes = ranks.run_fresh(3, waits, name, 1, in_step, env={"FDP_LIVENESS_S": "3"})
    for rank in (0, 2):
        error, who, reason, text = outcomes[rank].value
        assert (error, who, reason) == ("PeerError", (1,), "frozen"), text
        if in_step:
            assert f"{'sum_scatter' if name == 'psum_scatter' else name} of bucket 0: {name}" in text, text


@pytest.mark.parametrize("name", [pytest.param("pmean", marks=exhaustive), "psum along local"])
def test_a_rank_of_a_mesh_that_stops_is_named_on_all_hosts(name: str) -> None:
    outcomes = ranks.run_fresh(4, waits, name, 3, True, True, env={"FDP_LIVENESS_S": "3"})
    for rank in (0, 1, 2):
        error, who, reason, text = outcomes[rank].value
        assert (error, who, reason) == ("PeerError", (3,), "frozen"), (rank, text)
