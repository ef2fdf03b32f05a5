"""The text of every refusal that one process can give, word for word; lines of this file are written LINE.

A message says what happened, names the user's function and each offender by its key path, and ends with the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from graphs import fake_group
from torch import nn

import fdp
from fdp.errors import build_message

Tree = Any


def raised(call: Callable[[], Any]) -> tuple[type, str]:
    """The class and the text of what a call raises, with line numbers of this file taken out."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.type, re.sub(r"test_messages\.py:\d+", "LINE", str(caught.value))


def check(error: type, call: Callable[[], Any], text: str) -> None:
    kind, found = raised(call)
    assert found == text.strip("\n")
    assert kind is error
    assert found.splitlines()[-1].startswith("Remedy: ")
    assert all(line.startswith("  ") for line in found.splitlines()[1:-1])


def run(step: Callable[..., Any], state: Tree = None, batch: Tree = None, **options: Any) -> Callable[[], Any]:
    """A call of a step, with a state {"w": [2]} and a batch {"x": [4, 2]} unless others are given."""
    state = {"w": torch.ones(2)} if state is None else state
    batch = {"x": torch.ones(4, 2)} if batch is None else batch
    return lambda: fdp.data_parallel(step, **options)(state, batch)


# --- outputs that may differ between ranks -----------------------------------------------------------

REPLICATE = (
    "Remedy: average them with fdp.pmean (or fdp.psum, fdp.pmax, fdp.broadcast); declare those that are meant to "
    "differ with fdp.per_rank."
)
REPLICATE_OR_DRAW = REPLICATE.replace("declare", "draw what is to be equal on all ranks with fdp.random; declare")


def test_outputs_that_vary() -> None:
    """All of them, in one message; not those that are averaged or declared."""

    def train(state: Tree, batch: Tree) -> Tree:
        noise = torch.rand_like(state["w"])
        local = batch["x"].sum(0)
        new = {"w": state["w"] + local, "noise": noise}
        return new, batch["x"], fdp.pmean(local), fdp.per_rank(local), [fdp.axis_index()]

    text = f"""
step 'train' returns values that may differ from rank to rank.
  output[0]['noise']: [2] torch.float32, last varied in aten.rand_like.default at LINE in train
  output[0]['w']: [2] torch.float32, last varied in aten.add.Tensor at LINE in train
  output[1]: [4, 2] torch.float32, is the batch argument batch['x'] itself
  output[4][0]: [] torch.int64, last varied in fdp.axis_index.default at LINE in train
{REPLICATE_OR_DRAW}"""
    check(fdp.ReplicationError, run(train), text)
    # Also when it is only planned, and for ranks that are not there.
    arguments = {"w": torch.ones(2)}, {"x": torch.ones(4, 2)}
    check(fdp.ReplicationError, lambda: fdp.data_parallel(train, group=fake_group(8)).plan(*arguments), text)


def test_a_missing_average_of_the_loss() -> None:
    def train(state: Tree, batch: Tree) -> Tree:
        loss, grads = fdp.value_and_grad(lambda p: (batch["x"] @ p["w"]).mean())(state)
        return grads, {"loss": loss}

    text = f"""
step 'train' returns values that may differ from rank to rank.
  output[1]['loss']: [] torch.float32, last varied in aten.mean.default at LINE in <lambda>
{REPLICATE}"""
    check(fdp.ReplicationError, run(train), text)


def test_noise_in_an_update() -> None:
    """Who drew it, also behind an optimizer that takes all gradients at once."""
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=0.1)

    def private(state: Tree, batch: Tree) -> Tree:
        grads = fdp.grad(lambda p: (batch["x"] @ p["w"]).mean())(state["params"])
        noisy = {"w": grads["w"] + torch.empty_like(grads["w"]).normal_()}
        return optimizer.update(noisy, state["opt"], state["params"])[0]

    params = {"w": torch.ones(2)}
    text = f"""
step 'private' returns values that may differ from rank to rank.
  output['w']: [2] torch.float32, last varied in OPERATOR at LINE in private, only by the random numbers of \
aten.normal_.default at LINE in private
{REPLICATE_OR_DRAW}"""
    state = {"params": params, "opt": optimizer.init(params)}
    kind, found = raised(run(private, state))
    assert kind is fdp.ReplicationError
    assert re.sub(r"varied in aten\.\S+", "varied in OPERATOR", found) == text.strip("\n")


def test_batches_and_random_numbers_together() -> None:
    """Random numbers are not said to be all, whichever came first, and whichever wrote into the other's memory."""

    def train(state: Tree, batch: Tree) -> Tree:
        filled = torch.rand(2)
        filled[:1] = batch["x"][0, :1]
        over = batch["x"][0].clone()
        over[:1] = torch.rand(1)
        again = batch["x"][0].clone().uniform_()
        return [torch.dropout(batch["x"], 0.5, True).sum(), filled, over, again]

    text = f"""
step 'train' returns values that may differ from rank to rank.
  output[0]: [] torch.float32, last varied in aten.sum.default at LINE in train
  output[1]: [2] torch.float32, last varied in aten.copy_.default at LINE in train
  output[2]: [2] torch.float32, last varied in aten.copy_.default at LINE in train
  output[3]: [2] torch.float32, last varied in aten.uniform_.default at LINE in train
{REPLICATE_OR_DRAW}"""
    check(fdp.ReplicationError, run(train), text)


def test_statistics_of_batch_norm_that_drift_apart() -> None:
    apply, params, buffers = fdp.from_module(nn.BatchNorm1d(2))

    def train(state: Tree, batch: Tree) -> Tree:
        return apply(params, state, batch["x"])[1]

    for p in params.values():
        p.requires_grad_(False)
    text = f"""
step 'train' returns values that may differ from rank to rank.
  output['running_mean']: [2] torch.float32, last varied in aten.native_batch_norm.default at LINE in train
  output['running_var']: [2] torch.float32, last varied in aten.native_batch_norm.default at LINE in train
{REPLICATE}"""
    check(fdp.ReplicationError, run(train, state=buffers), text)


def test_what_was_declared_and_then_changed() -> None:
    def train(state: Tree, batch: Tree) -> Tree:
        return fdp.per_rank(batch["x"].sum()) * 2

    text = f"""
step 'train' returns values that may differ from rank to rank.
  output: [] torch.float32, last varied in aten.mul.Tensor at LINE in train
{REPLICATE}"""
    check(fdp.ReplicationError, run(train), text)


# --- parameters and tensors that are not the step's --------------------------------------------------

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


# --- steps that cannot be traced ---------------------------------------------------------------------

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
    import inspect

    with pytest.raises(fdp.TraceError) as caught:
        run(branch)()
    start = inspect.getsourcelines(branch)[1]
    assert f"  test_messages.py:{start + 1} in branch: if, while" in str(caught.value)


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


# --- leaves ------------------------------------------------------------------------------------------


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
    text = """
step 'identity' was called with leaves that it cannot take.
  state['array']: numpy.ndarray, which is neither a tensor nor a plain constant
  state['set']: set, which is neither a tensor nor a plain constant
  state['sub']: the tensor subclass test_messages.Sub
  state['thing']: test_messages.Thing, which is neither a tensor nor a plain constant
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
    "an object": (Result, "output: test_messages.Result"),
    "a dict of another type": (
        lambda x: Record(x=x),
        "output: test_messages.Record, a subclass of dict that is not registered",
    ),
    "deep down": (lambda x: {"deep": [x, Result(x)]}, "output['deep'][1]: test_messages.Result"),
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


# --- the check of a new trace ------------------------------------------------------------------------

LOOK_FOR = (
    "Remedy: look for values that are frozen when the step is traced: Python or NumPy random numbers, "
    "torch.manual_seed inside the step, tensors made from Python numbers that change, operators that read memory "
    "behind the dispatcher's back. check_trace=False accepts the trace as it is."
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


# --- misuse of an argument ---------------------------------------------------------------------------


def step(state: Tree, batch: Tree) -> Tree:
    return {"w": state["w"] + fdp.pmean(batch["x"].sum(0))}


X = torch.ones(2)
COUNT = "Remedy: count positions from 0, or from -1 at the end."
CAPS = 'Remedy: pass a positive number of MiB, a list of them (first bucket, next, ...), or "auto".'
CONVERT = "Remedy: pass tensors or numbers; convert booleans with .int() and arrays with torch.as_tensor."
TYPE = "Remedy: convert the tensor first, for instance with .int() or .float()."
SCALAR = "Remedy: pass one real scalar a rank, for instance the number of samples in its batch."
REDUCE = "Remedy: reduce the loss to a scalar, for instance with .mean(); return other values with has_aux=True."


def loss(p: torch.Tensor) -> torch.Tensor:
    return (p**2).sum()


def vector(p: torch.Tensor) -> torch.Tensor:
    return p


def number(p: torch.Tensor) -> float:
    return 1.0


def table(p: Tree) -> torch.Tensor:
    return F.embedding(torch.tensor([0]), p["w"], sparse=True).sum()


ARGUMENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "no such argument": (
        run(step, batch_argnums=2),
        f"batch_argnums=2, but step 'step' was called with 2 positional arguments.\n{COUNT}",
    ),
    "no number": (
        run(step, donate_argnums="state"),
        f"donate_argnums='state', but step 'step' was called with 2 positional arguments.\n{COUNT}",
    ),
    "a boolean": (
        run(step, donate_argnums=True),
        f"donate_argnums=True, but step 'step' was called with 2 positional arguments.\n{COUNT}",
    ),
    "a float": (
        run(step, static_argnums=1.0),
        f"static_argnums=1.0, but step 'step' was called with 2 positional arguments.\n{COUNT}",
    ),
    "static and donated": (
        run(step, static_argnums=0, donate_argnums=0),
        "argument 0 of step 'step' is in static_argnums and in donate_argnums.\n"
        "Remedy: a static argument is a constant: take it out of one of the two.",
    ),
    "static and batch": (
        run(step, static_argnums=1, batch_argnums=(0, 1)),
        "argument 1 of step 'step' is in static_argnums and in batch_argnums.\n"
        "Remedy: a static argument is a constant: take it out of one of the two.",
    ),
    "a static argument that cannot be hashed": (
        run(step, [1], static_argnums=0),
        "step 'step' was called with static arguments that cannot be hashed.\n  state: list\n"
        "Remedy: pass a tuple for a list, a frozen dataclass for a dict, or leave the argument out of static_argnums.",
    ),
    "keyword only": (
        lambda: fdp.data_parallel(lambda state, *, batch: state)(X, batch=X),
        "step '<lambda>' takes ['batch'] by keyword only.\n"
        "Remedy: make them positional: batch_argnums and the like count positions.",
    ),
    "keywords of a builtin": (
        lambda: fdp.data_parallel(torch.add)(X, other=X),
        "step 'add' was called with keyword arguments ['other'], and does not tell its parameter names.\n"
        "Remedy: pass them by position.",
    ),
    "a cap of zero": (run(step, bucket_cap_mb=0), f"bucket_cap_mb=0.\n{CAPS}"),
    "a cap below zero": (run(step, bucket_cap_mb=[1, -1]), f"bucket_cap_mb=[1, -1].\n{CAPS}"),
    "no caps": (run(step, bucket_cap_mb=[]), f"bucket_cap_mb=[].\n{CAPS}"),
    "a word for a cap": (run(step, bucket_cap_mb="big"), f"bucket_cap_mb='big'.\n{CAPS}"),
    "a boolean for a cap": (run(step, bucket_cap_mb=True), f"bucket_cap_mb=True.\n{CAPS}"),
    "compile": (
        run(step, compile="max-autotune"),
        "compile='max-autotune' is neither True nor False nor a dict of options.\n"
        'Remedy: pass compile=True, or settings of torch._inductor.config: compile={"mode": "max-autotune"}.',
    ),
    "an unknown mode": (
        run(step, compile={"mode": "fast"}),
        "compile has no mode 'fast'.\n"
        "Remedy: the modes are 'default', 'lite', 'reduce-overhead', 'max-autotune-no-cudagraphs', 'max-autotune'.",
    ),
    "an unknown option": (
        run(step, compile={"max_autotun": True}),
        "compile has no option 'max_autotun'.\n"
        "  near to it: max_autotune, max_autotune_gemm, max_autotune_pointwise\n"
        "Remedy: torch._inductor.list_options() lists them.",
    ),
    "an option of another type": (
        run(step, compile={"max_autotune": "yes"}),
        "compile={'max_autotune': 'yes'}: str, where inductor takes bool.\nRemedy: its value now is False.",
    ),
    "an option that moves messages": (
        run(step, compile={"reorder_for_peak_memory": True}),
        "compile={'reorder_for_peak_memory': True} would let the compiler undo the plan.\n"
        "  fdp keeps reorder_for_peak_memory=False: starts and waits stay where the plan puts them\n"
        "Remedy: leave it out; bucket_cap_mb decides what shares a message.",
    ),
    "an option that is not for steps": (
        run(step, compile={"freezing": True}),
        "compile={'freezing': True} is not for a training step: it turns parameters into constants, and a step changes "
        "them.\n"
        "Remedy: leave it out.",
    ),
    "another backend": (
        lambda: fdp.data_parallel(torch.compile(step, backend="aot_eager")),
        "data_parallel was given step 'step' as compiled by a backend other than inductor, and lowers whole steps with "
        "inductor alone.\n"
        "Remedy: decorate the plain function with fdp.data_parallel(compile=True).",
    ),
    "no function": (
        lambda: fdp.data_parallel(3),
        "data_parallel was given int, not a function.\n"
        "Remedy: decorate a function: @fdp.data_parallel or @fdp.data_parallel(donate_argnums=0).",
    ),
    "a module": (
        lambda: fdp.data_parallel(model),
        "data_parallel was given the module Sequential; it transforms training steps.\n"
        "Remedy: apply, params, buffers = fdp.from_module(module), and decorate a step that calls apply.",
    ),
    "no group": (
        run(step, group="gloo"),
        "group is str, not a process group.\n"
        "Remedy: pass a torch.distributed.ProcessGroup, a one-dimensional DeviceMesh, or None.",
    ),
    "a plan for more ranks": (
        lambda: fdp.data_parallel(step, group=fake_group(3)).plan({"w": X}, {"x": X[None]}).emit(),
        "the plan of step 'step' is for 3 ranks, the group has 1.\n"
        "Remedy: trace the step with the group that it is to run on.",
    ),
    "arguments of another shape": (
        lambda: fdp.data_parallel(step).plan({"w": X}, {"x": X[None]}).emit()({"w": X[:1]}, {"x": X[None].double()}),
        "the plan of step 'step' is for other arguments.\n"
        "  state['w']: planned [2] torch.float32 cpu strides [1] offset 0, "
        "given [1] torch.float32 cpu strides [1] offset 0\n"
        "  batch['x']: planned [1, 2] torch.float32 cpu strides [2, 1] offset 0, "
        "given [1, 2] torch.float64 cpu strides [2, 1] offset 0\n"
        "Remedy: call the Step itself, which traces again, or pass arguments of the planned signature.",
    ),
    "arguments of another structure": (
        lambda: fdp.data_parallel(step).plan({"w": X}, {"x": X[None]}).emit()({"v": X}, {"x": X[None]}),
        "the plan of step 'step' is for arguments of another structure.\n"
        "  planned: PyTreeSpec(({'w': *}, {'x': *}))\n  given: PyTreeSpec(({'v': *}, {'x': *}))\n"
        "Remedy: call the Step itself, which traces again, or pass arguments of the planned structure.",
    ),
    "a collective of a boolean": (
        lambda: fdp.pmean({"a": [1.0, True]}),
        f"fdp.pmean was given bool at ['a'][1].\n{CONVERT}",
    ),
    "a collective of a string": (lambda: fdp.psum("x"), f"fdp.psum was given str at its argument.\n{CONVERT}"),
    "a collective of an array": (
        lambda: fdp.all_gather([np.ones(2)]),
        f"fdp.all_gather was given ndarray at [0].\n{CONVERT}",
    ),
    "a collective of a sparse tensor": (
        lambda: fdp.pmax({"s": torch.eye(2).to_sparse()}),
        "fdp.pmax was given a sparse tensor (torch.sparse_coo) at ['s'].\n"
        "Remedy: pass a dense tensor, for instance x.to_dense().",
    ),
    "the sum of booleans": (
        lambda: fdp.psum({"b": X > 0}),
        f"psum(['b']): a sum over ranks is not defined for torch.bool.\n{TYPE}",
    ),
    "the maximum of complex numbers": (
        lambda: fdp.pmax(X + 0j),
        f"pmax: a max over ranks is not defined for torch.complex64.\n{TYPE}",
    ),
    "the minimum of complex numbers": (
        lambda: fdp.pmin(X + 0j),
        f"pmin: a min over ranks is not defined for torch.complex64.\n{TYPE}",
    ),
    "a weight of many elements": (
        lambda: fdp.pmean(X, weight=X),
        f"fdp.pmean was given a weight of shape (2,) and torch.float32.\n{SCALAR}",
    ),
    "a complex weight": (
        lambda: fdp.pmean(X, weight=torch.tensor(1j)),
        f"fdp.pmean was given a weight of shape () and torch.complex64.\n{SCALAR}",
    ),
    "no such root": (
        lambda: fdp.broadcast(X, root=1),
        "fdp.broadcast was given root=1 in a world of 1.\nRemedy: pass a rank from 0 to 0.",
    ),
    "half a root": (
        lambda: fdp.broadcast(X, root=0.5),
        "fdp.broadcast was given root=0.5 in a world of 1.\nRemedy: pass a rank from 0 to 0.",
    ),
    "a word for an argument of a loss": (
        lambda: fdp.grad(loss, argnums="p")(X),
        "argnums='p'.\n"
        "Remedy: pass the position of the argument to differentiate with respect to, or a tuple of positions.",
    ),
    "a string for each rank": (
        lambda: fdp.per_rank("x"),
        "fdp.per_rank was given str.\nRemedy: pass tensors, or convert them first.",
    ),
    "the gradient of no function": (
        lambda: fdp.value_and_grad(3),
        "fdp.value_and_grad was given int, not a function.\nRemedy: pass the loss as a function of the parameters.",
    ),
    "the gradient by integers": (
        lambda: fdp.grad(loss)({"n": torch.ones(2, dtype=torch.int64), "k": 3}),
        "the argument of 'loss' that value_and_grad was to differentiate has no floating-point leaf.\n"
        "Remedy: pass argnums of the parameters; integer tensors and Python numbers get no gradient.",
    ),
    "the gradient of a vector": (
        lambda: fdp.grad(vector)(X),
        "'vector' was differentiated and returned a torch.float32 tensor of shape (2,); the gradient of a 0-dim "
        f"floating-point tensor is defined.\n{REDUCE}",
    ),
    "the gradient of a number": (
        lambda: fdp.grad(number)(X),
        "'number' was differentiated and returned float; the gradient of a 0-dim floating-point tensor is "
        f"defined.\n{REDUCE}",
    ),
    "no auxiliary output": (
        lambda: fdp.grad(loss, has_aux=True)(X),
        "'loss' was differentiated with has_aux=True and returned Tensor.\nRemedy: return (loss, aux).",
    ),
    "no such argument of a loss": (
        lambda: fdp.grad(loss, argnums=1)(X),
        "argnums=1, but 'loss' was called with 1 positional arguments.\n"
        "Remedy: pass what is to be differentiated by position.",
    ),
    "a sparse gradient": (
        lambda: fdp.grad(table)({"w": torch.ones(3, 2)}),
        "the gradient of p['w'] is sparse (torch.sparse_coo), and buckets are dense.\n"
        "Remedy: make it dense; for an embedding, pass sparse=False.",
    ),
    "from_module of no module": (
        lambda: fdp.from_module(3),
        "from_module takes an nn.Module, not a int.\nRemedy: pass an instance, as in from_module(Model()).",
    ),
}


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_misuse_of_an_argument(name: str) -> None:
    call, text = ARGUMENTS[name]
    check(fdp.ArgumentError, call, text)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_the_mean_of_integers(dtype: torch.dtype) -> None:
    kind, text = raised(lambda: fdp.pmean({"n": torch.ones(2, dtype=dtype)}))
    assert kind is fdp.ArgumentError
    assert text.splitlines()[0] == f"pmean(['n']): the mean of {dtype} over ranks is not an integer."
    assert text.splitlines()[-1].startswith("Remedy: ")


@pytest.mark.parametrize(("weight", "kind"), [("x", "str"), ([1.0], "list"), ({}, "dict")])
def test_a_weight_that_is_no_number(weight: Any, kind: str) -> None:
    check(
        fdp.ArgumentError,
        lambda: fdp.pmean(X, weight=weight),
        f"fdp.pmean was given a weight of type {kind}.\n{SCALAR}",
    )


INSIDE: dict[str, tuple[Callable[[Tree], Any], str]] = {
    "a boolean": (
        lambda state: fdp.psum({"a": True}),
        f"fdp.psum was given bool at ['a'].\n  in step 'train', LINE in <lambda>\n{CONVERT}",
    ),
    "no such root": (
        lambda state: fdp.broadcast(state["w"], root=7),
        "fdp.broadcast was given root=7 in a world of 1.\n  in step 'train', LINE in <lambda>\n"
        "Remedy: pass a rank from 0 to 0.",
    ),
    "the gradient of a vector": (
        lambda state: fdp.grad(vector)(state["w"]),
        "'vector' was differentiated and returned a torch.float32 tensor of shape (2,); the gradient of a 0-dim "
        f"floating-point tensor is defined.\n  in step 'train', LINE in <lambda>\n{REDUCE}",
    ),
}


@pytest.mark.parametrize("name", list(INSIDE))
def test_misuse_inside_of_a_step_names_the_step(name: str) -> None:
    misuse, text = INSIDE[name]

    def train(state: Tree, batch: Tree) -> Tree:
        return misuse(state)

    check(fdp.ArgumentError, run(train), text)


# --- other refusals ----------------------------------------------------------------------------------


def test_the_derivative_of_a_maximum() -> None:
    remedy = "Remedy: detach its argument, or write the maximum over fdp.all_gather(...)."
    for collective, name in ((fdp.pmax, "pmax"), (fdp.pmin, "pmin")):
        what = "was differentiated, and has no derivative here."

        def loss_fn(p: Tree, collective: Any = collective) -> torch.Tensor:
            return collective({"w": p})["w"].sum()

        def train(state: Tree, batch: Tree, loss_fn: Any = loss_fn) -> Tree:
            return fdp.grad(loss_fn)(state["w"])

        check(fdp.FdpError, lambda f=loss_fn: fdp.grad(f)(X), f"{name}(['w']) {what}\n{remedy}")
        check(fdp.FdpError, run(train), f"{name}(['w']) {what}\n  in step 'train', LINE in train\n{remedy}")


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
def test_a_step_under_a_transform(transform: Callable[..., Any], warm: bool) -> None:
    train = fdp.data_parallel(lambda state, batch: (state * 2).sum() + 0 * fdp.pmean(batch.sum()))
    if warm:
        train(torch.ones(2), torch.ones(1))
    text = """
step '<lambda>' was called inside torch.func.grad, vmap or another transform, which cannot see into it.
Remedy: differentiate inside the step; or transform the function that it was made from: step.__wrapped__."""
    state = torch.ones(3, 2) if transform is torch.func.vmap else torch.ones(2)
    check(fdp.FdpError, lambda: transform(lambda w: train(w, torch.ones(1)))(state), text)
    found = transform(lambda w: train.__wrapped__(w, torch.ones(1)))(state)
    assert found.shape == ((3,) if transform is torch.func.vmap else (2,))


def test_donated_leaves_that_somebody_else_needs() -> None:
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


def test_a_closed_over_sparse_tensor() -> None:
    """It lies nowhere in particular."""
    links = torch.eye(2).to_sparse()
    step = fdp.data_parallel(lambda state, batch: torch.sparse.mm(links, state), donate_argnums=0)
    for _ in range(2):
        assert step(torch.ones(2, 2), X).tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("name", ["replicate", "assert_replicated"])
def test_what_belongs_outside_of_a_step(name: str) -> None:
    kind, text = raised(run(lambda state, batch: getattr(fdp, name)(state)))
    assert kind is fdp.FdpError
    assert text.splitlines()[0].startswith(f"fdp.{name} was called inside ")
    assert text.splitlines()[-1] == (
        "Remedy: call it outside; inside a step use fdp.broadcast, or return the value and compare it outside."
    )


def test_the_graph_of_a_trace_is_not_for_running() -> None:
    trace = fdp.data_parallel(step).trace({"w": X}, {"x": X[None]})
    text = """
a collective of a traced step was run by itself.
Remedy: run what Plan.emit() returns, not the graph of the trace."""
    check(fdp.FdpError, lambda: trace.graph(X, X[None]), text)


def test_errors_have_one_root_and_argument_errors_are_value_errors() -> None:
    names = ["ArgumentError", "ReplicationError", "PurityError", "TraceError", "AgreementError", "PeerError"]
    for name in names:
        assert issubclass(getattr(fdp, name), fdp.FdpError)
    assert issubclass(fdp.ArgumentError, ValueError)
    assert not issubclass(fdp.TraceError, ValueError)


def test_a_message_is_laid_out_in_lines() -> None:
    text = build_message("step 'f' fails.", ["a: one\ntwo", "b"], remedy="mend it.")
    assert text.splitlines() == ["step 'f' fails.", "  a: one", "    two", "  b", "Remedy: mend it."]
    assert build_message("what") == "what"


def test_nothing_was_sent_or_changed_by_a_refusal() -> None:
    """After any refusal fdp works outside of the step, and in the next one."""
    for refused in (run(branch), run(identity, {"w": np.ones(2)}), run(lambda s, b: b["x"])):
        with pytest.raises(fdp.FdpError):
            refused()
        assert fdp.psum(torch.ones(1)).tolist() == [1.0]
        assert not torch.compiler.is_compiling()
        assert run(step)()["w"].tolist() == [5.0, 5.0]
