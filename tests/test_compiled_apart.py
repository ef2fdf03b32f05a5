"""What a compiler returns in memory that a later call writes is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdp.emit.compiled.unaliased import Apart


def returns(*positions: int) -> Any:
    """A program that adds one to its inputs in place, and returns some of them, and a new tensor."""

    def program(inputs: list[Any]) -> Sequence[Any]:
        made = [inputs[at][:2].add_(1) for at in positions]
        inputs.clear()
        return [*made, torch.zeros(2)]

    return program


def test_results_in_buckets_and_donated_memory_are_copied_at_every_call() -> None:
    state, bucket = torch.zeros(3), torch.zeros(3)
    step = Apart(returns(0, 1), free=frozenset(), alone=True)
    first = step([state, bucket])
    second = step([state, bucket])
    assert [x.tolist() for x in first] == [[1, 1], [1, 1], [0, 0]]
    assert [x.tolist() for x in second] == [[2, 2], [2, 2], [0, 0]]


def test_results_may_be_views_of_what_no_call_writes() -> None:
    kept = torch.zeros(3)
    made = Apart(returns(0), free=frozenset({0}), alone=False)([kept])
    assert made[0].untyped_storage().data_ptr() == kept.untyped_storage().data_ptr()


def test_where_state_is_donated_results_do_not_share_memory_with_each_other() -> None:
    whole = torch.zeros(4)
    step = Apart(lambda inputs: [whole[:2], whole[2:]], free=frozenset(), alone=True)
    for _ in range(2):
        one, two = step([])
        assert one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr()
    assert len({x.untyped_storage().data_ptr() for x in Apart(step._function, frozenset(), alone=False)([])}) == 1
