"""The wire type: in which dtype gradients are sent between ranks, and in which they are added up.

References: Li et al., PyTorch Distributed (VLDB 2020), section 6.2.3 (gradient compression).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fdp.errors import ArgumentError, build_message

_WIRE = (torch.bfloat16, torch.float16)
_ACCUMULATE = (torch.float32,)


@dataclass(frozen=True)
class Wire:
    """In which dtype gradients are sent, and added up.

    Attributes:
        dtype: the dtype that they are sent in, if their own is wider.
        accumulate: the dtype that those which are sent in a narrower one are added up in; None for the backend's
            all-reduce, which adds in the dtype that it is given.
    """

    dtype: torch.dtype
    accumulate: torch.dtype | None = None

    def carries(self, own: torch.dtype) -> torch.dtype:
        """The dtype that a gradient is sent in: the wire's, if its own is wider."""
        return self.dtype if own.is_floating_point and own.itemsize > self.dtype.itemsize else own

    def adds_in(self, own: torch.dtype) -> torch.dtype | None:
        """The dtype that a gradient is added up in, if it is not the one that it is sent in."""
        wider = self.accumulate is not None and self.accumulate.itemsize > self.carries(own).itemsize
        return self.accumulate if wider else None


def resolve_wire(wire_dtype: object, accumulate_dtype: object) -> Wire | None:
    """Turn the options of `data_parallel` into a `Wire`, or None if gradients are sent as they are.

    Raises:
        ArgumentError: an option is no dtype that it takes, or there is a type to add in and none to send in.

    Example:
        >>> resolve_wire(torch.bfloat16, None)
        Wire(dtype=torch.bfloat16, accumulate=None)
    """
    if wire_dtype is not None and wire_dtype not in _WIRE:
        raise ArgumentError(
            build_message(
                f"wire_dtype={wire_dtype!r}.",
                remedy="pass torch.bfloat16, torch.float16, or None, which sends gradients as they are.",
            )
        )
    if accumulate_dtype is not None and accumulate_dtype not in _ACCUMULATE:
        raise ArgumentError(
            build_message(
                f"accumulate_dtype={accumulate_dtype!r}.",
                remedy="pass torch.float32, or None, which adds gradients up in the type that they are sent in.",
            )
        )
    if wire_dtype is None:
        if accumulate_dtype is None:
            return None
        raise ArgumentError(
            build_message(
                f"accumulate_dtype={accumulate_dtype} was given without wire_dtype: gradients that keep their dtype "
                "are added up by the backend.",
                remedy="name the type that they are to be sent in as well: wire_dtype=torch.bfloat16; or leave "
                "accumulate_dtype out.",
            )
        )
    return Wire(wire_dtype, accumulate_dtype)
