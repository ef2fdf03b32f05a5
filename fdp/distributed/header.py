"""A number at the end of a message, in which every rank sees whether all ranks sent the same one.

Each bit is sent as two elements, a one and a zero: (0, 1) for a bit that is set, (1, 0) for one that is not. After a
sum, a mean or a maximum over ranks that all sent the same bit, one element of the pair is still zero. If two ranks sent
different bits, both are positive (after a minimum, both are zero). So each rank sees any difference between any ranks,
not only from its own number, and nothing has to be exact: what counts is only which elements are zero. A sum of ones
is not zero in any floating-point dtype, however many ranks there are and however it is rounded; of integers it is
zero only where it wraps around, so those of one byte carry no number on 256 ranks or more.
"""

from __future__ import annotations

import torch

from fdp.distributed.collective import Collective

BITS = 32
"""Bits of the number that is sent."""

NUMEL = 2 * BITS
"""Elements that it takes."""

_CALL_BITS = 4
_DIGEST_BITS = 8
_AGREEMENT_BITS = BITS - _CALL_BITS - _DIGEST_BITS
CALLS = 2**_CALL_BITS
"""Calls are counted modulo this."""


def carries(collective: Collective, dtype: torch.dtype, world_size: int) -> bool:
    """Whether a message can carry a number: all ranks have to see what all ranks sent, each in one place.

    Example:
        >>> from fdp.distributed.collective import COLLECTIVES
        >>> carries(COLLECTIVES["mean"], torch.bfloat16, 4096), carries(COLLECTIVES["sum"], torch.int8, 256)
        (True, False)
    """
    return collective.reduces and world_size > 1 and (dtype.itemsize > 1 or world_size < 256)


def numbers(agreement: int, digest: str) -> list[int]:
    """The number of each call of a step, as far as calls are told apart.

    Args:
        agreement: counts the exchanges of a group; in this one ranks agreed on the step and its schedule.
        digest: of what they agreed on, in hexadecimal digits.
    """
    high = int(digest[: _DIGEST_BITS // 4], 16) << _AGREEMENT_BITS | agreement % 2**_AGREEMENT_BITS
    return [high << _CALL_BITS | call for call in range(CALLS)]


def pairs(number: int) -> list[int]:
    """The elements that stand for a number: two for each bit.

    Example:
        >>> pairs(2)[-4:]
        [0, 1, 1, 0]
    """
    bits = [number >> place & 1 for place in reversed(range(BITS))]
    return [element for bit in bits for element in (1 - bit, bit)]


class Header:
    """Writes the number of a call behind a message, and reads what came back.

    Args:
        numbers: those of the calls, modulo `CALLS`.
        dtype: of the message.
        device: of the message.
    """

    def __init__(self, numbers: list[int], dtype: torch.dtype, device: torch.device) -> None:
        table = torch.tensor([pairs(number) for number in numbers])
        # Made once: to write or to look is then one call or two of some hundred nanoseconds.
        self._rows = list(table.to(device, dtype).unbind(0))
        self._ones = list((table != 0).unbind(0))
        self._unanimous: dict[int, torch.Tensor] = {}

    def write(self, tail: torch.Tensor, call: int) -> None:
        """Write the number of a call.

        Args:
            tail: [NUMEL], the end of the message.
            call: counts the calls.
        """
        tail.copy_(self._rows[call % CALLS])

    def is_unanimous(self, tail: torch.Tensor, call: int) -> bool:
        """Whether all ranks sent the number of a call.

        Args:
            tail: [NUMEL], the end of the message as it came back, on the CPU.
            call: counts the calls.
        """
        number = call % CALLS
        # What was unanimous once is so again, bit for bit: one look instead of two.
        before = self._unanimous.get(number)
        if before is not None and torch.equal(tail, before):
            return True
        if not torch.equal(tail != 0, self._ones[number]):
            return False
        self._unanimous[number] = tail.clone()
        return True
