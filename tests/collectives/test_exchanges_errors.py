"""What collectives that give each rank a part of its own refuse: shapes, axes, pairs, dtypes, undeclared results."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from fake_ranks import fake_group
from hypothesis import given
from hypothesis import strategies as st
from samples import examples

import fdp
from fdp.context.axis import step_axis

REFUSED: dict[str, tuple[Any, list[str]]] = {
    "uneven": (
        lambda: fdp.psum_scatter({"a": torch.ones(4, 2), "b": [torch.ones(6, 5)]}, axis=1),
        ["that 4 ranks cannot share evenly", "psum_scatter(['a']): shape [4, 2], axis=1 has size 2, ranks 4",
         "psum_scatter(['b'][0]): shape [6, 5], axis=1 has size 5, ranks 4", "torch.nn.functional.pad"],
    ),
    "uneven mean": (lambda: fdp.pmean_scatter(torch.ones(6)), ["pmean_scatter: shape [6], axis=0 has size 6, ranks 4"]),
    "uneven exchange": (
        lambda: fdp.all_to_all(torch.ones(8, 3), -1, 0),
        ["all_to_all: shape [8, 3], split_axis=-1 has size 3, ranks 4"],
    ),
    "no such axis": (
        lambda: fdp.psum_scatter({"a": torch.ones(4), "b": torch.ones(4, 4)}, axis=1),
        ["without dimension 1", "psum_scatter(['a']): shape [4], axis=1"],
    ),
    "no axis at all": (lambda: fdp.psum_scatter(torch.tensor(1.0)), ["psum_scatter: shape [], axis=0"]),
    "a number": (lambda: fdp.psum_scatter({"n": 3}), ["psum_scatter(['n']): shape [], axis=0"]),
    "no such place": (lambda: fdp.all_to_all(torch.ones(4), 0, 1), ["all_to_all: shape [4], concat_axis=1"]),
    "axis of another type": (lambda: fdp.psum_scatter(torch.ones(4), axis="x"), ["axis='x'"]),
    "truth values": (lambda: fdp.psum_scatter(torch.ones(4, dtype=torch.bool)), ["not defined for torch.bool"]),
    "a mean of integers": (lambda: fdp.pmean_scatter(torch.ones(4, dtype=torch.int32)), ["is not an integer"]),
    "a sparse tensor": (lambda: fdp.ppermute(torch.ones(4).to_sparse(), []), ["sparse"]),
    "no tensor": (lambda: fdp.all_to_all({"a": "x"}, 0, 0), ["str at ['a']"]),
    "a source twice": (
        lambda: fdp.ppermute(torch.ones(4), [(0, 1), (0, 2)]), ["rank 0 is source 2 times", "rank from 0 to 3"],
    ),
    "a destination twice": (
        lambda: fdp.ppermute(torch.ones(4), [(3, 2), (1, 2)]), ["rank 2 is destination 2 times"],
    ),
    "no such rank": (
        lambda: fdp.ppermute(torch.ones(4), [(0, 4), (-1, 0)]),
        ["source -1: there is no such rank", "destination 4: there is no such rank"],
    ),
    "no pairs": (lambda: fdp.ppermute(torch.ones(4), [0, 1]), ["pairs of ranks (source, destination)"]),
    "no ranks": (lambda: fdp.ppermute(torch.ones(4), [(0.5, 1)]), ["pairs of ranks (source, destination)"]),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_meaning_is_refused(what: str) -> None:
    call, texts = REFUSED[what]
    with step_axis("equal ranks", fake_group(4, 1)), pytest.raises(fdp.ArgumentError) as error:
        call()
    assert "Remedy:" in str(error.value)
    for text in texts:
        assert text in str(error.value), str(error.value)


RESULTS: dict[str, Any] = {
    "psum_scatter": lambda b: fdp.psum_scatter(b),
    "pmean_scatter": lambda b: fdp.pmean_scatter(b).sum(),
    "all_to_all": lambda b: fdp.all_to_all(b, 0, 0) * 2,
    "ppermute": lambda b: fdp.ppermute(b, [(0, 1), (1, 0)]),
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_part_of_ones_own_is_not_replicated(name: str, world: int) -> None:
    """Of a value that is: ranks get different parts of it all the same."""
    if world == 1 and name == "ppermute":
        return
    step = fdp.data_parallel(lambda s, b: (s, RESULTS[name](s)), group=fake_group(world))
    with pytest.raises(fdp.ReplicationError) as error:
        step.trace(torch.ones(4), torch.ones(4))
    assert "output[1]" in str(error.value)
    fdp.data_parallel(lambda s, b: (s, fdp.per_rank(RESULTS[name](s))), group=fake_group(world)).trace(
        torch.ones(4), torch.ones(4)
    )
    fdp.data_parallel(lambda s, b: (s, fdp.psum(RESULTS[name](s))), group=fake_group(world)).trace(
        torch.ones(4), torch.ones(4)
    )


def test_not_while_gradients_are_accumulated() -> None:
    def step(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        grad = fdp.accumulate(fdp.value_and_grad(lambda w, b: (fdp.psum_scatter(w) * b.sum()).sum()), 2)
        return w - grad(w, b)[1]

    with pytest.raises(fdp.FdpError, match=r"fdp\.psum_scatter"):
        fdp.data_parallel(step)(torch.ones(2), torch.ones(4))


def other_pairs(rank: int) -> list[tuple[int, int]]:
    return [(0, 1), (1, 0)] if rank == 0 else [(1, 0)]


def ranks_with_other_pairs() -> str:
    pairs = other_pairs(int(fdp.axis_index()))
    step = fdp.data_parallel(lambda s, b: (s, fdp.per_rank(fdp.ppermute(b, pairs))))
    with pytest.raises(fdp.AgreementError) as error:
        step(torch.ones(2), torch.ones(2))
    return str(error.value)


def test_ranks_agree_on_pairs_before_anything_is_sent() -> None:
    for text in ranks.run(2, ranks_with_other_pairs):
        assert "permute of 0 to 1, 1 to 0: ppermute [2]" in text and "permute of 1 to 0: ppermute [2]" in text, text


@examples(40)
@given(st.data())
def test_shapes_of_any_axes(data: Any) -> None:
    """Where each rank holds what this one holds, parts are known: of any shape, in any layout, split along any axis."""
    size = data.draw(st.integers(1, 4))
    rank = data.draw(st.integers(0, size - 1))
    shape = [data.draw(st.integers(0, 3)) for _ in range(data.draw(st.integers(1, 4)))]
    split, concat = (data.draw(st.integers(-len(shape), len(shape) - 1)) for _ in range(2))
    shape[split] *= size
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    order = data.draw(st.permutations(range(len(shape))))
    laid = x.permute(order).contiguous().permute([order.index(at) for at in range(len(shape))])
    own = x.chunk(size, split)[rank] if x.shape[split] else x.narrow(split, 0, 0)
    with step_axis("equal ranks", fake_group(size, rank)):
        found = fdp.psum_scatter(laid, split), fdp.pmean_scatter(laid, split), fdp.all_to_all(laid, split, concat)
    for one, two in zip(found, (own * size, own, torch.cat([own] * size, concat)), strict=True):
        assert one.shape == two.shape and one.is_contiguous()
        torch.testing.assert_close(one, two)
