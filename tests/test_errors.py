"""What all errors of fdp have in common: their classes, how messages are laid out, and that nothing is left behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from refusal_texts import run

import fdp
from fdp.distributed.exchange import announce_failure
from fdp.distributed.group import resolve_group
from fdp.distributed.liveness.watched import text_of
from fdp.errors import build_message, first_line

Tree = Any


def branch(state: Tree, batch: Tree) -> Tree:
    if fdp.pmean(batch["x"].sum()) > 0:
        return state["w"]
    return -state["w"]


def identity(state: Tree, batch: Tree) -> Tree:
    return {"w": state["w"]}


def step(state: Tree, batch: Tree) -> Tree:
    return {"w": state["w"] + fdp.pmean(batch["x"].sum(0))}


def test_errors_have_one_root_and_argument_errors_are_value_errors() -> None:
    names = ["ArgumentError", "ReplicationError", "PurityError", "TraceError", "AgreementError", "PeerError"]
    for name in names:
        assert issubclass(getattr(fdp, name), fdp.FdpError)
    assert issubclass(fdp.ArgumentError, ValueError)
    assert not issubclass(fdp.TraceError, ValueError)


def test_a_message_is_laid_out_in_lines() -> None:
    text = build_message("step 'f' fails.", ["a: one\ntwo", "b"], remedy="fix it.")
    assert text.splitlines() == ["step 'f' fails.", "  a: one", "    two", "  b", "Remedy: fix it."]
    assert build_message("what") == "what"


class Mute(KeyError):
    """An error of a user's, whose text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no str")


def test_an_error_whose_text_cannot_be_made_is_reported_by_its_class() -> None:
    assert first_line(Mute()) == "(its text cannot be made)"
    assert text_of(Mute()) == "Mute: (its text cannot be made)"
    announce_failure(resolve_group(), Mute())


def test_nothing_was_sent_or_changed_by_a_refusal() -> None:
    """After any refusal fdp works outside of the step, and in the next one."""
    for refused in (run(branch), run(identity, {"w": np.ones(2)}), run(lambda s, b: b["x"])):
        with pytest.raises(fdp.FdpError):
            refused()
        assert fdp.psum(torch.ones(1)).tolist() == [1.0]
        assert not torch.compiler.is_compiling()
        assert run(step)()["w"].tolist() == [5.0, 5.0]
