"""What the rules about imports see: every way to write an import, and whether it waits until something is called."""

from __future__ import annotations

import ast
import pathlib

import pytest
from imports import Import, cycles, imports_of

import fdp


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import a.b", "a.b"),
        ("import a.b as c", "a.b"),
        ("from a.b import c", "a.b.c"),
        ("from . import c", "house.room.c"),
        ("from .c import d", "house.room.c.d"),
        ("from ..c import d", "house.c.d"),
        ("import importlib\nimportlib.import_module('a.b')", "a.b"),
        ("from importlib import import_module\nimport_module('a.b')", "a.b"),
        ("from importlib import import_module as load\nx = load(name='a.b')", "a.b"),
        ("importlib.import_module('.c', __package__)", "house.room.c"),
        ("importlib.import_module('..c', package='a.b')", "a.c"),
        ("__import__('a.b')", "a.b"),
        ("builtins.__import__('a.b', globals())", "a.b"),
        ("pkgutil.resolve_name('a.b:c')", "a.b.c"),
        ("from pkgutil import resolve_name as found\nfound('a.b')", "a.b"),
        ("pkgutil.resolve_name(name)", None),
        ("sys.modules['a.b']", "a.b"),
        ("sys.modules.get('a.b')", "a.b"),
        ("importlib.import_module('a.' + name)", None),
        ("importlib.import_module(f'a.{name}')", None),
        ("importlib.import_module('.c', where)", None),
        ("__import__(name)", None),
        ("class C:\n    import a.b", "a.b"),
        ("try:\n    import a.b\nexcept ImportError:\n    pass", "a.b"),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import a.b", "a.b"),
        ("if TYPE_CHECKING:\n    pass\nelif x:\n    import a.b", "a.b"),
        ("if typing.TYPE_CHECKING:\n    pass\nelse:\n    import a.b", "a.b"),
        ("if not TYPE_CHECKING:\n    import a.b", "a.b"),
        ("if x:\n    import a.b", "a.b"),
        ("def f(x=__import__('a.b')):\n    pass", "a.b"),
    ],
)
def test_what_is_imported_with_a_file_is_seen(source: str, name: str | None) -> None:
    last = imports_of(ast.parse(source), "house.room")[-1]
    assert (last.name, last.deferred) == (name, False)


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import a.b",
        "async def f():\n    if x:\n        import a.b",
        "class C:\n    def f(self):\n        __import__('a.b')",
        "f = lambda: __import__('a.b')",
        "if TYPE_CHECKING:\n    import a.b",
        "if typing.TYPE_CHECKING:\n    from a import b",
        "if t.TYPE_CHECKING:\n    if x:\n        import a.b\n    else:\n        import a.b",
        "if not typing.TYPE_CHECKING:\n    pass\nelse:\n    import a.b",
    ],
)
def test_what_is_imported_later_or_for_type_checkers_is_seen_as_that(source: str) -> None:
    assert {(each.name, each.deferred) for each in imports_of(ast.parse(source))} == {("a.b", True)}


def test_each_file_of_a_ring_is_named() -> None:
    graph = {"a": [Import("b.x", 1, False)], "b": [Import("c", 1, True), Import("os", 2, False)], "c": [], "d": []}
    assert cycles(graph, {}) == []
    graph["c"] = [Import("a", 1, False)]
    assert cycles(graph, {}) == ["a -> b -> c -> a", "b -> c -> a -> b", "c -> a -> b -> c"]
    assert cycles(graph, {"c": ["a"]}) == []


def does_something(tree: ast.Module) -> list[str]:
    """The statements of an `__init__` that do more than to export names."""
    exports = (ast.Import, ast.ImportFrom)
    found = []
    for node in tree.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_list = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        lists = isinstance(node, ast.FunctionDef) and node.name == "__dir__"
        if not (isinstance(node, exports) or is_text or is_list or lists):
            found.append(ast.unparse(node).splitlines()[0])
    return found


def test_what_a_folder_exports_lies_in_its_files() -> None:
    package = pathlib.Path(fdp.__file__).parent
    paths = [path for path in package.rglob("__init__.py") if path.parent != package]
    assert len(paths) > 20
    assert [str(path) for path in paths if does_something(ast.parse(path.read_text()))] == []
    assert does_something(ast.parse("def f():\n    pass\nx = 1")) == ["def f():", "x = 1"]
