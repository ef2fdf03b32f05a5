"""Closed-over tensors, checked at each call: they may have changed since the trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdp.errors import PurityError, build_message
from fdp.pytorch.guards import tensors_like
from fdp.trace.checks.memory_checks import check_closure_memory
from fdp.trace.trace import Trace


class ClosedOver:
    """The tensors that a step uses without being passed them.

    Args:
        trace: of the step.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._held = [(getattr(trace.graph, target), name) for target, name in trace.closed_over]
        self._kinds = [_layout_of(tensor) for tensor, _ in self._held]
        self._strided = [tensor for tensor, _ in self._held if tensor.layout == torch.strided]
        self._like = tensors_like(self._strided)
        self._donated = [at for at, item in enumerate(trace.inputs) if item.donated]
        self._apart: list[int] = []

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse a call if the trace is no longer valid.

        Args:
            tensors: the inputs of the call.

        Raises:
            PurityError: a closed-over tensor has another shape, dtype, device or other strides than it had, or lies in
                the memory of a donated input of this call.
        """
        if not self._held:
            return
        if len(self._strided) < len(self._held) or not self._like(self._strided):
            self._compare_kinds()
        if self._donated:
            # Where none of them has moved since they were found to lie apart, they still do.
            addresses = [tensors[at].data_ptr() for at in self._donated]
            addresses += [tensor.data_ptr() for tensor in self._strided]
            if addresses != self._apart:
                names = {id(tensor): name for tensor, name in self._held}
                check_closure_memory(self._trace.name, self._trace.graph, self._trace.inputs, tensors, names)
                self._apart = addresses

    def _compare_kinds(self) -> None:
        """Refuse closed-over tensors of another shape, strides or dtype. (Values may change in place.)"""
        offenders = [
            f"{name}: traced as {_layout_text(kind)}, now {_layout_text(_layout_of(tensor))}"
            for (tensor, name), kind in zip(self._held, self._kinds, strict=True)
            if _layout_of(tensor) != kind
        ]
        if offenders:
            raise PurityError(
                build_message(
                    f"step {self._trace.name!r} closes over tensors that are of another kind than when it was traced.",
                    offenders,
                    remedy="pass what changes its shape, strides, dtype or device as an argument; or make another "
                    "step with fdp.data_parallel.",
                )
            )


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else None
    return tuple(tensor.shape), tensor.dtype, tensor.device, strides, tensor.layout


def _layout_text(kind: tuple[Any, ...]) -> str:
    shape, dtype, device, strides, layout = kind
    return f"{list(shape)} {dtype} {device} " + (f"{layout}" if strides is None else f"strides {list(strides)}")
