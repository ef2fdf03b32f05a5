"""The text of refusals: leaves that a step cannot take, and outputs that it cannot return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from refusal_texts import check, run

import fdp

Tree = Any


class Thing:
    pass


class Sub(torch.Tensor):
    pass


def identity(state: Tree, batch: Tree) -> Tree:
    return {"w": state["w"]}


def test_leaves_that_a_step_cannot_take() -> None:
    sub = torch.ones(2).as_subclass(Sub)
    state = {"w": torch.ones(2), "thing": Thing(), "array": np.ones(2), "set": {1}, "sub": sub}
    batch = {"x": np.ones(3), "n": 3, "name": "train", "sparse": torch.eye(2).to_sparse(), "flag": True}
    text = f"""
step 'identity' was called with leaves that it cannot take.
  state['array']: numpy.ndarray, which is neither a tensor nor a plain constant
  state['set']: set, which is neither a tensor nor a plain constant
  state['sub']: the tensor subclass {__name__}.Sub
  state['thing']: {__name__}.Thing, which is neither a tensor nor a plain constant
  batch['flag']: bool True, in a batch argument, which holds tensors only
  batch['n']: int 3, in a batch argument, which holds tensors only
  batch['name']: str 'train', in a batch argument, which holds tensors only
  batch['sparse']: a tensor of layout torch.sparse_coo
  batch['x']: numpy.ndarray array([1., 1., 1.]), in a batch argument, which holds tensors only
Remedy: convert data with torch.as_tensor; pass other objects by static_argnums, or close over them; make a \
container of your own a dataclass, or register it with optree."""
    check(fdp.TraceError, run(identity, state, batch), text)


class Result:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Record(dict):  # type: ignore[type-arg]
    pass


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "an object": (Result, f"output: {__name__}.Result"),
    "a dict of another type": (
        lambda x: Record(x=x),
        f"output: {__name__}.Record, a subclass of dict that is not registered",
    ),
    "deep down": (lambda x: {"deep": [x, Result(x)]}, f"output['deep'][1]: {__name__}.Result"),
    "a generator": (lambda x: (y for y in [x]), "output: generator"),
    "a function": (lambda x: lambda: x, "output: function"),
    "an array": (lambda x: np.ones(2), "output: numpy.ndarray"),
}


@pytest.mark.parametrize("name", list(OUTPUTS))
def test_an_output_that_is_no_tensor_and_no_constant(name: str) -> None:
    """Kept from the trace, it would hold tensors that have no values."""
    make, offender = OUTPUTS[name]
    text = f"""
step '<lambda>' returns objects that are neither tensors nor plain constants.
  {offender}
Remedy: return dicts, lists, tuples, namedtuples or dataclasses of tensors; or register the class with optree."""
    check(fdp.TraceError, run(lambda state, batch: make(fdp.pmean(batch["x"]))), text)


def test_donated_leaves_that_others_need() -> None:
    with torch.inference_mode():
        marked = torch.ones(2)
    state = {"leaf": torch.ones(2, requires_grad=True), "marked": marked, "w": torch.ones(2, requires_grad=True) * 2}
    text = """
step 'identity' was called with leaves that it cannot take.
  state['marked']: donated, but made under torch.inference_mode(); pass a clone
  state['w']: donated, but autograd may go back through it; pass x.detach()
Remedy: convert data with torch.as_tensor; pass other objects by static_argnums, or close over them; make a \
container of your own a dataclass, or register it with optree."""
    check(fdp.TraceError, run(identity, state, donate_argnums=0), text)
    run(identity, state)()
