"""Tracebacks of the user's errors show the user's code, and not what lies between its lines."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fdp
from fdp.pytorch import dynamo
from fdp.step import first_call

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="a bare `raise` of Python 3.10 shows all frames")

HERE = str(pathlib.Path(__file__))
PACKAGE = str(pathlib.Path(fdp.__file__).parent) + os.sep
TRACER, DYNAMO = (str(pathlib.Path(torch.__file__).parent / name) + os.sep for name in ("fx", "_dynamo"))
HIDDEN = (PACKAGE, TRACER, DYNAMO)
W, X = torch.ones(2, 2), torch.ones(3, 2)


def helper(w: torch.Tensor) -> torch.Tensor:
    raise ValueError("mine")


def raises(w: torch.Tensor, x: torch.Tensor) -> Any:
    return helper(w)


def raises_in_a_gradient(w: torch.Tensor, x: torch.Tensor) -> Any:
    return fdp.grad(lambda w: helper(w).sum())(w)


def misuses_torch(w: torch.Tensor, x: torch.Tensor) -> Any:
    return torch.nn.functional.linear(x, w[0, :1].expand(5, 7))


def branches(w: torch.Tensor, x: torch.Tensor) -> Any:
    return w if x.sum() > 0 else -w


def in_init(name: str) -> str:
    init = pathlib.Path(PACKAGE, name, "__init__.py")
    return init.read_text() if init.exists() else ""


def frames(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def caught(step: Callable[..., Any], *args: Any) -> BaseException:
    try:
        step(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def between(error: BaseException) -> set[str]:
    """The files of the frames between the first and the last that are this file's."""
    found = frames(error)
    mine = [at for at, file in enumerate(found) if file == HERE]
    return set(found[mine[0] : mine[-1] + 1]) if mine else set()


def reshapes(w: torch.Tensor, x: torch.Tensor) -> Any:
    return w.reshape(7)


def test_a_call_that_does_not_fit_shows_the_call_alone() -> None:
    step = fdp.data_parallel(raises)
    for call in (step, step.trace, step.plan, lambda w: step(x=w), lambda w: fdp.scaling(w)):
        error = caught(call, W)
        assert isinstance(error, TypeError) and set(frames(error)) == {HERE}, frames(error)


def test_checks_of_torch_are_not_shown() -> None:
    assert set(frames(caught(fdp.data_parallel(reshapes), W, X))) == {HERE}


@pytest.mark.parametrize("method", ["trace", "plan", "profile"])
@pytest.mark.parametrize("step", [raises, raises_in_a_gradient])
def test_nothing_lies_between_the_users_frames(step: Callable[..., Any], method: str) -> None:
    error = caught(getattr(fdp.data_parallel(step), method), W, X)
    assert between(error) == {HERE} and frames(error).count(HERE) >= 3


@pytest.mark.parametrize("step", [raises, raises_in_a_gradient, misuses_torch, branches])
def test_a_call_shows_no_frame_of_fdp_or_of_the_tracer(step: Callable[..., Any]) -> None:
    error: BaseException | None = caught(fdp.data_parallel(step), W, X)
    assert frames(error)[0] == HERE
    if step is not branches:  # which is refused by fdp, and names the line in its message
        assert frames(error).count(HERE) >= 2, "the step itself is shown"
    while error is not None:
        assert [file for file in frames(error) if file.startswith(HIDDEN) or file == "<string>"] == []
        error = error.__cause__ or error.__context__


def test_an_environment_variable_shows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDP_TRACEBACK_FILTERING", "off")
    found = frames(caught(fdp.data_parallel(raises), W, X))
    assert any(file.startswith(PACKAGE) for file in found) and any(file.startswith(TRACER) for file in found)


@pytest.mark.parametrize("mistake", [None, lambda flat: json.loads("{")], ids=["in fdp", "in the standard library"])
def test_a_mistake_of_fdp_shows_where_it_was_made(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake is not None:
        # As if it stood in fdp.
        mistake = type(mistake)(mistake.__code__.replace(co_filename=first_call.__file__), mistake.__globals__)
    monkeypatch.setattr(first_call, "summarise", mistake)
    found = frames(caught(fdp.data_parallel(lambda w, x: w + fdp.pmean(x.sum())), W, X))
    assert first_call.__file__ in found


@pytest.mark.parametrize("beside", [PACKAGE, TRACER])
def test_a_folder_whose_name_begins_alike_is_the_users(beside: str) -> None:
    mine: dict[str, Any] = {}
    file = beside.rstrip(os.sep) + "_experiments" + os.sep + "mine.py"
    exec(compile("def helper(w):\n    raise ValueError('mine')\n", file, "exec"), mine)
    assert file in frames(caught(fdp.data_parallel(lambda w, x: mine["helper"](w)), W, X))


def test_the_lines_of_a_program_that_has_no_file_are_shown() -> None:
    program = "import torch, fdp\ndef step(w):\n    raise ValueError('mine')\nfdp.data_parallel(step)(torch.ones(2))\n"
    # As `python -c` does it.
    error = caught(exec, compile(program, "<string>", "exec"), {"__name__": "__main__"})
    shown = "".join(traceback.format_exception(error))
    assert 'File "<string>", line 3, in step' in shown and 'File "<string>", line 4, in <module>' in shown
    assert PACKAGE not in shown


def loss_that_fails(w: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
    return helper(w)


class Fails(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(x)


PLAN = fdp.data_parallel(lambda w, x: w + fdp.pmean(x.sum())).plan(W, X)


def apply_of(module: torch.nn.Module, x: torch.Tensor) -> Any:
    apply, params, buffers = fdp.from_module(module)
    return lambda: apply(params, buffers, x)


# Entries that run the user's function outside of a step, and some that refuse what they are given.
ENTRIES: dict[str, Callable[[], Any]] = {
    "grad": lambda: fdp.grad(loss_that_fails)(W),
    "value_and_grad": lambda: fdp.value_and_grad(loss_that_fails)(W),
    "accumulate": lambda: fdp.accumulate(loss_that_fails, 3)(W, X),
    "from_module": apply_of(Fails(), X),
    "a layer of torch": apply_of(torch.nn.Linear(2, 2), torch.ones(3, 5)),
    "schedule_from_torch": lambda: fdp.optim.schedule_from_torch(loss_that_fails, 0.1, 3),
    "data_parallel": lambda: fdp.data_parallel(lambda w: w, bucket_cap_mb=-1),
    "scaling": lambda: fdp.scaling(PLAN, network=fdp.Network(1e-5, 1e9), world_sizes=[0]),
    "timeline": lambda: PLAN.timeline(),
    "emitted": lambda: PLAN.emit()(W),
    "psum": lambda: fdp.psum("text"),
    "load": lambda: fdp.load("no such folder", {}),
    "random": lambda: fdp.random.normal(3, (2,)),
    "shard": lambda: fdp.shard(W, "text"),
    "from_torch": lambda: fdp.optim.from_torch(torch.optim.LBFGS),
    "update": lambda: fdp.optim.from_torch(torch.optim.SGD, lr=0.1).update(W, {}, W),
    "BatchSampler": lambda: fdp.BatchSampler(-1, 2),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_hides_its_frames(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = frames(caught(ENTRIES[entry]))
    assert [file for file in found if file.startswith(HIDDEN)] == []
    assert found[:2] == [HERE, HERE], "where it was called"
    monkeypatch.setenv("FDP_TRACEBACK_FILTERING", "off")
    assert any(file.startswith(PACKAGE) for file in frames(caught(ENTRIES[entry])))


def test_a_torch_without_the_part_that_hides_its_own_frame_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_eval_frame", None)
    found = frames(caught(dynamo.breaks_graph("why")(helper), W))
    assert [file.startswith(DYNAMO) for file in found] == [False, True, False] and found[0] == found[2] == HERE


def test_dynamo_compiles_nothing_of_what_breaks_its_graph() -> None:
    graphs: list[Any] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    double = dynamo.breaks_graph("why")(lambda x: x * 2)
    assert torch.compile(lambda x: double(x + 1) + 1, backend=compiler)(W).equal(W * 5)
    assert len(graphs) == 2
    # Not by the number of frames: what Python calls meanwhile, such as finalizers, may be among them.
    seen = [reference() for reference in torch._dynamo.convert_frame.input_codes.seen]
    assert [code.co_name for code in seen if code is not None and code.co_filename == dynamo.__file__] == []


def test_a_function_that_hides_frames_is_of_its_own_module() -> None:
    # Otherwise its doctests would not be found, and it could not be pickled.
    for function in (fdp.psum, fdp.scaling, fdp.optim.from_torch, fdp.random.normal):
        assert function.__globals__ is vars(sys.modules[function.__module__])
        assert pickle.loads(pickle.dumps(function)) is function


def test_dir_lists_what_is_public() -> None:
    assert set(dir(fdp)) == {*fdp.__all__, "__doc__", "__version__"}


@pytest.mark.parametrize("name", sorted(name for name in os.listdir(PACKAGE) if "__all__" in in_init(name)))
def test_dir_of_a_module_lists_what_is_public(name: str) -> None:
    module = importlib.import_module(f"fdp.{name}")
    assert set(dir(module)) == {*module.__all__, "__doc__"}
