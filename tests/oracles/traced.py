"""Traces for ranks that are not there, of a step of three layers and of others, and places in the source of a step."""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from fake_ranks import fake_group

import fdp
from fdp.trace import Trace

Tree = Any


def trace_of(step: Callable[..., Any], *args: Any, size: int = 2, **options: Any) -> Trace:
    """The trace of a step for ranks that are not there."""
    return fdp.data_parallel(step, group=fake_group(size), **options).trace(*args)


def place_of(function: Callable[..., Any], text: str) -> str:
    """The file of a function, and the number of its first line that has a text in it."""
    lines, start = inspect.getsourcelines(function)
    line = start + next(k for k, line in enumerate(lines) if text in line)
    return f"{pathlib.Path(inspect.getfile(function)).name}:{line}"


def mlp_step(state: Tree, batch: Tree) -> Tree:
    def loss_fn(params: Tree) -> torch.Tensor:
        hidden = torch.tanh(batch["x"] @ params["first"])  # first layer
        hidden = torch.tanh(hidden @ params["second"])  # second layer
        return ((hidden @ params["third"]) ** 2).mean()  # third layer

    loss, grads = fdp.value_and_grad(loss_fn)(state)
    return {k: state[k] - grads[k] for k in state}, fdp.pmean(loss)


def mlp_arguments() -> tuple[Tree, Tree]:
    state = {"third": torch.ones(5, 2), "first": torch.ones(3, 4), "second": torch.ones(4, 5)}
    return state, {"x": torch.ones(6, 3)}
