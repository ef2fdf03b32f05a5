"""The text of refusals: steps that cannot be traced, or that a trace would freeze."""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from refusal_texts import check, raised, run

import fdp

Tree = Any

VALUE_READ = """
step '{name}' reads the value of a tensor, which a traced step does not have: its control flow would be \
frozen to one branch.
  LINE in {where}: if, while, bool(), float(), int(), .item(), .tolist() or .numpy() of a tensor
Remedy: choose between values with torch.where(condition, a, b), between functions with torch.cond(condition, f, g, \
operands); index with x.index_select(0, i); return a metric as a tensor and read it outside."""


def branch(state: Tree, batch: Tree) -> Tree:
    if fdp.pmean(batch["x"].sum()) > 0:
        return state["w"]
    return -state["w"]


def branch_in_helper(state: Tree, batch: Tree) -> Tree:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x if bool((x > 0).all()) else -x

    return helper(state["w"])


def loop(state: Tree, batch: Tree) -> Tree:
    while state["w"].sum() > 0:
        state = {"w": state["w"] - 1}
    return state


def branch_on_item(state: Tree, batch: Tree) -> Tree:
    return state["w"] if state["w"].sum().item() > 0 else -state["w"]


def as_float(state: Tree, batch: Tree) -> Tree:
    return state["w"] * float(fdp.pmean(batch["x"].sum()))


def as_size(state: Tree, batch: Tree) -> Tree:
    return state["w"][: int(state["w"].sum())]


def as_range(state: Tree, batch: Tree) -> Tree:
    for _ in range(int(state["w"].sum())):
        state = {"w": state["w"] + 1}
    return state


def as_numpy(state: Tree, batch: Tree) -> Tree:
    return state["w"] * torch.from_numpy(state["w"].numpy())


def as_array(state: Tree, batch: Tree) -> Tree:
    return state["w"] * torch.as_tensor(np.asarray(state["w"]) * 2)


def membership(state: Tree, batch: Tree) -> Tree:
    return state["w"] if 1.0 in state["w"] else -state["w"]


def comparison(state: Tree, batch: Tree) -> Tree:
    return state["w"] if torch.equal(state["w"], state["w"]) else -state["w"]


READING = [branch, branch_in_helper, loop, branch_on_item, as_float, as_size, as_range, as_numpy, as_array, membership,
           comparison]  # fmt: skip


@pytest.mark.parametrize("step", READING, ids=lambda step: step.__name__)
def test_values_that_are_read(step: Callable[..., Any]) -> None:
    where = "helper" if step is branch_in_helper else step.__name__
    check(fdp.TraceError, run(step), VALUE_READ.format(name=step.__name__, where=where))


def test_the_line_of_a_branch_is_its_own() -> None:
    with pytest.raises(fdp.TraceError) as caught:
        run(branch)()
    start = inspect.getsourcelines(branch)[1]
    assert f"  {pathlib.Path(__file__).name}:{start + 1} in branch: if, while" in str(caught.value)


def test_a_number_read_from_a_tensor_is_no_output() -> None:
    def train(state: Tree, batch: Tree) -> Tree:
        return {"w": state["w"], "loss": fdp.pmean(batch["x"].sum()).item()}

    text = """
step 'train' returns values of tensors as Python numbers.
  output['loss']: a number read from a tensor
Remedy: return the tensor, and call .item() on what the step returns."""
    check(fdp.TraceError, run(train), text)


def test_a_number_read_from_a_tensor_is_read_at_every_call() -> None:
    """Where nothing branches on it, it needs no refusal; and it is not frozen."""

    def train(state: Tree, batch: Tree) -> Tree:
        return state["w"] * fdp.pmean(batch["x"].sum()).item()

    step = fdp.data_parallel(train)
    for k in range(3):
        assert step({"w": torch.ones(2)}, {"x": torch.full((4, 2), float(k))}).tolist() == [8.0 * k] * 2


def test_a_slice_at_a_place_that_is_read_from_a_tensor() -> None:
    def train(state: Tree, batch: Tree) -> Tree:
        return state["w"].narrow(0, fdp.pmean(batch["x"]).sum().long().item(), 1) * 1

    kind, text = raised(run(train))
    assert kind is fdp.TraceError
    what, offender, remedy = text.splitlines()
    assert what == "step 'train' takes a slice at a place that it reads from a tensor."
    assert offender == "  aten.slice.Tensor at LINE in train"
    assert remedy.startswith("Remedy: index with the tensor itself: torch.index_select(x, 0, i)")
    step = fdp.data_parallel(lambda w, b: w.index_select(0, fdp.pmean(b).long()))
    assert [step(torch.arange(5.0), torch.tensor([k])).item() for k in (1.0, 4.0)] == [1.0, 4.0]


SHAPES = {
    "aten.nonzero.default": [
        lambda state, batch: fdp.pmean(batch["x"][batch["x"] > 0].mean()),
        lambda state, batch: state["w"].nonzero(),
        lambda state, batch: torch.where(state["w"] > 0),
    ],
    "aten.masked_select.default": [lambda state, batch: state["w"].masked_select(state["w"] > 0)],
}


@pytest.mark.parametrize(("operator", "step"), [(op, step) for op, steps in SHAPES.items() for step in steps])
def test_shapes_that_depend_on_values(operator: str, step: Callable[..., Any]) -> None:
    text = f"""
step '<lambda>' makes a tensor whose shape depends on the values of another.
  LINE in <lambda>: {operator}
Remedy: keep the shape and mask instead: torch.where(mask, x, 0) for x[mask], and divide by mask.sum() for a mean."""
    check(fdp.TraceError, run(step), text)


def test_what_only_the_tracer_cannot_do() -> None:
    def train(state: Tree, batch: Tree) -> Tree:
        return {"w": state["w"], "text": f"{state['w'].sum():.2f}"}

    kind, text = raised(run(train))
    assert kind is fdp.TraceError
    assert text.splitlines()[0] in (
        "step 'train' runs by itself but cannot be traced.",
        VALUE_READ.strip().splitlines()[0].format(name="train"),
    )
    assert text.splitlines()[1].startswith("  LINE in train: ")
    assert text.splitlines()[-1].startswith("Remedy: ")


def test_uninitialised_memory() -> None:
    def train(state: Tree, batch: Tree) -> Tree:
        written = torch.empty(2)
        written.fill_(1)
        return state["w"] + torch.empty(2) + torch.empty_like(state["w"]).relu() + written, torch.empty(3)

    text = """
step 'train' reads uninitialised memory; or an operator hides from the trace how it fills it.
  aten.empty.memory_format at LINE in train, read by aten.add.Tensor
  aten.empty_like.default at LINE in train, read by aten.relu.default
  aten.empty.memory_format at LINE in train, read by the step's output
Remedy: fill the tensor first (torch.zeros); pass lengths and the like as tensors, not as Python numbers."""
    check(fdp.TraceError, run(train), text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there() -> None:
    def train(state: Tree, batch: Tree) -> Tree:
        return state["w"].to("cuda:1") * 2

    text = """
step 'train' makes tensors on a device that this process cannot use.
  cuda:1: aten._to_copy.default at LINE in train
Remedy: make tensors where the inputs are: device=x.device."""
    check(fdp.TraceError, run(train), text)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_collectives_in_a_branch() -> None:
    def train(state: Tree, batch: Tree) -> Tree:
        positive = fdp.pmean(batch["x"].sum()) > 0
        return torch.cond(positive, lambda w: fdp.pmean(w), lambda w: w + 0, (state["w"],))

    text = """
step 'train' has collectives or gradients of fdp in a branch or loop that runs by the value of a tensor; ranks that go \
different ways would wait for each other for ever.
  cond at LINE in train
Remedy: put fdp.pmean and fdp.grad outside of torch.cond, and choose between their results with torch.where."""
    check(fdp.TraceError, run(train), text)


LOOK_FOR = (
    "Remedy: look for values that are frozen when the step is traced: Python or NumPy random numbers, "
    "torch.manual_seed inside the step, counters, flags and iterators that the step itself moves on, tensors made "
    "from Python numbers that change, operators that read memory behind the dispatcher's back. check_trace=False "
    "accepts the trace as it is."
)


def test_a_trace_that_computes_something_else() -> None:
    count = [0]

    def train(state: Tree, batch: Tree) -> Tree:
        count[0] += 1
        return {"w": state["w"] * count[0], "n": count[0], "ok": fdp.pmean(batch["x"])}

    text = f"""
the trace of step 'train' does not compute what the step computes on the same inputs.
  output['n']: 1 in the trace, 2 by itself
  output['w']: [2] torch.float32 differs by 1, where the largest value is 2
{LOOK_FOR}"""
    check(fdp.TraceError, run(train), text)


def test_a_trace_of_another_structure() -> None:
    count = [0]

    def train(state: Tree, batch: Tree) -> Tree:
        count[0] += 1
        return [state["w"]] * count[0]

    text = """
step 'train' returned another structure when it ran by itself than when it was traced.
  traced: PyTreeSpec([*])
  by itself: PyTreeSpec([*, *])
Remedy: make what the step returns a function of its arguments alone."""
    check(fdp.TraceError, run(train), text)


def test_an_operator_that_changes_its_argument_without_saying_so() -> None:
    @torch.library.custom_op("fdp_test::sly", mutates_args=())
    def sly(x: torch.Tensor) -> torch.Tensor:
        x.data.add_(1)
        return x.clone()

    @sly.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def train(state: Tree, batch: Tree) -> Tree:
        return sly(state["w"])

    text = """
step 'train' changes inputs that were not donated, through an operator that does not say so.
  state['w']
Remedy: give the operator a clone, or donate the argument."""
    state = {"w": torch.ones(2)}
    check(fdp.TraceError, run(train, state), text)
    assert state["w"].tolist() == [1.0, 1.0]
