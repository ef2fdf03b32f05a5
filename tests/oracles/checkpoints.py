"""Checkpoints whose parts show whether they belong together; and a program that hides in one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fdp
from fdp.state.index import INDEX, read_index


def version(number: int) -> dict[str, Any]:
    """A state that shows whether its parts belong together."""
    return {"a": torch.full((300,), float(number)), "b": [torch.full((7,), number), number]}


def held(path: Path) -> int:
    """Which version a checkpoint holds; all of it."""
    found = fdp.load(path, version(0))
    number = found["b"][1]
    assert repr(found) == repr(version(number))
    return number


def flip_a_bit(folder: Path, number: float) -> None:
    """Change one bit of the first tensor that begins with a number."""
    pattern = torch.full((4,), number).numpy().tobytes()
    (path,) = (each for each in folder.glob("*.distcp") if pattern in each.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(pattern) + 5] ^= 16
    path.write_bytes(bytes(data))


def names_in(folder: Path) -> set[str]:
    return {info.relative_path for info in read_index(folder / INDEX).storage_data.values()}


class Exploit:
    """Unpickled, it leaves a file behind: it could as well have deleted all of them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)
