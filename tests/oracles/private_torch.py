"""Which private parts of torch a file uses, as far as its names tell: imports, attributes, and names in strings."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Collection, Iterator

PUBLIC = {"torch._check"}  # documented, for all its name


def is_private_name(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


@functools.cache
def private_paths(tree: ast.Module) -> frozenset[str]:
    """Dotted names of private parts of torch that a file imports or reads, also under names that it gives to modules.

    Operators, which lie below `torch.ops`, are none: a graph has their names.
    """
    names = _names(tree)
    found = {
        f"{node.module}.{alias.name}"
        for node in _nodes(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch"
        for alias in node.names
    }
    found.update(
        alias.name
        for node in _nodes(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] == "torch"
    )
    read = [(node, _path(node, names)) for node in _nodes(tree) if isinstance(node, ast.Attribute)]
    found.update(name for _, name in read if name)
    paired = list(_paired(tree, names))
    found.update(name for name, _ in paired)
    inner = {_path(owner, names) for owner in [*(node.value for node, name in read if name), *(o for _, o in paired)]}
    return frozenset(name for name in found - inner - PUBLIC if _is_private(name) and not name.startswith("torch.ops."))


def private_attributes(tree: ast.Module, own: Collection[str], known: Collection[str]) -> set[str]:
    """Private names of attributes that a file reads of objects, or looks up by a string: of what has no path of torch.

    Args:
        tree: the file.
        own: attributes of fdp's own classes.
        known: names that are private to torch. Those count on whatever they are read of, but `self`, and in strings.
    """
    names = _names(tree)
    found = set()
    for node in _nodes(tree):
        if isinstance(node, ast.Attribute) and is_private_name(node.attr):
            if not _is_of_self(node) and not _path(node, names):
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and node.value in known:
            found.add(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1]
            if node.func.id.endswith("attr") and isinstance(name, ast.Constant) and is_private_name(str(name.value)):
                found.add(str(name.value))
    return {name for name in found if name in known or name not in own}


def part_of(path: str) -> str:
    """What is to be used in one file: a private module, or an attribute; of `torch._C` each single one."""
    steps = path.split(".")
    first = next(at for at, step in enumerate(steps) if is_private_name(step) or step == "experimental")
    if steps[first] == "experimental":
        return ".".join(steps[: first + 2])
    if steps[first] != "_C":
        return steps[first]
    return steps[-1] if is_private_name(steps[-1]) else path


def members(tree: ast.Module) -> Iterator[str]:
    """Attributes and methods of the classes that a file defines."""
    for node in _nodes(tree):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield each.name
                targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
                yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_of_self(node):
            yield node.attr


@functools.cache
def _nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def _is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


@functools.cache
def _names(tree: ast.Module) -> dict[str, str]:
    """What of torch the names of a file stand for."""
    names: dict[str, str] = {}
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in _nodes(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target: ast.expr = node.targets[0]
        elif isinstance(node, ast.AnnAssign) and node.value:
            target = node.target
        else:
            continue
        path = _path(node.value, names)
        if isinstance(target, ast.Name) and path:
            names[target.id] = path
    return names


def _path(node: ast.AST | None, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (base := _path(node.value, names)):
        return f"{base}.{node.attr}"
    return None


def _paired(tree: ast.Module, names: dict[str, str]) -> Iterator[tuple[str, ast.expr]]:
    """Parts that are named by an object and a string behind it, as in `getattr(torch._C, "_f")`, and that object."""
    for node in _nodes(tree):
        row = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else []
        for owner, name in itertools.pairwise(row):
            path = _path(owner, names)
            if path and isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.isidentifier():
                yield f"{path}.{name.value}", owner


def _is_private(path: str) -> bool:
    return any(is_private_name(step) or step == "experimental" for step in path.split("."))
