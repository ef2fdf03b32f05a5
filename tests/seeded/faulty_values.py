"""Steps that meet what an emitter decides of values: places, views, changes in place, constants."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from faulty_program import DOUBLE, Program, Tree, registering

PROGRAMS: dict[str, Program] = {}
_program = registering(PROGRAMS)


@_program({"w": (6, 6), "b": (6,)}, {"x": (5, 6)}, donate=False)
def chain(c: Any, s: Tree, b: Tree) -> Any:
    """Many values of some sizes, of which most die early and some late."""
    found = []
    x = b["x"]
    for size in (6, 3, 5, 2, 6):
        h = torch.tanh(x @ s["w"] + s["b"])
        wide = torch.cat([h, h * 2, h[:size]], 0)
        kept = wide[:, :size] * 1.5
        norm = torch.sigmoid(h) @ s["w"]
        soft = torch.softmax(norm, -1)
        x = soft * norm + h
        small = kept.sum(0)
        found.append((kept, small, torch.relu(norm - 0.1)))
    total = sum(k.sum() + (n * 2).sum() for k, _, n in found)
    return s, [x * 2, total, torch.cat([m for _, m, _ in found]) * 2]


@_program({"w": (6, 6)}, {"x": (8, 6)}, donate=False)
def views(c: Any, s: Tree, b: Tree) -> Any:
    """Views by offset, stride, transposition, as other types, of complex numbers; written through, too."""
    rows = b["x"].t().sum(1)
    h = torch.tanh(b["x"] @ s["w"])
    late, early = h[3:], h[:5]
    columns, strided = h[:, 2:4], h[::2, 1::2]
    part = h.view(-1)[:24]
    moved = part.as_strided((24,), (1,), 12)
    pieces = torch.chunk(h, 3, 1)
    mixed = late * 2 - early + pieces[1].sum() - pieces[2].t()[0, 0]
    h[2:4].mul_(2.0)
    strided.add_(1.0)
    z = torch.complex(h * 1.0, torch.sin(h))
    turned = (z * z).conj()
    first = (turned + 1).abs().sum()
    halves = torch.chunk((z * 2).conj(), 2)
    second = (halves[0] + 1).abs().sum() + halves[1].abs().sum()
    cover = torch.sin(torch.cos(z) * 2) * 3 + torch.sin(z * 3)
    third = (cover * (torch.cos(z) * 2 + cover)).abs().sum() + first + second
    spread = torch.sin(h * 3)
    bits = spread.view(torch.int64)
    other = torch.cos(h) * 2
    last = [
        third + rows.sum(),
        torch.sinh(h).t().t() * 2,
        turned + other,
        halves[0] * halves[1],
        bits.to(torch.float32) * 2,
        moved * 1.0,
        part + moved,
        columns * 1.0,
    ]
    return s, [mixed, h * 1.0, *last]


@_program({"w": (3, 5)}, {"x": (3, 5)}, donate=False)
def by_places(c: Any, s: Tree, b: Tree) -> Any:
    """Elements by their places, of values that what they are taken apart into lays out otherwise."""
    closed = torch.cat([b["x"].new_empty(0), (b["x"] + s["w"]).t()])
    changed = b["x"] * s["w"]
    changed.t().triu_()
    return s, [closed.as_strided((15,), (1,)) * 2, changed.as_strided((15,), (1,)) * 3]


@_program({"w": (5, 5), "n": torch.zeros((), dtype=torch.bfloat16)}, {"x": (5, 5)}, donate=False)
def in_place(c: Any, s: Tree, b: Tree) -> Any:
    """Operators that change fixed places, seen through earlier views; forms with numbers; products of square values."""
    h = b["x"] @ s["w"]
    seen = h.t()
    h.add_(0.5)
    torch.relu_(h)
    h[1].zero_()
    scaled = torch.addmm(h, b["x"], s["w"].t(), beta=0.3, alpha=1.7)
    upside_down = torch.addmm(h[0], scaled, s["w"].flip(0))
    squared = upside_down @ s["w"]
    filled = torch.full((5, 5), 0.75, dtype=DOUBLE)
    filled.mul_(h)
    filled = filled * 2
    zeros, ones = torch.zeros_like(h), torch.ones_like(h)
    zeros.add_(squared)
    ones.mul_(h).sub_(1)
    mask = torch.tril(torch.ones_like(h)) * h
    counts = [s["n"].clone(), s["n"] + 1]
    torch._foreach_add_(counts, 0.1)
    clipped = torch.relu(squared - 1) + torch.tril(squared) + F.mse_loss(squared, filled, reduction="none")
    return s, [seen * 2, upside_down * 2, squared * squared.t(), filled, zeros * 2, ones * 2, mask, clipped, *counts]


_TABLE = torch.arange(12.0, dtype=DOUBLE).view(3, 4) / 7
_OTHER = torch.arange(12.0, dtype=DOUBLE).view(3, 4) - 1.5


@_program({"w": (4, 4)}, {"x": (3, 4)})
def closed_over(c: Any, s: Tree, b: Tree) -> Any:
    """Closed-over tables, ranges of numbers, this rank's number, and a condition."""
    positions = torch.arange(4, dtype=DOUBLE) * 2
    h = b["x"] + _TABLE * 2 - _OTHER + positions
    buffer = torch.zeros(4, dtype=DOUBLE)
    buffer.add_(h.sum(0))
    own = h * (c.axis_index() + 1)
    return {"w": s["w"] + c.pmean(own.t() @ h)}, [buffer * 2, c.psum(own), torch.arange(4) + c.axis_index()]


@_program({"w": (4, 4)}, {"x": (3, 4)}, donate=False)
def condition(c: Any, s: Tree, b: Tree) -> Any:
    """A branch that is not taken."""
    h = torch.tanh(b["x"] @ s["w"])
    chosen = torch.cond(h.sum() > 100, lambda x, y: x * 2, lambda x, y: y * 3, (h * 1.5, h - 1))
    later = torch.sin(b["x"]) @ s["w"]
    return s, [chosen + later, later * 2, chosen.sum()]


@_program({"w": (4, 4), "v": (4, 4), "u": (4, 4)}, {"x": (3, 4)}, world=1)
def alone(c: Any, s: Tree, b: Tree) -> Any:
    """One rank: what sends nothing may return its argument, unless one of the two is changed later."""
    h = torch.tanh(b["x"] @ s["w"])
    mean = c.pmean(h)
    changed = c.psum(h * 2)
    source = h * 3
    other = c.pmean(source)
    source.add_(1)
    kept = source * 2
    doubled = c.pmean(kept)
    doubled.mul_(2)
    return {"w": s["w"] + 1, "v": s["v"] * 2, "u": c.pmean(s["u"] + h.sum())}, [
        mean,
        changed + 1,
        other,
        doubled * 1,
        kept + doubled,
        c.pmean(s["w"]),
        c.psum(s["v"]) * 2,
        c.all_gather(h),
    ]
