"""The text of refusals: parameters, tensors and memory that are not the step's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusal_texts import check, run
from torch import nn

import fdp

Tree = Any

PASS_THEM_IN = (
    "Remedy: pass them in: apply, params, buffers = fdp.from_module(model), or torch.func.functional_call(model, "
    "params, ...); a model that is not to be trained needs requires_grad_(False)."
)
NEW_VALUE = (
    "Remedy: compute a new value and return it (x + 1, not x.add_(1)); or let the step have the argument with "
    "donate_argnums; statistics of BatchNorm come out of fdp.from_module's apply."
)
model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))


def test_closed_over_parameters() -> None:
    def train(state: Tree, batch: Tree) -> Tree:
        return fdp.pmean(model(batch["x"]).mean())

    text = f"""
step 'train' uses parameters that are not among its arguments; they would be frozen into the trace and never train.
  model.0.weight: [3, 2] torch.float32, used at LINE in train
  model.0.bias: [3] torch.float32, used at LINE in train
  model.2.weight: [1, 3] torch.float32, used at LINE in train
{PASS_THEM_IN}"""
    check(fdp.PurityError, run(train), text)


def test_closed_over_parameters_wherever_they_are_kept() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.nets = {"critic": nn.Linear(2, 1)}

        def train(self, state: Tree, batch: Tree) -> Tree:
            return fdp.pmean(self.nets["critic"](batch["x"]).mean())

    scale = nn.Parameter(torch.ones(2))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x * scale).mean()

    def train(state: Tree, batch: Tree) -> Tree:
        return fdp.pmean(loss(batch["x"]))

    head = (
        "step 'train' uses parameters that are not among its arguments; they would be frozen into the trace and never "
        "train."
    )
    text = f"""
{head}
  self.nets['critic'].weight: [1, 2] torch.float32, used at LINE in train
  self.nets['critic'].bias: [1] torch.float32, used at LINE in train
{PASS_THEM_IN}"""
    check(fdp.PurityError, run(Trainer().train), text)
    check(fdp.PurityError, run(train), f"{head}\n  scale: [2] torch.float32, used at LINE in loss\n{PASS_THEM_IN}")


def test_changed_inputs() -> None:
    def train(state: Tree, batch: Tree) -> Tree:
        state["w"].add_(1)
        state["w"].mul_(2)
        batch["x"][0].zero_()  # `= 0.0` is another operator in another torch
        return fdp.pmean(batch["x"].sum(0)) + state["w"]

    text = f"""
step 'train' changes tensors that it does not own.
  state['w']: aten.add_.Tensor at LINE in train
  batch['x']: aten.zero_.default at LINE in train
{NEW_VALUE}"""
    check(fdp.PurityError, run(train), text)
    # Donated, it may.
    assert run(train, donate_argnums=(0, 1))().tolist() == [7.0, 7.0]


def test_a_donated_input_that_shares_memory_and_is_changed() -> None:
    def train(state: Tree, batch: Tree) -> Tree:
        state["a"].add_(1)
        return state, fdp.pmean(batch["x"])

    flat = torch.ones(6)
    text = f"""
step 'train' changes tensors that it does not own.
  state['a'] (donated, but it shares memory with another leaf or with itself: pass a clone): aten.add_.Tensor \
at LINE in train
{NEW_VALUE}"""
    check(fdp.PurityError, run(train, {"a": flat[:4], "b": flat[2:]}, donate_argnums=0), text)
    check(fdp.PurityError, run(train, {"a": torch.ones(1).expand(3)}, donate_argnums=0), text)
    # Gaps are no overlap.
    assert run(train, {"a": torch.ones(4, 4)[:, :3]}, donate_argnums=0)()[0]["a"].tolist() == [[2.0] * 3] * 4


def test_statistics_of_a_closed_over_batch_norm() -> None:
    frozen = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).requires_grad_(False)

    def train(state: Tree, batch: Tree) -> Tree:
        return fdp.pmean(frozen(batch["x"]).mean())

    text = f"""
step 'train' changes tensors that it does not own.
  frozen.1.num_batches_tracked: aten.add_.Tensor at LINE in train
  frozen.1.running_mean: aten.native_batch_norm.default at LINE in train
  frozen.1.running_var: aten.native_batch_norm.default at LINE in train
{NEW_VALUE}"""
    check(fdp.PurityError, run(train), text)
    frozen.eval()
    run(train)()


def test_a_changed_tensor_that_is_closed_over() -> None:
    table = torch.ones(2)

    def train(state: Tree, batch: Tree) -> Tree:
        table.add_(1)
        return state["w"] + table

    text = f"""
step 'train' changes tensors that it does not own.
  table: aten.add_.Tensor at LINE in train
{NEW_VALUE}"""
    check(fdp.PurityError, run(train), text)
    assert table.tolist() == [1.0, 1.0]


X = torch.ones(2)


def test_a_closed_over_tensor_in_donated_memory() -> None:
    w = torch.ones(2)
    anchor = w.detach()

    def train(state: Tree, batch: Tree) -> Tree:
        return {"w": state["w"] - 0.5 * (state["w"] - anchor) + fdp.pmean(batch["x"].sum(0))}

    text = """
step 'train' closes over tensors that share memory with donated state.
  anchor lies in the memory of state['w']
Remedy: clone the closed-over tensor; or do not donate."""
    check(fdp.PurityError, run(train, {"w": w}, donate_argnums=0), text)
    assert run(train, {"w": w})()["w"].tolist() == [5.0, 5.0]

    # It may also be donated later, to a step that was traced with other state.
    step = fdp.data_parallel(train, donate_argnums=0)
    batch = {"x": torch.ones(4, 2)}
    for shift in (1.0, 2.0):
        assert step({"w": w + shift}, batch)["w"].tolist() == [5.0 + shift / 2] * 2
    check(fdp.PurityError, lambda: step({"w": w}, batch), text)
    assert w.tolist() == [1.0, 1.0]
    assert step({"w": w + 1.0}, batch)["w"].tolist() == [5.5, 5.5]


def test_a_place_in_the_memory_of_an_argument() -> None:
    """Right where the memory begins; refused where the argument is a part of it, with the comparison off as well."""

    def train(state: Tree, batch: Tree) -> Tree:
        return state["w"].as_strided((2,), (1,), state["w"].storage_offset() + 1) * 2

    long = torch.arange(6.0)
    assert run(train, {"w": long})().tolist() == [2.0, 4.0]
    assert run(lambda state, _: state["w"].as_strided((2,), (2,)) * 2, {"w": long[2:]})().tolist() == [4.0, 8.0]
    text = """
step 'train' looks at an argument by its place in memory, and that argument begins in the middle of its memory.
  aten.as_strided.default at LINE in train
Remedy: leave storage_offset out of as_strided, which is then that of the tensor itself; use ordinary views; or pass \
a clone of the argument."""
    check(fdp.TraceError, run(train, {"w": long[2:]}, check_trace=False), text)
    step = fdp.data_parallel(train, check_trace=False)
    for at in (0, 2):  # also where it was traced without
        call = lambda at=at: step({"w": long[at : at + 4]}, X)  # noqa: E731
        call() if at == 0 else check(fdp.TraceError, call, text)


def test_places_that_are_none_of_an_argument() -> None:
    """A column that was returned has memory of its own, in which nothing lies between its elements."""

    def train(state: Tree, batch: Tree) -> Tree:
        return state["w"].as_strided((2, 2), (1, 2)) * 2

    table = torch.arange(16.0).view(4, 4)
    assert run(train, {"w": table[0]})().tolist() == [[0.0, 4.0], [2.0, 6.0]]
    assert run(train, {"w": table[:2, :2].contiguous().view(torch.int32)})().shape == (2, 2)
    text = """
step 'train' looks at places between or behind the elements of an argument; what lies there belongs to no argument.
  state['w']: aten.as_strided.default at LINE in train
Remedy: pass the whole tensor, and take what you need of it in the step."""
    for w in (table[:, 1], table[:, :2], table[0, :3], table[:, 1:2].view(torch.int32)):
        check(fdp.TraceError, run(train, {"w": w}, check_trace=False), text)


def test_a_closed_over_tensor_that_is_of_another_kind_now() -> None:
    """Its values may change in place; a graph of its old shape would compute something else."""
    scale = torch.ones(3)
    step = fdp.data_parallel(lambda state, batch: state + scale.sum() / scale.numel())
    assert step(torch.ones(()), X).item() == 2.0
    scale.mul_(2)
    assert step(torch.ones(()), X).item() == 3.0
    scale.requires_grad_()
    assert step(torch.ones(()), X).item() == 3.0
    scale.data = torch.ones(6)
    text = """
step '<lambda>' closes over tensors that are of another kind than when it was traced.
  scale: traced as [3] torch.float32 cpu strides [1], now [6] torch.float32 cpu strides [1]
Remedy: pass what changes its shape, strides, dtype or device as an argument; or make another step with \
fdp.data_parallel."""
    check(fdp.PurityError, lambda: step(torch.ones(()), X), text)
    scale.data = torch.ones(3)
    assert step(torch.ones(()), X).item() == 2.0


def test_that_is_said_where_the_step_would_be_compared_again_as_well() -> None:
    scale = torch.ones(3)
    step = fdp.data_parallel(lambda state, batch: state + scale.sum() / len(scale))
    step(torch.ones(()), X)
    scale.data = torch.ones(6)
    with pytest.raises(fdp.PurityError, match="of another kind than when it was traced"):
        step(torch.ones(()), X)  # the second call: before it a step is compared with its function once more


def test_a_closed_over_sparse_tensor() -> None:
    """It lies nowhere in particular."""
    links = torch.eye(2).to_sparse()
    step = fdp.data_parallel(lambda state, batch: torch.sparse.mm(links, state), donate_argnums=0)
    for _ in range(2):
        assert step(torch.ones(2, 2), X).tolist() == [[1.0, 1.0], [1.0, 1.0]]
