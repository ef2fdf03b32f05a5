"""What a call sees of the state: a change of any element is seen by some of any 97 calls, and by no other ones."""

from __future__ import annotations

import functools
import random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import examples

import fdp
from fdp.distributed.checksum import _elements
from fdp.distributed.fingerprint import mixed_sum
from fdp.distributed.group import Group
from fdp.plan import Plan
from fdp.runtime import in_passing
from fdp.runtime.in_passing import InPassing
from fdp.runtime.rounds import ROUNDS

Tree = Any

CPU = torch.device("cpu")


def state() -> dict[str, torch.Tensor]:
    """Leaves in slices and in one piece, in rows and strided, and one that begins within its memory."""
    return {
        "large": torch.zeros(300_000),
        "columns": torch.zeros(400, 500).t(),
        "images": torch.zeros(8, 16, 12, 12).to(memory_format=torch.channels_last),
        "bytes": torch.zeros(30_001, dtype=torch.uint8),
        "behind": torch.zeros(20_001)[1:],
        "number": torch.zeros((), dtype=torch.float64),
        "many": torch.zeros(2, 3, dtype=torch.bfloat16),
        "complex": torch.zeros(5_000, dtype=torch.complex64),
    }


@functools.cache
def plan() -> Plan:
    closed = torch.zeros(7)
    step = fdp.data_parallel(lambda state, own, batch: (state, fdp.pmean(batch.sum() + closed.sum())))
    return step.plan(state(), fdp.per_rank(torch.zeros(3)), torch.zeros(2))


def looks(this: InPassing, tensors: list[torch.Tensor]) -> list[int]:
    """The numbers of all rounds."""
    return [int(this.look(tensors, call).mixed) & (2**32 - 1) for call in range(ROUNDS)]


@pytest.mark.parametrize("device", [False, True])
@examples(20)
@given(st.integers(0, 2**30))
def test_each_element_is_seen(device: bool, seed: int) -> None:
    generator = random.Random(seed)
    with (
        mock.patch.object(in_passing, "_is_contiguous", (lambda *_: False) if device else in_passing._is_contiguous),
        mock.patch.object(
            in_passing,
            "checksum",
            (lambda x, start, stop: mixed_sum(_elements(x, start, stop))) if device else in_passing.checksum,
        ),
    ):
        this = InPassing(plan(), Group(None, 1, 0), 1, CPU)
        inputs = plan().trace.inputs
        values = [*state().values(), torch.zeros(3), torch.zeros(2)]
        tensors = [values[[*state(), "own", "batch"].index(_key(item.name))] for item in inputs]
        before = looks(this, tensors)
        at = generator.choice([at for at, item in enumerate(inputs) if item.role == "state"])
        numel = tensors[at].numel()
        element = generator.choice([0, numel - 1, generator.randrange(numel)])
        tensors[at][tuple(torch.unravel_index(torch.tensor(element), tensors[at].shape))] = 1
        leaf = this._names.index(inputs[at].name)
        changed = [call for call, (one, two) in enumerate(zip(before, looks(this, tensors), strict=True)) if one != two]
        assert changed == [
            call
            for call, pieces in enumerate(this.rounds)
            if any(piece.leaf == leaf and piece.start <= element < piece.stop for piece in pieces)
        ]
        assert changed
        # What is each rank's own does not count.
        for other, item in enumerate(inputs):
            if item.role != "state":
                seen = looks(this, tensors)
                tensors[other] = tensors[other] + 1
                assert looks(this, tensors) == seen


def _key(name: str) -> str:
    return name.split("'")[1] if "'" in name else name.split(".")[0]


def test_closed_over_tensors_are_seen() -> None:
    this = InPassing(plan(), Group(None, 1, 0), 1, CPU)
    tensors = [torch.zeros(item.shape, dtype=item.dtype) for item in plan().trace.inputs]
    before = looks(this, tensors)
    ((target, _),) = plan().trace.closed_over
    closed = getattr(plan().trace.graph, target)
    closed[6] = -0.0
    try:
        assert looks(this, tensors) != before
    finally:
        closed.zero_()
    assert looks(this, tensors) == before
