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
    """The number of each call of a step, as far as it distinguishes calls.

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


_BYTES = [pairs(byte)[-16:] for byte in range(256)]
_PATTERNS = [[element != 0 for element in elements] for elements in _BYTES]

SentNumbers = int | torch.Tensor
"""What a rank sent: the number, or the elements, if the number is on a device."""


class Header:
    """Writes the number of a call behind a message.

    Args:
        numbers: those of the calls, modulo `CALLS`.
        dtype: of the message.
        device: of the message.
    """

    def __init__(self, numbers: list[int], dtype: torch.dtype, device: torch.device) -> None:
        self._numbers, self._dtype, self._device = numbers, dtype, device
        # Made once: to write is then one call of a microsecond.
        self._rows = self._table([pairs(number) for number in numbers])
        self._bytes: list[torch.Tensor] = []
        self._places: torch.Tensor | None = None

    def write(self, tail: torch.Tensor, call: int, mixed: int | torch.Tensor = 0) -> SentNumbers:
        """Write the number of a call.

        Args:
            tail: [NUMEL], the end of the message.
            call: counts the calls.
            mixed: a further number of `BITS` bits that all ranks should have in common. As an integer tensor of shape
                [], of which the lower bits count, it is not waited for.

        Returns:
            What was sent.
        """
        number: int = self._numbers[call % CALLS]
        if isinstance(mixed, torch.Tensor):
            row = self._row_on_device(mixed.to(self._device, torch.int64) ^ number)
            tail.copy_(row)
            return row
        if not mixed:
            tail.copy_(self._rows[call % CALLS])
            return number
        if not self._bytes:
            self._bytes = self._table(_BYTES)
        number ^= mixed
        torch.cat([self._bytes[byte] for byte in number.to_bytes(BITS // 8, "big")], out=tail)
        return number

    def _row_on_device(self, number: torch.Tensor) -> torch.Tensor:
        """As `pairs`, of a number that is on the device."""
        if self._places is None:
            self._places = torch.arange(BITS - 1, -1, -1, device=self._device)
        bits = number.bitwise_right_shift(self._places).bitwise_and_(1)
        return torch.stack((1 - bits, bits), 1).view(NUMEL).to(self._dtype)

    def _table(self, rows: list[list[int]]) -> list[torch.Tensor]:
        return list(torch.tensor(rows, device="cpu").to(self._device, self._dtype).unbind(0))


def is_unanimous(arrived: torch.Tensor, sent: SentNumbers) -> bool:
    """Whether all ranks sent the same.

    Args:
        arrived: [NUMEL], the end of the message as it came back, on the CPU.
        sent: what this rank sent; elements on the CPU.
    """
    if isinstance(sent, torch.Tensor):
        return torch.equal(arrived != 0, sent != 0)
    first, second, third, fourth = sent.to_bytes(BITS // 8, "big")
    expected = [*_PATTERNS[first], *_PATTERNS[second], *_PATTERNS[third], *_PATTERNS[fourth]]
    # By way of a list: one call of torch instead of three.
    return list(map(bool, arrived.tolist())) == expected
