"""A process group that sends nothing from the CPU, as one of NCCL alone."""

from __future__ import annotations

from typing import Any

import ranks
import torch

import fdp
from fdp.distributed.group import resolve_group


def sends_from_the_cpu() -> list[str]:
    group, cpu, second = resolve_group(), torch.device("cpu"), torch.device("cuda:1")
    # Not on the current card of each rank, which may be the first one for all.
    assert group.carrier(cpu, second) == second and group.carrier(cpu) == torch.device("cuda")
    said = []
    calls: list[Any] = [fdp.psum, fdp.all_gather, fdp.data_parallel(lambda x: fdp.pmean(x * 2))]
    for call in calls:
        try:
            call(torch.ones(2))
        except fdp.ArgumentError as error:
            said.append(str(error))
    return said


def test_a_message_that_no_backend_sends_is_refused_with_the_device() -> None:
    """Outside of a step it was an error of torch's."""
    for outcome in ranks.run_fresh(2, sends_from_the_cpu, backend="cuda:gloo"):
        assert outcome.ok, outcome.describe()
        assert len(outcome.value) == 3
        for text in outcome.value:
            assert "no backend for cpu" in text and "cpu:gloo,cuda:nccl" in text.splitlines()[-1]
