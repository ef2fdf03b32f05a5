"""A name stands for one idea: what files offer to others has a name of its own."""

from __future__ import annotations

import ast
import pathlib
from collections import defaultdict
from collections.abc import Mapping

import fdp

PACKAGE = pathlib.Path(fdp.__file__).parent
SAME_IDEA = {
    "all_gather", "all_to_all", "broadcast",  # on pytrees, and the marker in the graph that it becomes
    "apart", "together",  # how a pytree takes apart a leaf of each kind
    "copy_of",  # of a tensor's values; and of the gaps between them, too
    "Arguments", "Result",  # of a function
    "Groups",  # reductions by bucket
    "logger",
}  # fmt: skip


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def offered(files: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Name of a public function, class or type -> the files that define it."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for file, tree in files.items():
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [each.id for each in targets if isinstance(each, ast.Name) and each.id != each.id.upper()]
            for name in [node.name] if isinstance(node, DEFINITIONS) else names:
                if not name.startswith("_"):
                    found[name].add(file)
    return found


def test_no_two_files_offer_the_same_name() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    found = offered(files)
    assert len(found) > 500
    assert {name: sorted(where) for name, where in found.items() if len(where) > 1 and name not in SAME_IDEA} == {}
    assert all(len(found[name]) > 1 for name in SAME_IDEA), "take it off the list"
    more = {**files, "other.py": ast.parse("Trace = int\nNewIdea = str\ndef copy_of():\n    pass")}
    again = {name for name, where in offered(more).items() if len(where) > len(found.get(name, ())) > 0}
    assert again == {"Trace", "copy_of"}
