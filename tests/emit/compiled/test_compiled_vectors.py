"""With which vector instructions the C++ compiler is tried before a step is compiled."""

from __future__ import annotations

import functools
import platform

import pytest
from torch._inductor import config, cpu_vec_isa

from fdp.emit.compiled import inductor


class Instructions:
    """Stands for one kind of vector instructions, as inductor knows them."""

    def __init__(self, name: str, works: bool, tried: list[str]) -> None:
        self.name, self.works, self.tried = name, works, tried

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        if config.cpp.vec_isa_ok is not None:
            return bool(config.cpp.vec_isa_ok)
        self.tried.append(self.name)
        return self.works


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of other processors inductor tries all kinds that it knows")
@pytest.mark.parametrize("works", [True, False])
def test_only_the_best_is_tried_unless_it_fails(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    kinds = [Instructions("newest", True, tried), Instructions("new", works, tried), Instructions("old", True, tried)]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", kinds)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["old", "new"])
    found = functools.cache(cpu_vec_isa.valid_vec_isa_list.__wrapped__)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", found)
    inductor._try_best_vector_isa_only.__wrapped__()
    assert tried == ["new"]
    assert [str(kind) for kind in found()] == (["new", "old"] if works else ["old"])
    assert tried == (["new"] if works else ["new", "new", "old"])


def test_settings_of_the_user_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [Instructions("old", True, tried)])
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["old"])
    with config.patch({"cpp.vec_isa_ok": False}):
        inductor._try_best_vector_isa_only.__wrapped__()
    assert tried == []


def test_another_inductor_tries_what_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [Instructions("old", True, tried)])
    monkeypatch.delattr(cpu_vec_isa, "x86_isa_checker")
    inductor._try_best_vector_isa_only.__wrapped__()
    assert tried == []
