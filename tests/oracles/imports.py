"""What a file imports, by a statement or by a function, and when; and which files import each other in a ring."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

_BY_NAME = {"import_module", "__import__", "resolve_name"}


@dataclass(frozen=True)
class Import:
    """One name that a file imports.

    Attributes:
        name: dotted; `from a import b` imports `a.b`. None where the file computes the name.
        line: line number, from 1.
        deferred: whether nothing is imported when the file is: the line lies in a function, or is for type checkers.
    """

    name: str | None
    line: int
    deferred: bool


def imports_of(tree: ast.Module, package: str = "") -> list[Import]:
    """What a file imports, in functions and for type checkers as well.

    Args:
        tree: the file.
        package: the dotted name of its folder, which relative imports start from.
    """
    called = _BY_NAME | {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("importlib", "pkgutil")
        for alias in node.names
        if alias.asname and alias.name in _BY_NAME
    }
    return list(_imports(tree, package, called, deferred=False))


def _imports(node: ast.AST, package: str, called: Collection[str], deferred: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, deferred) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute("." * node.level + (node.module or ""), package)
        yield from (Import(f"{base}.{alias.name}", node.lineno, deferred) for alias in node.names)
    elif isinstance(node, ast.Call) and _last_name(node.func) in called:
        yield Import(_named(node, package), node.lineno, deferred)
    elif isinstance(node, (ast.Call, ast.Subscript)) and (name := _among_imported(node)):
        yield Import(name, node.lineno, deferred)
    later = _not_at_import(node)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, package, called, deferred or any(child is each for each in later))


def _not_at_import(node: ast.AST) -> list[ast.AST]:
    """The children of a node that do not run when the node does. The other branch of a condition does run."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [*node.body]
    if isinstance(node, ast.Lambda):
        return [node.body]
    if isinstance(node, ast.If):
        if _last_name(node.test) == "TYPE_CHECKING":
            return [*node.body]
        if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
            return [*node.orelse] if _last_name(node.test.operand) == "TYPE_CHECKING" else []
    return []


def _last_name(node: ast.AST) -> str | None:
    """`c` of `c`, and of `a.b.c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _named(call: ast.Call, package: str) -> str | None:
    """What a call of `import_module` or `__import__` imports; None if that is computed."""
    given = {"name": call.args[0]} if call.args else {}
    given |= {"package": call.args[1]} if _last_name(call.func) != "__import__" and len(call.args) > 1 else {}
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in ("name", "package")}
    name, start = given.get("name"), given.get("package")
    if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
        return None
    if isinstance(start, ast.Constant) and isinstance(start.value, str):
        package = start.value
    elif name.value.startswith(".") and (start is None or _last_name(start) != "__package__"):
        return None
    return _absolute(name.value.replace(":", "."), package)


def _among_imported(node: ast.Call | ast.Subscript) -> str | None:
    """What is taken out of `sys.modules`, by `[...]` or a method; None where that is not it, or is computed."""
    if isinstance(node, ast.Subscript):
        table, key = node.value, node.slice
    elif isinstance(node.func, ast.Attribute) and node.args:
        table, key = node.func.value, node.args[0]
    else:
        return None
    is_text = isinstance(key, ast.Constant) and isinstance(key.value, str)
    return key.value if is_text and _last_name(table) == "modules" else None


def _absolute(name: str, package: str) -> str:
    below = name.lstrip(".")
    level = len(name) - len(below)
    folders = package.split(".") if package else []
    above = folders[: len(folders) - level + 1] if level else []
    return ".".join([*above, *([below] if below else [])])


def own_module(name: str | None, known: Collection[str]) -> str | None:
    """The file, of those known, that an imported dotted name lies in; None if it lies in none."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def cycles(imports: Mapping[str, Collection[Import]], but: Mapping[str, Collection[str]]) -> list[str]:
    """Describe one import cycle for each file that lies on one.

    Args:
        imports: dotted module name -> what it imports.
        but: module -> the modules that it may import all the same.
    """
    graph = {
        module: {own_module(each.name, imports) for each in found} - {None, module} - set(but.get(module, ()))
        for module, found in imports.items()
    }
    described = []
    for start in graph:
        trails = [(start,)]
        seen: set[str] = set()
        while trails:
            trail = trails.pop()
            for following in sorted(str(name) for name in graph[trail[-1]]):
                if following == start:
                    described.append(" -> ".join((*trail, start)))
                    trails = []
                    break
                if following not in seen:
                    seen.add(following)
                    trails.append((*trail, following))
    return described
