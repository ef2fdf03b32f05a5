"""What a public docstring lacks: a promise, an argument, a result, an error, an example. Tests ask, and the site."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import fdp

MODULES = (fdp, fdp.optim, fdp.random)
"""The modules whose `__all__` is public."""


def public_names() -> list[str]:
    """All public names, but for the modules among them: "fdp.pmean", "fdp.optim.clipped", ..."""
    return [
        f"{module.__name__}.{name}"
        for module in MODULES
        for name in module.__all__
        if not inspect.ismodule(getattr(module, name))
    ]


def gaps_of_public_names() -> list[str]:
    """What all public docstrings lack."""
    return [
        gap
        for module in MODULES
        for name in module.__all__
        for gap in gaps_of(f"{module.__name__}.{name}", getattr(module, name))
    ]


def gaps_of(name: str, obj: Any) -> list[str]:
    """What the docstrings of a function, or of a class with all that is public in it, lack."""
    if inspect.ismodule(obj):
        return []
    if not inspect.isclass(obj):
        return docstring_gaps(name, obj, needs_example=True)
    gaps = [] if _promises(sections(inspect.getdoc(obj) or "")) else [f"{name}: a first sentence"]
    for key, member in _public_members(obj):
        if inspect.isfunction(member):
            gaps += docstring_gaps(f"{name}.{key}", member, needs_example=False)
        elif not inspect.getdoc(member):
            gaps.append(f"{name}.{key}: a docstring")
    return gaps


def _public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Functions and properties of a class; not the defaults of a dataclass's fields."""
    for key, member in vars(cls).items():
        if key[0] != "_" and (inspect.isfunction(member) or hasattr(member, "__get__")):
            yield key, member


def sections(docstring: str) -> dict[str, str]:
    """Google-style sections of a docstring; the text before the first is under ""."""
    parts = re.split(r"^(Args|Attributes|Returns|Raises|Example|References):\n", docstring, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def _promises(found: dict[str, str]) -> bool:
    return found[""].split("\n\n")[0].strip().endswith(".")


def docstring_gaps(name: str, obj: Any, needs_example: bool) -> list[str]:
    """What the docstring of a function lacks."""
    found = sections(inspect.getdoc(obj) or "")
    gaps = []
    if not _promises(found):
        gaps.append("a first sentence that says what it promises")
    signature = inspect.signature(obj)
    for parameter in signature.parameters:
        if parameter != "self" and not re.search(rf"^\s+\*{{0,2}}{parameter}:", found.get("Args", ""), re.MULTILINE):
            gaps.append(f"Args: {parameter}")
    takes_arguments = any(parameter != "self" for parameter in signature.parameters)
    if takes_arguments and signature.return_annotation not in (None, "None") and "Returns" not in found:
        gaps.append("Returns")
    raises = any(isinstance(node, ast.Raise) for node in ast.walk(syntax_of(obj)))
    if raises and "Raises" not in found:
        gaps.append("Raises")
    example = found.get("Example", "")
    elsewhere = re.search(r"See `(\w+)`", example)
    shown = ">>> " in example or (elsewhere and ">>> " in (getattr(fdp, elsewhere[1]).__doc__ or ""))
    if needs_example and not shown:
        gaps.append("Example that runs")
    return [f"{name}: {gap}" for gap in gaps]


def syntax_of(obj: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(obj)))
