"""Calls of torch.distributed inside of a step: each is refused, with the line and what to call instead; none hangs."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed import all_reduce as held_all_reduce
from torch.distributed import barrier as held_barrier

import fdp
from fdp.trace.capture import raw_messages


def rows(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x) for _ in range(dist.get_world_size())]


def empty(x: torch.Tensor, times: int) -> torch.Tensor:
    return torch.empty(times * len(x))


def other() -> int:
    return 1 - dist.get_rank()


CALLS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "all_reduce": (lambda x: dist.all_reduce(x), "fdp.psum"),
    "all_reduce, asynchronous": (lambda x: dist.all_reduce(x, async_op=True).wait(), "fdp.psum"),
    "all_reduce, held": (lambda x: held_all_reduce(x), "fdp.psum"),
    "all_reduce of the group": (lambda x: dist.group.WORLD.allreduce([x]).wait(), "fdp.psum"),
    "all_gather": (lambda x: dist.all_gather(rows(x), x), "fdp.all_gather"),
    "all_gather_into_tensor": (lambda x: dist.all_gather_into_tensor(empty(x, 2), x), "fdp.all_gather"),
    "reduce_scatter_tensor": (lambda x: dist.reduce_scatter_tensor(torch.empty(2), x), "fdp.psum_scatter"),
    "reduce_scatter": (lambda x: dist.reduce_scatter(torch.empty_like(x), [x, x]), "fdp.psum_scatter"),
    "reduce": (lambda x: dist.reduce(x, 0), "every rank gets"),
    "gather": (lambda x: dist.gather(x, rows(x) if dist.get_rank() == 0 else None), "every rank gets"),
    "scatter": (lambda x: dist.scatter(x, [x, x] if dist.get_rank() == 0 else None), "fdp.axis_index"),
    "broadcast": (lambda x: dist.broadcast(x, 0), r"fdp\.broadcast"),
    "send": (lambda x: dist.send(x, other()), "fdp.ppermute"),
    "recv": (lambda x: dist.recv(x, other()), "fdp.ppermute"),
    "isend": (lambda x: dist.isend(x, other()).wait(), "fdp.ppermute"),
    "irecv": (lambda x: dist.irecv(x, other()).wait(), "fdp.ppermute"),
    "batch": (lambda x: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other())]), "fdp.ppermute"),
    "all_to_all_single": (lambda x: dist.all_to_all_single(torch.empty_like(x), x), "fdp.all_to_all"),
    "all_to_all": (lambda x: dist.all_to_all(rows(x), [x, x]), "fdp.all_to_all"),
    "barrier": (lambda x: dist.barrier(), "leave it out"),
    "barrier, held": (lambda x: held_barrier(), "leave it out"),
    "monitored_barrier": (lambda x: dist.monitored_barrier(), "leave it out"),
    "new_group": (lambda x: dist.new_group([0]), "between steps"),
    "all_gather_object": (lambda x: dist.all_gather_object([None, None], "x"), "between steps"),
    "broadcast_object_list": (lambda x: dist.broadcast_object_list(["x"]), "between steps"),
    "functional all_reduce": (lambda x: functional.all_reduce(x, "sum", dist.group.WORLD) + 0, "fdp.psum"),
    "functional all_gather": (
        lambda x: functional.all_gather_tensor(x, 0, dist.group.WORLD) + 0, "fdp.all_gather",
    ),
    "functional reduce_scatter": (
        lambda x: functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 0, "fdp.psum_scatter",
    ),
    "functional all_to_all": (
        lambda x: functional.all_to_all_single(x, None, None, dist.group.WORLD) + 0, "fdp.all_to_all",
    ),
    "functional broadcast": (lambda x: functional.broadcast(x, 0, dist.group.WORLD) + 0, r"fdp\.broadcast"),
    "differentiable all_reduce": (lambda x: differentiable.all_reduce(x), "fdp.psum"),
    "differentiable all_gather": (lambda x: differentiable.all_gather(x), "fdp.all_gather"),
}  # fmt: skip


def refused(name: str) -> str:
    call = CALLS[name][0]

    def step(state: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        x = batch * 2
        call(x)
        return state + fdp.pmean(x.sum())

    with pytest.raises(fdp.TraceError) as error:
        fdp.data_parallel(step)(torch.zeros(()), torch.arange(4.0))
    return str(error.value)


def all_refused() -> dict[str, str]:
    texts = {name: refused(name) for name in CALLS}
    # The group is as good as before.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    return texts


def test_each_call_is_refused_with_what_to_call_instead() -> None:
    for texts in ranks.run(2, all_refused):
        for name, (_, remedy) in CALLS.items():
            text = texts[name]
            assert "was called inside of a step, whose messages fdp sends" in text, (name, text)
            assert "test_raw_messages.py:" in text and "in step 'step'" in text, (name, text)
            assert remedy.replace("\\", "") in text.split("Remedy: ")[1], (name, text)


def test_without_a_process_group_it_is_the_same() -> None:
    text = refused("all_reduce")
    assert "torch.distributed.all_reduce was called inside of a step" in text


def in_a_gradient() -> str:
    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(grad)
            return grad

    step = fdp.data_parallel(lambda w, b: w - fdp.grad(lambda w: (Reduced.apply(w) * b).sum())(w))
    with pytest.raises(fdp.TraceError, match="all_reduce was called inside of a step") as error:
        step(torch.ones(3), torch.ones(3))
    return str(error.value)


def test_in_a_backward_pass() -> None:
    assert "test_raw_messages.py:" in in_a_gradient()


def test_every_function_that_torch_exports_is_known() -> None:
    """A release with another function that sends is noticed here."""
    from torch.distributed import distributed_c10d as c10d

    harmless = {
        "destroy_process_group", "init_process_group", "new_subgroups", "new_subgroups_by_enumeration", "shrink_group",
        "supports_complex", "record_comm", "reduce_op", "isend", "irecv", "set_timeout",
    }  # fmt: skip
    named = {name for name in c10d.__all__ if type(getattr(c10d, name, None)) is types.FunctionType} - harmless
    left = {name for name in named if not name.startswith(("get_", "is_"))}
    assert left == {name for name in raw_messages._FUNCTIONS if hasattr(c10d, name)}


def test_what_is_no_part_of_a_step_is_left_alone() -> None:
    before = dist.all_reduce, dist.barrier
    with pytest.raises(fdp.TraceError):
        fdp.data_parallel(lambda s, b: (dist.barrier(), s)[1])(torch.ones(1), torch.ones(1))
    assert (dist.all_reduce, dist.barrier) == before
