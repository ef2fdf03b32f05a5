"""What a compiler returns in memory that a later call writes is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdp.emit.compiled.unaliased import UnaliasedResults


def returns(*positions: int) -> Any:
    """A program that adds one to its inputs in place, and returns some of them, and a new tensor."""

    def program(inputs: list[Any]) -> Sequence[Any]:
        made = [inputs[at][:2].add_(1) for at in positions]
        inputs.clear()
        return [*made, torch.zeros(2)]

    return program


def test_results_in_buckets_and_donated_memory_are_copied_at_every_call() -> None:
    state, bucket = torch.zeros(3), torch.zeros(3)
    step = UnaliasedResults(returns(0, 1), [(1,)] * 3, free=frozenset(), alone=True)
    first = step([state, bucket])
    second = step([state, bucket])
    assert [x.tolist() for x in first] == [[1, 1], [1, 1], [0, 0]]
    assert [x.tolist() for x in second] == [[2, 2], [2, 2], [0, 0]]


def test_results_may_be_views_of_what_no_call_writes() -> None:
    kept = torch.zeros(3)
    made = UnaliasedResults(returns(0), [(1,)] * 2, free=frozenset({0}), alone=False)([kept])
    assert made[0].untyped_storage().data_ptr() == kept.untyped_storage().data_ptr()


def test_where_state_is_donated_results_do_not_share_memory_with_each_other() -> None:
    whole = torch.zeros(4)
    step = UnaliasedResults(lambda inputs: [whole[:2], whole[2:]], [(1,)] * 2, free=frozenset(), alone=True)
    for _ in range(2):
        one, two = step([])
        assert one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr()
    sharing = UnaliasedResults(step._function, [(1,)] * 2, frozenset(), alone=False)([])
    assert len({x.untyped_storage().data_ptr() for x in sharing}) == 1


def test_results_lie_as_the_trace_says() -> None:
    """Turned, with gaps, and with elements that lie in one place; what lies right is not copied."""
    made = [torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3), torch.ones(2, 3), torch.arange(6.0).view(2, 3)]
    strides = [(1, 2), (8, 2), (0, 0), (3, 1)]
    step = UnaliasedResults(lambda inputs: list(made), strides, free=frozenset(), alone=True)
    for _ in range(2):
        found = step([])
        assert [x.stride() for x in found] == strides
        assert all(torch.equal(x, y) for x, y in zip(found, made, strict=True))
        assert found[3] is made[3]
