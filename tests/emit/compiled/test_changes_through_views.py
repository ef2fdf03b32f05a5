"""A change through each kind of view changes the elements that the view has, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import some

import fdp

Tensor = torch.Tensor

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "alias": lambda x: torch.ops.aten.alias(x),
    "detach": lambda x: x.detach(),
    "diagonal": lambda x: x.diagonal(1),
    "permute": lambda x: x.permute(1, 0)[1:],
    "select": lambda x: x.select(1, 1),
    "slice": lambda x: x[1:3, ::2],
    "split": lambda x: x.split(3)[0],
    "unbind": lambda x: x.unbind(1)[2],
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x[1:].T.unsqueeze(0)[0, :, 1],
    "tensor_split": lambda x: x.tensor_split(3)[1],
    "unflatten": lambda x: x[:4].unflatten(0, (2, 2))[1],
    "as_strided": lambda x: x.as_strided((2, 2), (7, 2), 1),
    "another dtype": lambda x: x.view(torch.int32)[1:2],
    "flat": lambda x: x.ravel()[3:5],
    "windows": lambda x: x.unfold(0, 2, 2),
    "windows, with gaps": lambda x: x.unfold(1, 1, 2),
    "windows, the last without its gap": lambda x: x.unfold(0, 2, 3),
    "windows of all": lambda x: x.unfold(1, 2, 2),
    "one window": lambda x: x.unfold(0, 3, 7),
    "windows of a view": lambda x: x.t()[1:].unfold(0, 2, 2),
    "a view of windows": lambda x: x.unfold(0, 2, 2)[0, :, 1],
}


def changed(view: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def change(s: Tensor) -> Tensor:
        x = s * 2
        view(x).add_(1)
        return x

    return change


def step(s: Tensor, b: Tensor) -> dict[str, Tensor]:
    results = {name: changed(view)(s) for name, view in VIEWS.items()}
    in_branch: Any = torch.cond(s.sum() > 0, changed(VIEWS["windows"]), lambda x: x * 3, (s,))
    return {**results, "windows in a branch": in_branch}


@pytest.mark.parametrize("compile", some([False, True]))
def test_a_change_through_a_view_leaves_all_other_elements(compile: bool) -> None:
    s = torch.arange(1.0, 21.0).reshape(5, 4)
    expected = step(s, s)
    found = fdp.data_parallel(step, compile=compile, check_trace=False)(s, torch.ones(1))
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_windows_with_elements_in_common_are_refused_by_a_compiler() -> None:
    def shifted(s: Tensor, b: Tensor) -> Tensor:
        x = s * 2
        x.unfold(0, 2, 1).add_(1)
        return x

    with pytest.raises(fdp.CompileError, match="cannot be taken apart"):
        fdp.data_parallel(shifted, compile=True)(torch.ones(5), torch.ones(1))
