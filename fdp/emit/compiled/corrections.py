"""What inductor is known to be wrong about, put right: each with the torch that it was seen in.

`torch.compile` is wrong about the same. A step is compared with its operators at its first call, and would be refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fdp.pytorch.parts import release


def _add_of_a_product(one: Any, other: Any, *, alpha: Any = 1) -> Any:
    """A sum with a factor, taken apart: inductor makes one kernel of a product and a sum, and forgets the factor.

    (`addmm` in its pass behind the backward pass; seen in torch 2.13, with `torch.compile` as well.) Of a factor that
    is known at each call only, nothing can be asked here.
    """
    is_one = isinstance(alpha, int | float) and alpha == 1
    return NotImplemented if is_one else torch.ops.aten.add.Tensor(one, torch.ops.aten.mul.Tensor(other, alpha))


def _first_of_all(operator: Any) -> Callable[..., Any]:
    """The place of an extreme among all elements, looked for along a row: the first one counts, of several equal.

    Inductor goes through a whole tensor in the order in which it lies, and takes what comes first there (seen in torch
    2.13, with `torch.compile` as well).
    """

    def place(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is not None or x.dim() < 2:
            return NotImplemented
        found = operator(x.reshape(-1), 0)
        return found.reshape([1] * x.dim()) if keepdim else found

    return place


def _copy_of_places(x: Any, *where: Any, **named: Any) -> Any:
    """Elements by their places, copied: inductor keeps how a tensor lies for those who look at places, not for those
    who copy from there (seen in torch 2.13, in branches of conditions, where views become copies)."""
    return torch.ops.aten.as_strided.default(x, *where, **named).clone()


def _shares_of_windows(operator: Any, dims: int) -> Any:
    """The gradient of averages over windows of which some reach beyond the input: divided by what each averages.

    Inductor divides by the whole window (seen in torch 2.13 to 2.15, with `torch.compile` as well).
    """

    def gradient(
        grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, beyond: bool, padded: bool, divisor: Any = None
    ) -> Any:
        if not beyond or not padded or divisor is not None:
            return NotImplemented
        for dim in range(-dims, 0):
            size, step, beside = (each[dim % len(each)] for each in (kernel, stride or kernel, padding))
            first = torch.arange(grad.shape[dim], device=grad.device) * step - beside
            count = (first + size).clamp(max=x.shape[dim] + beside) - first
            grad = grad / count.view([-1] + [1] * (-1 - dim))
        return operator(grad, x, kernel, stride, padding, beyond, padded, 1)

    return gradient


OWN_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.add.Tensor: _add_of_a_product,
    torch.ops.aten.as_strided_copy.default: _copy_of_places,
    **{
        each: _shares_of_windows(each, dims)
        for each, dims in (
            (torch.ops.aten.avg_pool2d_backward.default, 2),
            (torch.ops.aten.avg_pool3d_backward.default, 3),
        )
    },
    **{each: _first_of_all(each) for each in (torch.ops.aten.argmax.default, torch.ops.aten.argmin.default)},
}
"""What is taken apart since inductor is wrong about the whole."""


@contextmanager
def changed_memory_stays_known(node: Any) -> Iterator[None]:
    """Let what reads changed memory wait for the change.

    Before inductor fuses loops it may lay them out anew. In torch 2.13 it then forgets that a loop reads what another
    one has changed: a scatter, say, may be written behind its reader. Later releases remember.

    Args:
        node: `SchedulerNode`. `recompute_size_and_body` gives one other loops; `mutation_renames` says which change of
            a buffer it reads.
    """
    if release(str(torch.__version__)) >= (2, 14):
        yield
        return
    recompute = node.recompute_size_and_body

    @functools.wraps(recompute)
    def remembering(self: Any, *args: Any, **kwargs: Any) -> None:
        recompute(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    node.recompute_size_and_body = remembering
    try:
        yield
    finally:
        node.recompute_size_and_body = recompute
