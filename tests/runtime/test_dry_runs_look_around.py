"""A run of a step on one rank alone, as comparisons make it, may take long: it looks whether other ranks are gone."""

from __future__ import annotations

import os
import signal
import time

import pytest
import ranks
import torch
import torch.distributed as dist

import fdp
from fdp.distributed.group import resolve_group
from fdp.distributed.sending import watch_over


def runs_alone_when_the_other_is_gone() -> tuple[tuple[int, ...], str]:
    def train(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return w - fdp.pmean(batch.sum(0))

    emitted = fdp.data_parallel(train).plan(torch.ones(4), torch.ones(2, 4)).emit()
    emitted.dry_run([torch.ones(4), torch.ones(2, 4)])
    watched = watch_over(resolve_group())
    fdp.psum(torch.ones(1))
    if dist.get_rank() == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    assert watched is not None
    end_s = time.monotonic() + 30
    while not watched.faults(believing=False) and time.monotonic() < end_s:
        time.sleep(0.05)
    with pytest.raises(fdp.PeerError) as caught:
        emitted.dry_run([torch.ones(4), torch.ones(2, 4)])
    return caught.value.ranks, caught.value.reason


def test_it_raises() -> None:
    outcomes = ranks.run_fresh(2, runs_alone_when_the_other_is_gone, deadline_s=90, grace_s=60)
    assert outcomes[0].value == ((1,), "died"), outcomes[0].describe()
