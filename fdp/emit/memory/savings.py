"""Which savings of memory a backend uses."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Savings:
    """Which savings of memory a backend uses.

    Attributes:
        views: views that change nothing, and reductions that send nothing, are the tensor that they are given.
        changed_views: so are views of memory that is changed in place. What changes memory by making new values, as a
            functional graph does, needs to know through which view.
        products: products that are only added to something are computed there.
        results: values have fixed places.
        reuse: what is not in use at the same time shares memory.
        donation: new values are computed in the donated inputs; otherwise they are copied there, at the end. Where
            values have fixed places, what is gathered arrives there as well.
        pack_from_bytes: members of at least so many bytes are packed as soon as they are computed.
    """

    views: bool
    changed_views: bool
    products: bool
    results: bool
    reuse: bool
    donation: bool
    pack_from_bytes: float


ALL = Savings(True, True, True, True, True, True, pack_from_bytes=2**16)
"""For a program that runs operator by operator. The memory of smaller members matters less than a call for each."""

COMPILER = Savings(True, False, False, False, False, True, pack_from_bytes=0)
"""For a graph that a compiler gets; it plans the memory of values itself."""

NONE = Savings(False, False, False, False, False, False, pack_from_bytes=math.inf)
"""For a plain program that does exactly what the trace says."""
