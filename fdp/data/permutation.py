"""A permutation of any length, computed from a key, without a list.

Any position can be asked for at once, so that a run can go on in the middle of an epoch of 10^9 samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fdp.random.hashing import mixed

_ROUNDS, _ROUNDS_OF_FEW, _FEW = 8, 24, 1024
"""Four rounds make a permutation indistinguishable from a random one, if few of its numbers are known (Luby and
Rackoff). A round mixes few numbers badly: after eight rounds, some orders of five numbers are half again as frequent
as others. So few numbers get more rounds."""
_POSITIVE = 2**62 - 1


@dataclass(frozen=True)
class Permutation:
    """A permutation of the numbers below `length`, equal for equal keys.

    The numbers are laid out in a rectangle that is nearly a square. Each round moves a number along its row, by a
    hash of the row's number, or along its column, likewise: whatever the hash, each round can be undone. A number
    that leaves the first `length` is moved on until it comes back.

    Args:
        length: how many numbers, from 0 on; at least 1, at most 2**62.
        key: of `fdp.random`, on the CPU.

    References:
        Luby and Rackoff, How to Construct Pseudorandom Permutations from Pseudorandom Functions (SIAM J. Comput.
        1988): the rounds. Black and Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), sections 4 and 5:
        rectangles, and walking along a cycle.
    """

    length: int
    key: torch.Tensor

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """The numbers at some positions.

        Args:
            positions: 1-d int64 tensor on the CPU, of numbers below `length`.

        Returns:
            A new tensor of the same shape, of numbers below `length`.
        """
        found = self._moved(positions)
        while (outside := (found >= self.length).nonzero().flatten()).numel():
            found[outside] = self._moved(found[outside])
        return found

    def _moved(self, numbers: torch.Tensor) -> torch.Tensor:
        """A permutation of the numbers of the rectangle."""
        rows = math.isqrt(self.length - 1) + 1
        columns = -(-self.length // rows)
        row, column = numbers // columns, numbers % columns
        for purpose in range(_ROUNDS_OF_FEW if self.length <= _FEW else _ROUNDS):
            if purpose % 2:
                column = (column + (mixed(self.key, row, purpose) & _POSITIVE) % columns) % columns
            else:
                row = (row + (mixed(self.key, column, purpose) & _POSITIVE) % rows) % rows
        return row * columns + column
