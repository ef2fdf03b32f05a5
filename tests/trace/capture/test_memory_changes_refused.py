"""What changes a tensor out of the dispatcher's sight and cannot be traced is refused with its line, and undone."""

from __future__ import annotations

import re

import pytest
import torch
from memory_changes import TABLE, WARNINGS, Tensor, Tree, batch, state
from refused_memory_changes import COUNT, LARGE, LINEAR, MODULE, PARAMETER, REFUSED, SHARED

import fdp

pytestmark = WARNINGS


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused(name: str) -> None:
    case, error, what, who, remedy = REFUSED[name]
    closed = [TABLE, COUNT, LARGE, SHARED, PARAMETER, *MODULE.buffers(), *LINEAR.parameters()]
    before = [(x.detach().clone(), x.requires_grad, x.grad, x.stride(), id(x)) for x in closed]
    with pytest.raises(error) as caught:
        # Not by the comparison at the first call: by the trace itself.
        fdp.data_parallel(case, check_replication=False, check_trace=False)(state(), batch(0))
    text = str(caught.value)
    *_, last = text.splitlines()
    assert what in text and re.search(who, text) and re.search(r"step '\w+|step '<lambda>", text), text
    assert last.startswith("Remedy: ") and remedy in last, text
    if not re.search("its values|this |it came|its .grad", who):  # those are seen when the trace is done: no line
        line = re.search(r"refused_memory_changes\.py:(\d+) in ([\w<>]+)", text)
        start = case.__code__.co_firstlineno
        assert line is not None and start <= int(line[1]) <= start + 4, text
    closed = [TABLE, COUNT, LARGE, SHARED, PARAMETER, *MODULE.buffers(), *LINEAR.parameters()]
    for tensor, (value, required, grad, strides, identity) in zip(closed, before, strict=True):
        assert torch.equal(tensor.detach(), value) and tensor.requires_grad == required and tensor.grad is grad
        assert tensor.stride() == strides and id(tensor) == identity


def test_donated_arguments_of_another_kind_are_refused() -> None:
    def step(s: Tree, b: Tensor) -> Tree:
        s["w"].data = s["w"].data.half()
        return s["w"]

    with pytest.raises(fdp.PurityError, match=r"s\['w'\]: \[3, 3\] torch.float32 cpu became \[3, 3\] torch.float16"):
        fdp.data_parallel(step, donate_argnums=0)(state(), batch(0))

    def turns(s: Tree, b: Tensor) -> Tree:
        s["w"].t_()
        return s

    given = state()
    with pytest.raises(fdp.PurityError, match=r"s\['w'\]: aten.t_.default at test_memory_changes_refused.py"):
        fdp.data_parallel(turns, donate_argnums=0)(given, batch(0))
    assert given["w"].stride() == (3, 1)


def test_what_does_nothing_to_an_argument_is_no_change() -> None:
    def step(s: Tree, b: Tensor) -> Tree:
        s["w"].data = s["w"].data.contiguous()
        s["k"].squeeze_()
        return s["w"] + s["k"].resize_(3, 3) + b

    torch.testing.assert_close(
        fdp.data_parallel(step, check_replication=False)(state(), batch(0)), step(state(), batch(0))
    )


def test_the_methods_of_torch_are_its_own_again() -> None:
    """Also for other threads, and after a trace that failed."""
    watched = [
        (torch.Tensor, "data"),
        (torch.Tensor, "numpy"),
        (torch.UntypedStorage, "resize_"),
        (torch.Tensor, "__dlpack__"),
    ]
    before = [getattr(owner, name) for owner, name in watched] + [torch.utils.swap_tensors, torch._C._swap_tensor_impl]
    for name in ("swap_tensors", "closed over, numpy"):
        with pytest.raises(fdp.FdpError):
            fdp.data_parallel(REFUSED[name][0], check_replication=False)(state(), batch(0))
    after = [getattr(owner, name) for owner, name in watched] + [torch.utils.swap_tensors, torch._C._swap_tensor_impl]
    assert all(one is two for one, two in zip(before, after, strict=True))


def test_operators_in_place_that_turn_a_tensor_are_all_known() -> None:
    """torch tags most of them; a new one would be refused by the trace, which is safe, and should be a view."""
    from fdp.trace.capture.reshapes import _VIEWS

    tagged = {
        name
        for name in dir(torch.ops.aten)
        if hasattr(packet := getattr(torch.ops.aten, name), "overloads")
        and any(torch.Tag.inplace_view in getattr(packet, each).tags for each in packet.overloads())
    }
    assert tagged <= {*_VIEWS, "set_", "resize_", "resize_as_"}
    for name in _VIEWS:
        there, back = getattr(torch.ops.aten, name), getattr(torch.ops.aten, name.removesuffix("_"))
        assert all(each in back.overloads() or "int" in back.overloads() for each in there.overloads())
