"""What a random step reads from outside, other than tensors: how it is held, how it is read, how it changes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from fuzz.author import Author, Refused


@dataclasses.dataclass(frozen=True)
class Holder:
    """Something that the step closes over, and that is another thing after a call.

    Attributes:
        setup: the lines that make it.
        reads: statements of it and a tensor `{a}`. Each makes memory of its own, whatever the value is: what a step may
            write is known from the first value.
        change: the lines that change it between two calls.
        equal: what the statements give is the same on all ranks, whatever `{a}` is: they send messages.
    """

    setup: tuple[str, ...]
    reads: tuple[str, ...]
    change: tuple[str, ...]
    equal: bool = False


def _of_a_number(name: str) -> tuple[str, ...]:
    return (
        f"{{a}} * {name}", f"{{a}} + {name}", f"{{a}}.clamp(-{name}, {name})",
        f"torch.where({{a}} > {name}, {{a}}, 0.5)",
    )  # fmt: skip


def _of_a_flag(name: str) -> tuple[str, ...]:
    return (f"{{a}} * 2 if {name} else -{{a}}", f"{{a}} + 1 if not {name} else {{a}}.relu()")


HOLDERS = (
    Holder(("rate = 0.5",), _of_a_number("rate"), ("nonlocal rate", "rate = 1.5 - rate")),
    Holder(("flip = False",), _of_a_flag("flip"), ("nonlocal flip", "flip = not flip")),
    Holder(
        ('table_of = {"rate": 0.5, "flip": True, "unused": 0}',),
        (*_of_a_number('table_of["rate"]'), *_of_a_flag('table_of["flip"]')),
        ('table_of["rate"] = 1.5 - table_of["rate"]', 'table_of["flip"] = not table_of["flip"]'),
    ),
    Holder(
        ("config = kit.Box(0.5, False)", "other = config"),
        (*_of_a_number("config.x"), *_of_a_flag("config.y")),
        ("other.x = 1.5 - other.x", "config.y = not config.y"),
    ),
    Holder(("rates = [0.5, 1.0]",), (*_of_a_number("rates[0]"), *_of_a_number("rates[-1]")), ("rates.reverse()",)),
    Holder(
        ("mode = 'relu'",),
        ("getattr(torch, mode)({a})", "{a}.abs() if mode == 'abs' else {a} * 2"),
        ("nonlocal mode", "mode = 'abs' if mode == 'relu' else 'relu'"),
    ),
    Holder(
        ("act = torch.relu",), ("act({a})", "act({a} * 2)"),
        ("nonlocal act", "act = torch.abs if act is torch.relu else torch.relu"),
    ),
    Holder(
        ("scale = 0.5", "def helper(q):", "    return q * scale + q"), ("helper({a})",),
        ("nonlocal scale", "scale = 1.5 - scale"),
    ),
    Holder(
        ("gate = torch.nn.Threshold(0.5, 0.25)",),
        ("gate({a})", *_of_a_flag("gate.training")),
        ("gate.threshold = 1.0 - gate.threshold", "gate.train(not gate.training)"),
    ),
    Holder(
        ("sums = True",),
        (
            "fdp.psum({a}) * 0.25 if sums else fdp.pmax({a}.detach())",
            "fdp.pmean({a}) if sums else fdp.pmin({a}.detach())",
        ),
        ("nonlocal sums", "sums = not sums"), equal=True,
    ),
    # Each call is traced again, and computes what it did.
    Holder(("seen = 0",), ("{a} * 2 if seen < 100 else {a}",), ("nonlocal seen", "seen += 1")),
)  # fmt: skip

ASSIGNED = "nonlocal {name}", "{name} = {name} * 0.5", "closed[{index}] = {name}"
"""A closed-over tensor becomes another one."""


def hold(author: Author) -> tuple[str, ...]:
    """Let a step read something from outside; returns the lines that make it."""
    author.outside = tuple(author.rng.sample(HOLDERS, author.rng.choice([1, 1, 2])))
    lines = tuple(line for holder in author.outside for line in holder.setup)
    exec("\n".join(lines), author.env)
    return lines


def read(author: Author) -> None:
    """A statement that reads it."""
    if not author.outside:
        raise Refused
    holder = author.rng.choice(author.outside)
    text = author.rng.choice(holder.reads).format(a=author.pick())
    author.write(f"{(v := author.fresh())} = {text}", {v: False if holder.equal else None})


def change(author: Author) -> tuple[str, ...]:
    """Lines that change something of it between two calls."""
    lines = author.rng.choice(author.outside).change
    apart = not lines[0].startswith("nonlocal")
    return tuple(author.rng.sample(lines, author.rng.randint(1, len(lines)))) if apart else lines


def assigned(rng: random.Random, closed: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Lines after which one of the closed-over tensors is another one."""
    index = rng.randrange(len(closed))
    return tuple(line.format(name=closed[index][0], index=index) for line in ASSIGNED)
