"""What depends on a private part of torch that is gone, or that torch no longer calls, is refused."""

from __future__ import annotations

import ast
import contextlib
import os
import pathlib
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from missing_parts import take_away

import fdp
from fdp.distributed.group import resolve_group
from fdp.nn.batch_norm import synchronised_forward
from fdp.pytorch import dynamo, group_names, parts, recomputation, registries
from fdp.trace.capture import capture as capture_module

ROOT = pathlib.Path(fdp.__file__).parent


def test_this_torch_has_all_that_is_needed() -> None:
    assert {what: parts.missing(what) for what in parts.NEEDED} == dict.fromkeys(parts.NEEDED, ())


def test_what_the_package_needs_is_looked_for_before_anything_else_is_imported() -> None:
    package, table = (ast.parse((ROOT / file).read_text()) for file in ("__init__.py", "pytorch/parts.py"))
    imports = [n for n in package.body if isinstance(n, (ast.Import, ast.ImportFrom)) and "fdp" in ast.unparse(n)]
    assert ast.unparse(imports[0]) == "import fdp.pytorch.parts"
    assert ast.unparse(table.body[-1]) == "require('importing fdp')"


@pytest.fixture
def _forgotten() -> Iterator[None]:
    """What was looked at once is looked at again, in the test and after it."""
    asked = (
        parts.require, parts.warn_if_untested, recomputation.why_not, dynamo._is_asked, group_names._ask_here_first,
    )  # fmt: skip
    for each in asked:
        each.cache_clear()
    yield
    for each in asked:
        each.cache_clear()


def double(state: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return state * 2 + fdp.pmean(batch)


def call(step: Any = double, **options: Any) -> Any:
    return fdp.data_parallel(step, **options)(torch.ones(2), torch.ones(2))


def checkpoint() -> None:
    reasons = recomputation.why_not()
    if reasons:
        raise parts.unsupported_torch("activation checkpointing", reasons)


LAYER, GROUP = torch.nn.SyncBatchNorm(2), torch.distributed.ProcessGroup(0, 1)
USES: dict[str, Callable[[], Any]] = {
    "importing fdp": lambda: parts.require("importing fdp"),
    "saving and loading": lambda: parts.require("saving and loading"),
    "tracing a step": lambda: fdp.data_parallel(double).trace(torch.ones(2), torch.ones(2)),
    "fdp.optim.from_torch": lambda: fdp.optim.from_torch(torch.optim.SGD, lr=0.1),
    "nn.SyncBatchNorm": lambda: synchronised_forward(LAYER, torch.ones(3, 2)),
    "activation checkpointing": checkpoint,
    "a process group": lambda: resolve_group(GROUP),
    "a process group of some ranks": lambda: group_names.named("beside").__enter__(),
    "compile=": lambda: fdp.data_parallel(double, compile=True),
}


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize(("what", "path"), [(what, path) for what in parts.NEEDED for path in parts.NEEDED[what]])
def test_what_depends_on_a_part_that_is_gone_is_refused(what: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        take_away(path, patch)
        with pytest.raises(fdp.FdpError, match="is not supported") as caught:
            USES[what]()
    message = str(caught.value)
    assert what in message and f"{path} does not exist" in message
    assert "Remedy: install a torch from 2." in message


@pytest.mark.usefixtures("_forgotten")
def test_a_torch_that_does_not_ask_for_names_of_groups_is_refused() -> None:
    with (
        pytest.raises(fdp.FdpError, match=r"new_group does not ask distributed_c10d\._process_group_name"),
        group_names.named("beside"),
    ):
        pass


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize("name", registries.REGISTRIES)
def test_a_module_without_one_of_its_registries_is_refused(name: str) -> None:
    module = torch.nn.Module()
    registries.refuse_other_registries(module)
    vars(module)[f"{name}_elsewhere"] = vars(module).pop(name)
    with pytest.raises(fdp.FdpError, match=f"has no {name}"):
        registries.refuse_other_registries(module)


def test_a_compiled_module_without_its_original_is_refused() -> None:
    with pytest.raises(fdp.FdpError, match="an OptimizedModule has no _orig_mod"):
        dynamo.uncompiled_module(torch.nn.Linear(2, 2))


@pytest.mark.usefixtures("_forgotten")
def test_a_backward_pass_without_numbers_of_its_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(state: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return state - fdp.grad(lambda w: (w * batch).sum())(state)

    current = torch._C._current_autograd_node
    monkeypatch.setattr(torch._C, "_current_autograd_node", lambda: current() and object())
    with pytest.raises(fdp.FdpError, match="a node of autograd has no _sequence_nr"):
        call(step)


@pytest.mark.usefixtures("_forgotten")
def test_nothing_is_traced_without_the_flag_that_libraries_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(torch.compiler, "_compile_session_context")
        with pytest.raises(fdp.FdpError, match="_compile_session_context does not exist"):
            call()
    parts.require.cache_clear()
    monkeypatch.setattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)
    with pytest.raises(fdp.FdpError, match="does not set torch"):
        call()


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize(
    ("module", "name", "put", "reason"),
    [
        (torch._dynamo, "run", lambda function: function, "do not ask eval_frame._callback_from_stance"),
        (capture_module, "add_fake_rules", lambda mode: lambda: False, "not made by FakeTensorMode.dispatch"),
        (capture_module, "source_lines", lambda tracer: contextlib.nullcontext(), "makes nodes in another way"),
    ],
    ids=["callback", "fake tensors", "tracer"],
)
def test_nothing_is_traced_where_what_fdp_puts_in_is_never_reached(
    module: Any, name: str, put: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, put)
    with pytest.raises(fdp.FdpError, match=reason):
        call()


def renamed(unused_stays: bool, kind: str) -> types.ModuleType:
    """torch.utils.checkpoint, of which a part that fdp replaces has another name."""
    file = torch.utils.checkpoint.__file__
    text = pathlib.Path(file).read_text()
    name = {
        "generator": next(
            n for n in (recomputation._GENERATOR, recomputation._FORMER_GENERATOR) if f"gen = {n}(" in text
        ),
        "function": "CheckpointFunction",
        "flag": "_is_compiling",
    }[kind]
    # A word of its own: the name without more behind it.
    text = text.replace(f"{name}(", f"_renamed_{name}(").replace(f"{name}.apply", f"_renamed_{name}.apply")
    module = types.ModuleType("torch.utils.checkpoint")
    module.__file__ = file
    if unused_stays:
        text += f"\n{name} = _renamed_{name}\n"
    exec(compile(text, file, "exec"), module.__dict__)
    return module


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize("unused_stays", [False, True], ids=["gone", "never reached"])
@pytest.mark.parametrize("kind", ["generator", "function", "flag"])
def test_checkpointing_is_refused_where_torch_does_it_in_another_way(
    kind: str, unused_stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = renamed(unused_stays, kind)
    monkeypatch.setattr(torch.utils, "checkpoint", module)
    monkeypatch.setitem(sys.modules, "torch.utils.checkpoint", module)
    assert recomputation.why_not()

    def checkpointed(state: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        def loss(w: torch.Tensor) -> torch.Tensor:
            return module.checkpoint(lambda w: (w * batch).sin().sum(), w, use_reentrant=kind == "function")

        return state - fdp.grad(loss)(state)

    with pytest.raises(fdp.FdpError, match="activation checkpointing relies on private parts"):
        call(checkpointed)
    # Whatever checkpoints nothing runs.
    assert torch.equal(call(), torch.full((2,), 3.0))


@pytest.mark.usefixtures("_forgotten")
def test_a_newer_torch_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "TESTED", ("2.11", "2.12"))
    with pytest.warns(UserWarning, match=r"fdp was tested with torch 2\.11 to 2\.12, and this is 2\."):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()


def test_versions_are_compared_as_numbers() -> None:
    assert parts.release("2.9.1") < parts.release("2.13.0+cpu") < parts.release("3.0.0.dev20270101")


def test_a_step_runs_without_numpy() -> None:
    """Torch does not depend on it any more."""
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch, fdp\n"
        "apply, params, _ = fdp.from_module(torch.nn.Linear(2, 1))\n"
        "rule = fdp.optim.from_torch(torch.optim.AdamW, lr=0.1)\n"
        "@fdp.data_parallel(donate_argnums=0)\n"
        "def step(state, batch):\n"
        "    loss, grads = fdp.value_and_grad(lambda p: apply(p, {}, batch)[0].square().mean())(state['p'])\n"
        "    p, opt = rule.update(grads, state['opt'], state['p'])\n"
        "    return {'p': p, 'opt': opt}, fdp.pmean(loss)\n"
        "state = {'p': params, 'opt': rule.init(params)}\n"
        "for _ in range(2):\n"
        "    state, loss = step(state, torch.ones(4, 2))\n"
        "print('ran', bool(torch.isfinite(loss)))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=250)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["ran", "True"]


def test_nothing_asks_a_tensor_for_its_array() -> None:
    """It knows fewer dtypes than torch, and may not be there."""
    calls = [
        f"{path.name}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "numpy"
    ]
    assert calls == []
