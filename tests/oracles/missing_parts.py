"""torch as it would be without one of its private parts."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import pytest
import torch

from fdp.pytorch import parts


class Without:
    """A module, class or object of torch, as it would be without one of its attributes."""

    def __init__(self, whole: Any, name: str) -> None:
        self._whole, self._name = whole, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._whole, name)

    def __instancecheck__(self, item: Any) -> bool:
        return isinstance(item, self._whole)


def take_away(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a part of torch away."""
    assert parts.exists(path)
    monkeypatch.setitem(sys.modules, path, None)  # else a module could be imported all the same
    *steps, owner, name = path.split(".")
    if not steps:
        monkeypatch.delattr(torch, name)
        return
    whole = functools.reduce(getattr, steps[1:], torch)
    if type(getattr(whole, owner)) is types.ModuleType:
        monkeypatch.delattr(getattr(whole, owner), name)
        return
    # Not the attribute itself: classes of C++ and settings of inductor do not let go of theirs.
    monkeypatch.setattr(whole, owner, Without(getattr(whole, owner), name))
