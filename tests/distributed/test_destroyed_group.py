"""A step on a process group that has been destroyed, and that the program still refers to, is refused."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist

import fdp


def calls_after_the_end() -> list[str]:
    group, said = dist.new_group(), []

    def train(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return w + fdp.pmean(batch.sum())

    known = fdp.data_parallel(train, group=group)
    known(torch.ones(2), torch.ones(2))
    dist.destroy_process_group(group)
    for length in (2, 3):  # as before, and with a first call
        # Its own error, or, of the rank that called sooner and has told, that this one has raised it.
        with pytest.raises((fdp.ArgumentError, fdp.PeerError)) as caught:
            known(torch.ones(length), torch.ones(2))
        said.append(str(caught.value))
    fdp.psum(torch.ones(2))  # the default group is there
    return said


def test_it_is_named_and_other_groups_go_on() -> None:
    for texts in ranks.run(2, calls_after_the_end):
        assert all("on a process group that has been destroyed" in text for text in texts), texts
