"""Private parts of torch: each is used in one file, and listed in fdp/pytorch/parts.py."""

from __future__ import annotations

import ast
import pathlib
import pkgutil
from collections.abc import Mapping

import pytest
import torch
from private_torch import is_private_name, members, part_of, private_attributes, private_paths

import fdp
from fdp.pytorch import parts

ROOT = pathlib.Path(fdp.__file__).parent
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
LISTED = {path for table in (parts.NEEDED, parts.KNOWN_OTHERWISE) for paths in table.values() for path in paths}
# Names of folders of torch count in paths alone: `tracebacks` knows them as folders.
FOLDERS = {module.name for module in pkgutil.iter_modules(torch.__path__)}
KNOWN = {step for path in LISTED for step in path.split(".") if is_private_name(step)} - FOLDERS
OWN = {name for tree in TREES.values() for name in members(tree)}
OF_OTHERS = {"_getframe", "_Unpickler", "_exit", "_replace"}  # of sys, pickle, os and named tuples


def users(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Private part of torch -> the files that use it."""
    found: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for part in {*map(part_of, private_paths(tree)), *private_attributes(tree, OWN, KNOWN)} - OF_OTHERS:
            found.setdefault(part, set()).add(file)
    return found


def is_listed(path: str) -> bool:
    """Whether the table has a name, or one that leads to it: what it has is private up to its last part."""
    steps = path.split(".")
    return any(".".join(steps[:end]) in LISTED for end in range(2, len(steps) + 1)) or any(
        each.startswith(f"{path}.") for each in LISTED
    )


def test_each_private_part_of_torch_is_used_in_one_file() -> None:
    # What torch does not promise may change with any release: then one file has to change, not five.
    assert {part: files for part, files in users(TREES).items() if len(files) > 1} == {}


def test_all_private_parts_that_are_used_are_listed() -> None:
    unlisted = {file: {path for path in private_paths(tree) if not is_listed(path)} for file, tree in TREES.items()}
    assert not {file: paths for file, paths in unlisted.items() if paths}
    unlisted = {file: private_attributes(tree, OWN, KNOWN) - KNOWN - OF_OTHERS for file, tree in TREES.items()}
    assert not {file: names for file, names in unlisted.items() if names}


def test_what_is_listed_is_used() -> None:
    text = "\n".join((ROOT / file).read_text() for file in TREES if file != "pytorch/parts.py")
    assert not {path for path in LISTED if path.rpartition(".")[2] not in text}


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("import torch\ntorch._C._dispatch_dump('x')", "_dispatch_dump"),
        ("import torch\ntorch._C._functorch.get_unwrapped(x)", "torch._C._functorch.get_unwrapped"),
        ("from torch import _C\n_C._functorch.get_unwrapped(x)", "torch._C._functorch.get_unwrapped"),
        ("import torch as t\nt.fx._y", "_y"),
        ("import torch\ninner = torch.utils.checkpoint\ninner._is_compiling()", "_is_compiling"),
        ("import torch._inductor.compile_fx", "_inductor"),
        ("def f():\n    from torch._inductor import config\n    config.patch()", "_inductor"),
        ("from torch.utils._pytree import tree_map", "_pytree"),
        ("from torch.fx.experimental.proxy_tensor import make_fx", "torch.fx.experimental.proxy_tensor"),
        ("import torch\nisinstance(x, torch._ops.OpOverload)", "_ops"),
        ("tensor._version", "_version"),
        ("x.untyped_storage()._cdata", "_cdata"),
        ("import torch\ntorch.Tensor._make_subclass(x)", "_make_subclass"),
        ("group._something", "_something"),
        ("import torch.distributed as dist\ndist.distributed_c10d._world.pg_map", "_world"),
        ("import torch\ngetattr(torch, '_neg_view')", "_neg_view"),
        ("import torch\nreplace = (torch._C, '_swap_tensor_impl', f)", "_swap_tensor_impl"),
        ("getattr(options, '_unheard_of', None)", "_unheard_of"),
        ("vars(module)['_parameters']", "_parameters"),
    ],
)
def test_a_private_part_is_seen_however_it_is_written(source: str, part: str) -> None:
    assert part in users({"a.py": ast.parse(source)})
    # And so is a second file that uses it.
    assert users({"a.py": ast.parse(source), "b.py": ast.parse(source)})[part] == {"a.py", "b.py"}


@pytest.mark.parametrize(
    "source",
    [
        "self._plan",
        "import torch\ntorch.ops.aten._to_copy.default",
        "import torch\n_aten = torch.ops.aten\n_aten._to_copy.default",
        "import torch\ntorch._check(x > 0)",
        "from torch.optim import SGD",
        "getattr(step, '__name__', '')",
        "names = ['_to_copy', '_']",
    ],
)
def test_what_is_not_private_to_torch_is_let_through(source: str) -> None:
    assert users({"a.py": ast.parse(source)}) == {}
