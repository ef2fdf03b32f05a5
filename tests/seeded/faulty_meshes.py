"""Steps on a mesh: collectives along each of its dimensions, and large sums in two levels."""

from __future__ import annotations

from typing import Any

from faulty_program import Program, Tree, registering

PROGRAMS: dict[str, Program] = {}
_program = registering(PROGRAMS)

MESH = (("hosts", 2), ("local", 3))
LARGE = 40_001
"""Elements of more than 256 KiB, which three ranks do not share evenly."""


@_program({"w": (6, 6)}, {"x": (6, 6)}, donate=False, world=6, mesh=MESH)
def along(c: Any, s: Tree, b: Tree) -> Any:
    """The same collectives of the same sizes along both dimensions, which may not share a message."""
    x = b["x"] @ s["w"]
    found = []
    for axis in ("hosts", "local"):
        place = c.axis_index(axis) + 1
        found += [c.psum(x * 2, axis=axis), c.pmean(x + 1, axis=axis), c.pmax(x * 3, axis=axis)]
        found += [c.all_gather(x, axis=axis).sum(0), c.broadcast(x * 4, root=1, axis=axis) * place]
        found += [c.psum_scatter(x * place, axis_name=axis), c.pmean_scatter(x, axis_name=axis)]
    return s, [*found, c.pmean(x), c.psum(found[0] * c.axis_index())]


@_program({"w": (200, 201)}, {"x": (200, 200), "n": (LARGE,)}, cap=0.3, world=6, mesh=MESH)
def in_two_levels(c: Any, s: Tree, b: Tree) -> Any:
    """Sums and means that are computed in their buckets, copied there, and made of each other."""
    product = b["x"] @ (s["w"] * 2)
    mean, total = c.pmean(product), c.psum(b["n"] * 3)
    within = c.pmean(b["n"].repeat(4) + mean[0, 0], axis="local")  # of more than 1 MiB: divided where it is packed
    again = c.pmean(within[:LARGE] + total[:1])
    return {"w": s["w"] + 0.1 * mean}, [total * 2, within[::7], again, mean.t()[3]]
