"""The private parts of torch that fdp relies on: all are listed, and what depends on a missing one is refused."""

from __future__ import annotations

import ast
import contextlib
import os
import pathlib
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import fdp
from fdp.pytorch import dynamo, parts, recomputation
from fdp.trace.capture import capture as capture_module

ROOT = pathlib.Path(fdp.__file__).parent
LISTED = {path for table in (parts.NEEDED, parts.KNOWN_OTHERWISE) for paths in table.values() for path in paths}
PUBLIC = {"torch._check"}  # documented, for all its name


def is_private(path: str) -> bool:
    return any(
        (part.startswith("_") and not part.startswith("__")) or part == "experimental" for part in path.split(".")
    )


def used(tree: ast.Module) -> set[str]:
    """Dotted names of private parts of torch that a file imports or reads."""
    names: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
            found.update(f"{node.module}.{alias.name}" for alias in node.names)

    def path(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute) and (base := path(node.value)):
            return f"{base}.{node.attr}"
        return None

    read = [(node, path(node)) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    found.update(name for _, name in read if name)
    inner = {path(node.value) for node, name in read if name}
    return {name for name in found - inner - PUBLIC if is_private(name) and not name.startswith("torch.ops.")}


def is_listed(name: str) -> bool:
    """Whether the table has a name, or one that leads to it: what it has is private up to its last part."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in LISTED for end in range(2, len(parts) + 1)) or any(
        path.startswith(f"{name}.") for path in LISTED
    )


def private_attributes(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            chain = ast.unparse(node.value)
            if not chain.startswith(("self", "cls", "torch.ops", "_aten", "aten")):
                yield node.attr


TREES = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def test_all_private_parts_that_are_used_are_listed() -> None:
    unlisted = {
        str(path.relative_to(ROOT)): {n for n in used(tree) if not is_listed(n)} for path, tree in TREES.items()
    }
    assert not {path: names for path, names in unlisted.items() if names}


def test_private_attributes_of_objects_are_listed_or_of_fdp() -> None:
    own: set[str] = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                own.add(node.attr)
    of_listed = {part for path in LISTED for part in path.split(".")}
    operators = {"_getframe", "_current_frames", "_Unpickler", "_exit"}  # of sys, pickle and os
    found = {name for tree in TREES.values() for name in private_attributes(tree)}
    unlisted = {name for name in found - own - of_listed - operators if not hasattr(torch.ops.aten, name)}
    assert not unlisted


def test_what_is_listed_is_used() -> None:
    text = "\n".join(path.read_text() for path in TREES if path != ROOT / "pytorch" / "parts.py")
    assert not {path for path in LISTED if path.rpartition(".")[2] not in text}


def test_this_torch_has_all_that_is_needed() -> None:
    assert {what: parts.missing(what) for what in parts.NEEDED} == dict.fromkeys(parts.NEEDED, ())


def test_what_the_package_needs_is_looked_for_before_anything_else_is_imported() -> None:
    imports = [n for n in TREES[ROOT / "__init__.py"].body if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert ast.unparse(imports[0]) == "import fdp.pytorch.parts"
    assert ast.unparse(TREES[ROOT / "pytorch" / "parts.py"].body[-1]) == "require('importing fdp')"


@pytest.fixture
def _forgotten() -> Iterator[None]:
    """What was looked at once is looked at again, in the test and after it."""
    asked = (parts.require, parts.warn_if_untested, recomputation.why_not, dynamo._is_asked)
    for each in asked:
        each.cache_clear()
    yield
    for each in asked:
        each.cache_clear()


def double(state: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return state * 2 + fdp.pmean(batch)


def call(step: Any = double, **options: Any) -> Any:
    return fdp.data_parallel(step, **options)(torch.ones(2), torch.ones(2))


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize("what", parts.NEEDED)
def test_a_part_that_is_gone_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "NEEDED", {what: (*parts.NEEDED[what], "torch._C._gone.away")})
    with pytest.raises(fdp.FdpError, match="not one that fdp knows") as caught:
        parts.require(what)
    assert "torch._C._gone.away does not exist" in str(caught.value)
    assert "Remedy: install a torch from 2." in str(caught.value)


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
        (capture_module, "teach", lambda mode: lambda: False, "not made by FakeTensorMode.dispatch"),
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
