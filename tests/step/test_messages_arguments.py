"""The text of refusals: arguments that a public function does not take."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fake_ranks import fake_group, fake_mesh
from refusal_texts import check, raised, run
from torch import nn

import fdp
from fdp.errors import CallError

Tree = Any

model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))


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
        "group is str, not a process group.\nRemedy: pass a torch.distributed.ProcessGroup, a DeviceMesh, or None.",
    ),
    "a plan for more ranks": (
        lambda: fdp.data_parallel(step, group=fake_group(3)).plan({"w": X}, {"x": X[None]}).emit(),
        "the plan of step 'step' is for 3 ranks, the group has 1.\n"
        "Remedy: trace the step with the group that it is to run on.",
    ),
    "a plan for a mesh": (
        lambda: fdp.data_parallel(step, group=fake_mesh(2, 2)).plan({"w": X}, {"x": X[None]}).emit(fake_group(4)),
        "the plan of step 'step' is for hosts=2, local=2, and the group is ranks without a mesh.\n"
        "Remedy: trace the step with the group that it is to run on.",
    ),
    "a plan of a mesh for more ranks": (
        lambda: (
            fdp.data_parallel(step, group=fake_mesh(2, 2))
            .trace({"w": X}, {"x": X[None]})
            .plan(network=fdp.Network(latency_s=1e-5, bandwidth_bytes_per_s=1e9), world_size=8)
        ),
        "step 'step' is on a mesh of hosts=2, local=2: its trace for 4 ranks says nothing of 8.\n"
        "Remedy: trace it with a mesh of that many ranks.",
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


CALLS = {
    "an argument too few": (
        lambda: fdp.data_parallel(step)(X),
        "step 'step' does not take these arguments: step() missing 1 required positional argument: 'batch'.\n"
        "Remedy: call step(state: Tree, batch: Tree) -> Tree.",
    ),
    "an argument too few, by name": (
        lambda: fdp.data_parallel(step)(batch=X),
        "step 'step' does not take these arguments: missing a required argument: 'state'.\n"
        "Remedy: call step(state: Tree, batch: Tree) -> Tree.",
    ),
    "an argument too many for a builtin": (
        lambda: fdp.data_parallel(abs)(X, X),
        "step 'abs' does not take these arguments: abs() takes exactly one argument (2 given).\n"
        "Remedy: call abs(x, /).",
    ),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_a_call_that_does_not_fit_the_function(name: str) -> None:
    call, text = CALLS[name]
    check(CallError, call, text)


@pytest.mark.parametrize("kind", [TypeError, fdp.ArgumentError])
def test_such_a_call_is_caught_as_python_says_it_and_as_fdp_does(kind: type[Exception]) -> None:
    with pytest.raises(kind):
        fdp.data_parallel(step)(X)


def adds_too_much(state: Tree, batch: Tree) -> Tree:
    return step(state, batch, batch)


def test_a_call_within_the_step_is_an_error_of_its_own() -> None:
    with pytest.raises(TypeError, match=r"step\(\) takes 2 positional arguments but 3 were given") as caught:
        fdp.data_parallel(adds_too_much)(X, X)
    assert not isinstance(caught.value, fdp.FdpError)


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


def test_the_mean_of_counters_names_all_of_them_and_the_line() -> None:
    """In one screen: the way through the tracer is not part of it."""
    apply, params, buffers = fdp.from_module(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))

    def train(params: Tree, buffers: Tree, x: torch.Tensor) -> Tree:
        out, new = apply(params, buffers, x)
        return fdp.pmean(out.sum()), fdp.pmean(new)

    with pytest.raises(fdp.ArgumentError) as caught:
        fdp.data_parallel(train)(params, buffers, torch.randn(4, 3))
    text = str(caught.value)
    assert "0.num_batches_tracked" in text and "1.num_batches_tracked" in text
    assert re.search(r"in step 'train', test_messages_arguments.py:\d+ in train", text)
    assert "fdp.pmax" in text.splitlines()[-1]
    frames = caught.traceback
    assert not any("proxy_tensor" in str(frame.path) for frame in frames)
    assert frames[-1].name == "train"
