"""A call that raises before it sends anything counts: on one rank alone it is a call that the others do not make."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import some

import fdp

REFUSED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "an error of the step's own": lambda step, b: step(torch.ones(2), b[:3]),
    "a shape": lambda step, b: step(torch.ones(2), torch.ones(3, 7)),
    "no tensor": lambda step, b: step(torch.ones(2), "text"),
    "a sparse batch": lambda step, b: step(torch.ones(2), b.to_sparse()),
    "an argument that it does not have": lambda step, b: step(torch.ones(2), batch=b),
    "a transform": lambda step, b: torch.vmap(lambda b: step(torch.ones(2), b))(b[None]),
}


def counting(own: bool) -> Any:
    def rows(s: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if own and len(b) == 3:
            raise ValueError("three rows")
        return s + fdp.pmean((b @ torch.eye(2)).sum(0))

    return fdp.data_parallel(rows)


def one_is_refused(name: str) -> list[Any]:
    """One rank's call raises, and its program goes on; the others' calls do not."""
    odd, found = dist.get_rank() == 1, []
    step = counting(own=odd)
    for rows in (2, 4, 2):
        found.append(step(torch.ones(2), torch.ones(rows, 2)).tolist())
    if odd:
        with pytest.raises(Exception, match=r".") as caught:
            REFUSED[name](step, torch.ones(4, 2))
        assert not isinstance(caught.value, (fdp.AgreementError, fdp.PeerError))
    with pytest.raises(fdp.AgreementError) as caught:
        step(torch.ones(2), torch.ones(4, 2))
    with pytest.raises(fdp.PeerError):
        step(torch.ones(2), torch.ones(2, 2))
    return [found, str(caught.value)]


@pytest.mark.parametrize("name", some(REFUSED, 3))
def test_a_call_that_raises_on_one_rank_alone_is_seen_at_the_next(name: str) -> None:
    for outcome in ranks.run_fresh(2, one_is_refused, name, deadline_s=60):
        assert outcome.ok, outcome.describe()
        results, text = outcome.value
        assert results == [[3.0, 3.0], [5.0, 5.0], [3.0, 3.0]]
        assert re.search(r"rank 0: at call 4 of step 'rows' \(.*\)$", text, re.MULTILINE), text
        assert re.search(r"rank 1: at call 5 of step 'rows' .*; of its calls 1 raised and sent nothing$", text, re.M)


def all_are_refused() -> list[Any]:
    step = counting(own=True)
    found = []
    for n in (2, 3, 4, 3, 2):
        try:
            found.append(step(torch.ones(2), torch.ones(n, 2)).tolist()[0])
        except ValueError:
            found.append(None)
    return found


def test_a_call_that_raises_on_all_ranks_ends_nothing() -> None:
    assert ranks.run(2, all_are_refused) == [[3.0, None, 5.0, None, 3.0]] * 2
