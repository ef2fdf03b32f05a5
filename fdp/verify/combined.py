"""What each collective does to a value, as far as a proof looks at it: its name, its root or pairs, and shapes.

The proof assumes nothing of the numbers. What ranks compute of a value together is an unknown function of it.
"""

from __future__ import annotations

from typing import Any

IN_PLACE = ("mean", "sum", "max", "min", "broadcast")
"""Those whose result lies where the value lay that was sent."""

SPLIT = ("sum_scatter", "mean_scatter", "all_to_all")
"""Those of whose argument the first dimension has an entry for each rank."""

STACKED = ("all_gather", "all_to_all")
"""Those of whose result the first dimension has an entry for each rank."""

OPERATORS = (
    "fdp::all_reduce", "fdp::all_gather", "fdp::broadcast", "fdp::reduce_scatter", "fdp::all_to_all", "fdp::permute",
)  # fmt: skip
"""The operators that stand for them in a trace."""


def shape_of(op: str, shape: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """The shape of a collective's result, from the shape of the value and the number of ranks.

    Example:
        >>> shape_of("sum_scatter", (2, 5), 2), shape_of("all_gather", (5,), 2), shape_of("all_to_all", (2, 5), 2)
        ((5,), (2, 5), (2, 5))
    """
    own = shape[1:] if op in SPLIT else shape
    return (size, *own) if op in STACKED else own


def named(operator: str, given: Any) -> tuple[str, Any]:
    """The collective that an operator stands for, and its root or pairs.

    Args:
        operator: its name.
        given: its arguments, by name.

    Returns:
        The name as buckets have it, and the root, or the pairs.
    """
    if operator == "fdp::all_reduce":
        return given["op"], 0
    if operator == "fdp::reduce_scatter":
        return f"{given['op']}_scatter", 0
    if operator == "fdp::permute":
        flat = tuple(given["pairs"])
        return "permute", tuple(zip(flat[::2], flat[1::2], strict=True))
    return operator.removeprefix("fdp::"), given.get("root", 0)


def root_or_pairs(bucket: Any) -> Any:
    """The root of a bucket's broadcast, or the pairs of its permutation."""
    return tuple(bucket.pairs) if bucket.op == "permute" else bucket.root
