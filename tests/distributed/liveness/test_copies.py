"""A forked copy of a rank, such as a worker process of a data loader, takes no part in the rank's messages."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

import fdp

CALLS: dict[str, Callable[[], Any]] = {
    "a message": lambda: fdp.psum(torch.ones(2)),
    "a step": lambda: fdp.data_parallel(lambda s, b: s + fdp.pmean(b.sum()))(torch.ones(2), torch.ones(2)),
    "an exchange": lambda: fdp.CheckpointManager("there is none").restore({}, missing_ok=True),
}


def in_a_copy(what: str) -> str:
    """The error of a call in a copy of this process; "" if it does not end, or ends without."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other threads run
        child = os.fork()
    if child == 0:
        signal.alarm(15)
        try:
            CALLS[what]()
        except fdp.FdpError as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as file:
        return file.read()


def communicates_in_a_copy(what: str) -> tuple[str, list[float]]:
    CALLS[what]()  # the group is known from now on
    said = in_a_copy(what)
    return said, fdp.psum(torch.full((2,), dist.get_rank() + 1.0)).tolist()


@pytest.mark.parametrize("what", CALLS)
def test_what_communicates_in_a_copy_is_refused_and_the_rank_goes_on(what: str) -> None:
    for rank, (said, total) in enumerate(ranks.run(2, communicates_in_a_copy, what)):
        assert said.startswith("ArgumentError: process ") and f"is a copy of rank {rank}, made by os.fork" in said, said
        assert total == [3.0, 3.0]
