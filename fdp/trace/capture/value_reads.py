"""Reads of a tensor's value while a step is traced: each call reads anew, or the step is refused.

The tracer takes a tensor that it has not made, one that the step closes over, for a constant. A number that is read
there, or from what is computed from it and from constants, would be that of the first call for ever. So closed-over
tensors are looked at by an operator first: what that returns is a value of the trace, of which a number is read anew at
each call, and on which nothing can branch.

And torch reads a value where there is no need to, to make an index out of a mask without dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fdp.trace.capture.silent_changes import replaced

_aten = torch.ops.aten
_READ_VALUES = (
    _aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default, _aten.equal.default,
    _aten.allclose.default,
)  # fmt: skip
_SPLIT_AT_VALUES = "tensor_split"
"""Reads places right from the memory of a tensor, without an operator."""


def value_read_decompositions(
    is_traced: Callable[[Any], bool], judge: Callable[[torch.Tensor], None]
) -> Mapping[Any, Callable[..., Any]]:
    """Decompositions of the operators that read values, for the tracer.

    Args:
        is_traced: whether a tensor is one of the trace's own.
        judge: makes the tracer take a tensor of its own for a constant only if it is one.

    Returns:
        For each such operator, a function that calls it with values of the trace alone.
    """

    def anew(operator: Any) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            foreign = False
            for value in args:
                if is_traced(value):
                    judge(value)
                elif isinstance(value, torch.Tensor):
                    foreign = True
            return operator(*(_traced(is_traced, value) for value in args), **kwargs) if foreign else NotImplemented

        return read

    return {operator: anew(operator) for operator in _READ_VALUES}


@contextmanager
def value_reads_patched(is_traced: Callable[[Any], bool], tracing: Callable[[], bool]) -> Iterator[None]:
    """Patch the functions of torch that read values without an operator.

    Args:
        is_traced: whether a tensor is one of the trace's own.
        tracing: whether the thread that asks is the one that traces.
    """

    def listed(original: Any) -> Any:
        def tolist(tensor: torch.Tensor) -> Any:
            return original(tensor) if is_traced(tensor) or not tracing() else tensor.detach().tolist()

        return tolist

    def split(original: Any) -> Any:
        def split_at(*args: Any, **kwargs: Any) -> Any:
            if tracing():
                args = tuple(_traced(is_traced, value) for value in args)
                kwargs = {name: _traced(is_traced, value) for name, value in kwargs.items()}
            return original(*args, **kwargs)

        return split_at

    def assign(original: Any) -> Any:
        def setitem(tensor: torch.Tensor, index: Any, value: Any) -> None:
            if isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.dim() == 0 and tracing():
                # What torch makes of it as well, but for the value that it reads: a row, and whether to take it.
                tensor, index = tensor.unsqueeze(0), index.unsqueeze(0)
            original(tensor, index, value)

        return setitem

    with ExitStack() as stack:
        for owner, name, make in (
            (torch.Tensor, "tolist", listed),
            (torch.Tensor, _SPLIT_AT_VALUES, split),
            (torch, _SPLIT_AT_VALUES, split),
            (torch.Tensor, "__setitem__", assign),
        ):
            stack.enter_context(replaced(owner, name, make))
        yield


def _traced(is_traced: Callable[[Any], bool], value: object) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and not is_traced(value) else value
