"""The cable between two machines is pulled: each side names the ranks of the other one."""

from __future__ import annotations

import pathlib
import time

import hosts
import pytest
from programs import end_ranks, printed_events, start_ranks

PROGRAM = pathlib.Path(__file__).with_name("program.py")
LIVENESS_S = 4


def test_each_side_names_the_other(tmp_path: pathlib.Path) -> None:
    if (why := hosts.why_not()) is not None:
        pytest.skip(why)
    with hosts.two_hosts() as both:
        started = start_ranks(
            PROGRAM,
            ["none", "-1", str(tmp_path)],
            4,
            address=hosts.address(0),
            forked=range(4),
            HOSTS=both.name,
            GLOO_SOCKET_IFNAME=hosts.DEVICE,
            FDP_LIVENESS_S=str(LIVENESS_S),
        )
        try:
            deadline_s = time.monotonic() + 90
            while len(printed_events(tmp_path)) < 4 and time.monotonic() < deadline_s:
                time.sleep(0.1)
            time.sleep(2.0 * LIVENESS_S / 5)  # the machines have been reported
            both.pull_cable(1)
            pulled_s = time.time()
        finally:
            printed = "\n".join(end_ranks(started, 60))
    assert "it did not end in time" not in printed, printed
    errors = {line["rank"]: line for line in printed_events(tmp_path) if line["event"] == "error"}
    assert sorted(errors) == [0, 1, 2, 3], printed
    for rank, error in errors.items():
        assert error["reason"] == "unreachable", error
        assert error["ranks"] == ([2, 3] if rank < 2 else [0, 1]), error
        assert error["when_s"] - pulled_s < 10 + LIVENESS_S, error
