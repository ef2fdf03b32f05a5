"""A step on a process group that has been destroyed, and that the program still refers to, is refused."""

from __future__ import annotations

import time

import pytest
import ranks
import torch
import torch.distributed as dist

import fdp


def calls_after_the_end(late: float) -> list[str]:
    group, said = dist.new_group(), []

    def train(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return w + fdp.pmean(batch.sum())

    known = fdp.data_parallel(train, group=group)
    known(torch.ones(2), torch.ones(2))
    dist.destroy_process_group(group)
    time.sleep(late * dist.get_rank())  # until the other rank has told that it raised, and then that it left
    for length in (2, 3):  # as before, and with a first call
        with pytest.raises(fdp.ArgumentError) as caught:
            known(torch.ones(length), torch.ones(2))
        said.append(str(caught.value))
    fdp.psum(torch.ones(2))  # the default group is there
    return said


@pytest.mark.parametrize("late", [0.0, 0.4, 1.5])
def test_its_own_error_is_raised_and_other_groups_go_on(late: float) -> None:
    for texts in ranks.run(2, calls_after_the_end, late):
        assert all("on a process group that has been destroyed" in text for text in texts), texts
