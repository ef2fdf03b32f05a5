"""What changed between two calls, in words: each part of a signature has its own."""

from __future__ import annotations

import pytest
import torch

from fdp.context.ambient import ambient_context
from fdp.distributed.group import Group
from fdp.trace.calls.arguments import flatten_call, resolve_roles
from fdp.trace.calls.changes import Summary, describe_change, summarise

ALONE = Group(None, 1, 0)
W, X, NEGATIVE = torch.ones(4), torch.ones(3), torch._neg_view(torch.ones(4))


def step(w: torch.Tensor, x: torch.Tensor, number: object) -> torch.Tensor:
    return w * x.sum()


def summary_of(w: torch.Tensor, x: torch.Tensor, group: Group = ALONE, static: tuple[object] = (1,)) -> Summary:
    roles = resolve_roles(step, 3, (1,), (2,), (0,))
    return summarise(flatten_call((w, x, *static), roles), group, ambient_context())


def in_bfloat16() -> Summary:
    with torch.autocast("cpu", torch.bfloat16):
        return summary_of(W, X)


CHANGES = {
    "a shape": (lambda: summary_of(W, torch.ones(2)), "x: shape [3] became [2]", "pad to few sizes"),
    "a group": (lambda: summary_of(W, X, Group(None, 2, 0)), "its process group", "a step for each"),
    "autocast": (in_bfloat16, "autocast", "inside the step"),
    "shared memory": (lambda: summary_of(W, W[:3]), "which arguments share memory", "clone"),
    "a lazy negative": (lambda: summary_of(NEGATIVE, X), "how arguments lie in their memory", "clone"),
    "True for 1": (lambda: summary_of(W, X, static=(True,)), "arguments: (1,) became (True,)", "as a tensor"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_named_and_what_to_do(name: str) -> None:
    changed, said, remedy = CHANGES[name]
    what, to_do = describe_change(summary_of(W, X), changed(), ["w", "x"])
    assert said in what and remedy in to_do, (what, to_do)
