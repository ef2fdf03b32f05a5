"""Steps that meet what an emitter decides of state: donated, exchanged, returned twice, changed in place."""

from __future__ import annotations

from typing import Any

import torch
from faulty_program import DOUBLE, Program, Tree, registering

PROGRAMS: dict[str, Program] = {}
_program = registering(PROGRAMS)
_RETURNED = torch.arange(12.0, dtype=DOUBLE).view(3, 4) / 7 * 2  # the caller may write to what he is given


@_program({"a": (4, 4), "b": (4, 4), "d": (4, 4), "e": (4, 4), "f": (4, 4), "g": (4, 4)}, {"x": (4, 4)})
def old_values(c: Any, s: Tree, b: Tree) -> Any:
    """New values of donated state whose old value is still read: later, by the update, or by other results."""
    a = s["a"].clone()
    a.mul_(0.9)
    late = s["a"] * c.pmean(b["x"])
    a.add_(late)
    new_b = s["b"].clone()
    new_b.addmm_(s["b"], b["x"])
    new_d = s["d"] * 0.5
    kept = s["d"].t() + c.pmean(b["x"] * 2)
    new_e = torch.flip(s["e"], (0,))
    read = torch.flip(s["e"], (1,)) + c.psum(b["x"])
    new_g = s["f"] * 1.5  # changes places
    return {"a": a, "b": new_b, "d": new_d, "e": new_e, "f": s["g"], "g": new_g}, [late, kept, read, s["d"].sum()]


@_program({"a": (3, 3), "b": (3, 3), "x": (3, 3), "d": (3, 3), "e": (3, 3), "f": (3, 3), "g": (3, 3)}, {"x": (3, 3)})
def exchanged(c: Any, s: Tree, b: Tree) -> Any:
    """Donated inputs that change places, become the batch, one value or an average, or are changed after being read."""
    one = torch.tanh(b["x"]) * 2
    mean = c.pmean(b["x"] * 3)
    doubled = s["e"] * 2
    s["e"].zero_()
    rolled = torch.roll(s["g"], 1)
    rolled.add_(c.pmean(b["x"]))
    new = {"a": s["b"], "b": s["a"], "x": b["x"], "d": one, "e": doubled, "f": mean, "g": rolled}
    return new, [one, s["x"][0], s["d"] + 1, mean, s["f"].sum(), torch.roll(s["g"], 1) * mean]


_SQUARE = {"x": (40, 40)}


@_program({key: (40, 40) for key in "abvgtq"}, _SQUARE)
def updated_by_itself(c: Any, s: Tree, b: Tree) -> Any:
    """State that is read by what makes its new value, sent after that was made, or read when that has been sent."""
    new_t = s["t"] * 3
    a = s["a"].clone()
    a.addmm_(s["a"], b["x"])
    value = torch.tanh(b["x"])
    mean, sent = c.pmean((value, s["t"]))
    g = torch.roll(s["g"], 1)
    torch._foreach_add_([g], [mean])
    return {"a": a, "b": s["b"] @ b["x"], "v": value, "g": g, "t": new_t, "q": b["x"]}, [s["v"] * mean, sent * 2]


@_program({"a": (3, 3), "b": (3, 3)}, {"x": (3, 3)})
def one_value_twice(c: Any, s: Tree, b: Tree) -> Any:
    """One value is the new state of two leaves."""
    value = s["a"] * 0.5 + b["x"]
    return {"a": value, "b": value}, [value.t()]


@_program({"w": (5, 5), "v": (5, 5), "u": (5, 5)}, {"x": (5, 5)}, cap=0.0001)
def sent_and_updated(c: Any, s: Tree, b: Tree) -> Any:
    """State that is averaged, gathered and updated by what needs no message."""
    return {"w": s["w"] + 1, "v": s["v"].clone().mul_(2.0), "u": torch.flip(s["u"], (0,))}, [
        c.pmean(s["w"] * 1.0),
        c.pmean(s["w"]),
        c.all_gather(s["v"]),
        c.psum(s["u"]),
    ]


@_program({"v": (2, 4), "w": (2, 4), "u": (2, 4), "z": (2, 4)}, {"x": (4,)})
def refilled(c: Any, s: Tree, b: Tree) -> Any:
    """State whose new value is gathered: that nothing reads, that is read once more, read before, and sent itself."""
    v, w = c.all_gather(b["x"] * 2), c.all_gather(b["x"] * 3)
    u, z = c.all_gather(s["u"][0] + b["x"]), c.all_gather(s["z"][1])
    return {"v": v, "w": w, "u": u, "z": z}, [s["w"] * c.pmean(b["x"]), v * 2, u.t(), z[1:]]


def _with_gaps(g: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 8, generator=g, dtype=DOUBLE)[:, ::2]


@_program({"w": (4, 4), "v": (4, 4), "g": _with_gaps, "h": _with_gaps}, {"x": (4, 4)}, calls=1)
def lies_otherwise(c: Any, s: Tree, b: Tree) -> Any:
    """New state that is turned, or has gaps, or has several elements in one place, and old state with gaps twice."""
    turned = (s["w"] + c.pmean(b["x"])).t().clone()
    return {"w": turned, "v": s["v"][0].expand(4, 4), "g": s["g"], "h": s["g"]}, [s["h"][1:]]


@_program({"w": (4, 4)}, {"x": (4, 4)})
def returned(c: Any, s: Tree, b: Tree) -> Any:
    """Results that share memory with buckets, constants, closed-over tensors and each other."""
    mean, gathered = c.pmean(b["x"] * 2), c.all_gather(b["x"] * 3)
    value = torch.tanh(b["x"])
    ones = torch.full((3,), 0.25, dtype=DOUBLE)
    return {"w": s["w"] + mean}, [mean, mean[1:], gathered, gathered[1], value, value.t(), ones, _RETURNED]


@_program({"c": (16,), "d": (2, 8), "e": (16,), "f": (4, 4), "g": (16,), "h": (4, 4)}, {"x": (4, 4)})
def reshaped(c: Any, s: Tree, b: Tree) -> Any:
    """New state that is a view of what an operator makes: of all of it, twice, of a part, turned, and of itself."""
    both, twice = torch.tanh(b["x"]), torch.cat([b["x"], b["x"] * 2]).view(32)
    turned = (b["x"].t() * 3).t()
    new = {"c": both.view(16), "d": both.view(2, 8), "e": twice[:16], "f": turned}
    return {**new, "g": (s["g"].view(4, 4) @ b["x"]).view(16), "h": (s["c"].view(4, 4) + b["x"]).clone()}, [
        c.pmean(s["e"]),
        both.sum(0),
    ]
