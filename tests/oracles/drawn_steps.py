"""Random steps for properties of programs, each a list of lines of Python, carried out plainly or under fdp."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

import fdp

Tree = Any

STATE: dict[str, tuple[int, ...]] = {"a": (4, 3), "b": (4, 3), "c": (12,), "d": (), "s": (3, 3)}
BATCH: dict[str, tuple[int, ...]] = {"x": (4, 3), "y": (12,)}


@dataclasses.dataclass(frozen=True)
class Program:
    """A step as a text, and the function `step(state, batch) -> (state, metrics)` that the text defines."""

    source: str
    step: Callable[[Tree, Tree], Tree] = dataclasses.field(repr=False)

    def __repr__(self) -> str:
        return "\n" + self.source


def programs(most: int = 14, writes_inputs: bool = False) -> st.SearchStrategy[Program]:
    """Draw a step of up to `most` lines; a shorter one is the beginning of a longer."""
    return st.builds(_draw_program, st.integers(0, 2**32), st.integers(0, most), st.just(writes_inputs))


@dataclasses.dataclass
class _Value:
    name: str
    shape: tuple[int, ...]
    owner: str  # whose memory it may be: "state", "batch", or the variable that it was made as
    writable: bool = True
    updates: str = ""  # the leaf of the state that it is the new value of


class _Author:
    """Writes a program line by line, and keeps account of shapes and of who shares memory with whom."""

    def __init__(self, rng: random.Random, writes_inputs: bool) -> None:
        self.rng, self.writes_inputs = rng, writes_inputs
        self.lines: list[str] = []
        self.values = [_Value(k, shape, "state") for k, shape in STATE.items()]
        self.values += [_Value(k, shape, "batch") for k, shape in BATCH.items()]

    def pick(self, shape: tuple[int, ...] | None = None, dims: int = 0) -> _Value:
        """A value of a shape, or of so many dimensions; later ones more often."""
        fitting = [v for v in self.values if (shape is None or v.shape == shape) and len(v.shape) >= dims]
        state = [v for v in fitting if v.owner == "state"]
        if state and self.rng.random() < 0.2:
            return self.rng.choice(state)
        return self.rng.choice(fitting[-5:] if self.rng.random() < 0.6 else fitting)

    def pick_writable(self) -> _Value | None:
        inputs = ("state", "batch") if not self.writes_inputs else ("batch",)
        fitting = [v for v in self.values if v.writable and v.owner not in inputs]
        return self.rng.choice(fitting) if fitting else None

    def new(self, text: str, *made: tuple[tuple[int, ...], str | None]) -> None:
        """Add a line that makes one value or more: of a shape, in the memory of an owner (None: its own)."""
        names = [f"v{len(self.values) + k}" for k in range(len(made))]
        self.lines.append(f"{', '.join(names)} = {text}")
        for name, (shape, owner) in zip(names, made, strict=True):
            self.values.append(_Value(name, shape, owner or name, "expand" not in text))

    def pointwise(self) -> None:
        a = self.pick()
        text = self.rng.choice(
            ["torch.tanh({})", "torch.sin({})", "{} * 0.5", "-{}", "torch.relu({})", "{} + 1", "{}.clone()", "{}.abs()"]
        )
        self.new(text.format(a.name), (a.shape, None))

    def binary(self) -> None:
        a = self.pick()
        b = self.pick(a.shape)
        text = self.rng.choice(
            [
                "{} + {}",
                "torch.tanh({} * {})",
                "torch.maximum({}, {})",
                "torch.where({0} > 0, {0}, {1})",
                "{} - 0.1 * {}",
            ]
        )
        self.new(text.format(a.name, b.name), (a.shape, None))

    def shrink(self) -> None:
        a = self.pick(dims=1)
        text, shape = self.rng.choice(
            [("{}.sum()", ()), ("{}.mean(0)", a.shape[1:]), ("{}.amax(-1)", a.shape[:-1]), ("{}.norm()", ())]
        )
        self.new(text.format(a.name), (shape, None))

    def product(self) -> None:
        a, b = self.pick((4, 3)), self.pick((4, 3))
        name = f"v{len(self.values)}"
        self.new(f"torch.tanh({a.name} @ {b.name}.t())[:, :3]", ((4, 3), name))

    def view(self) -> None:
        a = self.pick(dims=1)
        choices: list[tuple[str, tuple[tuple[int, ...], ...]]] = [
            ("{}.detach()", (a.shape,)),
            ("{}.unsqueeze(0).squeeze(0)", (a.shape,)),
            ("{}.view_as({})", (a.shape,)),
            ("{}[1:]", ((a.shape[0] - 1, *a.shape[1:]),)),
            ("{}[0]", (a.shape[1:],)),
            ("{}.expand(2, *{}.shape)[1]", (a.shape,)),
        ]
        if a.shape == (4, 3):
            choices += [
                ("{}.reshape(12)", ((12,),)),
                ("{}.t().t()", ((4, 3),)),
                ("{}.chunk(2)", ((2, 3), (2, 3))),
                ("{}.unbind(1)", ((4,), (4,), (4,))),
                ("{}[:, 1]", ((4,),)),
                ("{}.t().diagonal()", ((3,),)),
            ]
        if a.shape == (3, 3):
            choices += [("{}.t()", ((3, 3),)), ("{}.t()[1:]", ((2, 3),)), ("{}.t().t()", ((3, 3),))]
        if a.shape == (12,):
            choices += [("{}.reshape(4, 3)", ((4, 3),)), ("{}.view(3, 4).t()", ((4, 3),)), ("{}[::3]", ((4,),))]
        if a.shape[0] > 1:
            text, shapes = self.rng.choice(choices)
            self.new(text.format(a.name, a.name), *((shape, a.owner) for shape in shapes))

    def in_place(self) -> None:
        a = self.pick_writable()
        if a is None:
            return
        others = [v for v in self.values if v.shape == a.shape and v.owner != a.owner]
        choices = ["{}.mul_(0.5)", "{}.tanh_()", "{}.zero_()", "{}.clamp_(-1, 1)", "{}.add_(1)", "{}.fill_(0.25)",
                   "{}.copy_({}.clone() + 1)"]  # fmt: skip
        if a.shape:
            choices += ["{}[0].add_(1)", "{}[:2] = 0.5", "{}[-1].zero_()"]
        if len(a.shape) == 2:
            choices += ["{}.t().mul_(2)", "{}[:, 0] = {}[:, 1].clone()", "{}[1:3, :2].sub_(1)"]
        b = self.rng.choice(others).name if others else None
        if b:
            choices += ["{}.add_({b})", "{}.copy_({b})", "{}.mul_({b}).add_(0.5)", "{}.masked_fill_({b} > 0, 0.25)",
                        "{}.lerp_({b}, 0.1)", "torch.add({b}, 1, out={})"]  # fmt: skip
            if a.shape:
                choices += ["{}[:2] = {b}[:2]", "{}[0].add_({b}[0])", "{}.index_add_(0, torch.tensor([0, 1]), {b}[:2])"]
        text = self.rng.choice(choices)
        if a.shape and a.shape[0] < 2 and ":2" in text:
            return
        if len(a.shape) == 2 and a.shape[1] < 2:
            return
        self.lines.append(text.format(a.name, a.name, b=b))

    def update(self) -> None:
        """What an optimizer does: a leaf of the state is cloned, and the clone is changed in place."""
        a = self.pick(self.rng.choice(list(STATE.values())))
        self.new(f"{a.name}.clone()", (a.shape, None))
        self.values[-1].updates = a.name
        self.lines.append(f"{self.values[-1].name}.mul_(0.5).add_({self.pick(a.shape).name})")

    def lists(self) -> None:
        """Operators on lists, as optimizers use them: functional, and in place on clones."""
        a, b = self.pick(), self.pick()
        if self.rng.random() < 0.4:
            self.new(f"torch._foreach_mul([{a.name}, {b.name}], 0.5)", (a.shape, None), (b.shape, None))
            return
        at = len(self.values)
        self.new(f"[{a.name}.clone(), {b.name}.clone()]", (a.shape, None), (b.shape, None))
        text = self.rng.choice(
            [
                "torch._foreach_add_([v{0}, v{1}], [{2}, {3}], alpha=0.5)",
                "torch._foreach_mul_([v{0}, v{1}], 0.5)",
                "torch._foreach_lerp_([v{0}, v{1}], [{2}, {3}], 0.25)",
            ]
        )
        self.lines.append(text.format(at, at + 1, self.pick(a.shape).name, self.pick(b.shape).name))

    def several(self) -> None:
        """Operators with several results."""
        a = self.pick((4, 3))
        text, shapes = self.rng.choice(
            [
                ("torch.max({}, 0)[0]", [(3,)]),
                ("torch.aminmax({})", [(), ()]),
                ("torch.var_mean({}, 0)", [(3,), (3,)]),
                ("torch.split({} * 1, [1, 3])", [(1, 3), (3, 3)]),
            ]
        )
        if "split" in text:
            self.new(text.format(a.name), *((shape, f"v{len(self.values)}") for shape in shapes))
        else:
            self.new(text.format(a.name), *((shape, None) for shape in shapes))

    def noise(self) -> None:
        a = self.pick()
        text = self.rng.choice(
            [
                "torch.rand_like({})",
                "F.dropout({}, 0.5)",
                "{} + torch.randn({}.shape)",
                "torch.bernoulli({}.sigmoid().nan_to_num(0.5))",
                "{}.clone().uniform_()",
            ]
        )
        self.new(text.format(a.name, a.name), (a.shape, None))

    def collective(self) -> None:
        a, b = self.pick(), self.pick()
        text, shapes = self.rng.choice(
            [
                ("fdp.pmean({})", [a.shape]),
                ("fdp.psum({})", [a.shape]),
                ("fdp.pmax({})", [a.shape]),
                ("fdp.pmin({})", [a.shape]),
                ("fdp.broadcast({})", [a.shape]),
                ("fdp.all_gather({}).amax(0)", [a.shape]),
                ("fdp.pmean([{}, {}])", [a.shape, b.shape]),
                ("fdp.pmean({}, weight=3)", [a.shape]),
                ("fdp.all_gather({})[0]", [a.shape]),
                ("fdp.pmean({}, weight=b.abs().sum())", [a.shape]),
                ("fdp.psum_scatter(torch.stack([{}] * fdp.axis_size()))[0]", [a.shape]),
                (
                    "fdp.all_to_all({}[None].expand(fdp.axis_size(), -1), 0, 0)[0]"
                    if len(a.shape) == 1
                    else "fdp.ppermute({}, [(0, 0)])",
                    [a.shape],
                ),
            ]
        )
        owner = f"v{len(self.values)}" if "[0]" in text else None
        self.new(text.format(a.name, b.name), *((shape, owner) for shape in shapes))

    def gradient(self) -> None:
        a = self.pick()
        b = self.pick(a.shape)
        text, shapes = self.rng.choice(
            [
                ("fdp.grad(lambda p: torch.tanh(p * {b}).sum())({a})", [a.shape]),
                ("fdp.value_and_grad(lambda p: (p.sin() + {b}).square().mean())({a})", [(), a.shape]),
                ("fdp.grad(lambda p, q: (p * q).tanh().sum(), argnums=(0, 1))({a}, {b})", [a.shape, b.shape]),
                ("fdp.grad(lambda p: F.dropout(p * {b}, 0.5).sum() + fdp.pmean(p).norm())({a})", [a.shape]),
            ]
        )
        self.new(text.format(a=a.name, b=b.name), *((shape, None) for shape in shapes))

    KINDS = (pointwise, pointwise, binary, binary, shrink, product, view, view, view, in_place, in_place, in_place,
             update, update, lists, several, noise, collective, collective, gradient)  # fmt: skip


def _draw_program(seed: int, lines: int, writes_inputs: bool) -> Program:
    rng = random.Random(seed)
    ending = random.Random(seed + 1)  # so that what is returned does not depend on how many lines there are
    author = _Author(rng, writes_inputs)
    for _ in range(lines):
        rng.choice(author.KINDS)(author)
    new: dict[str, _Value] = {}
    for key, shape in STATE.items():
        fitting = [v for v in author.values if v.shape == shape]
        own = next(v for v in fitting if v.name == key)
        updated = [v for v in fitting if v.updates == key]
        if updated and ending.random() < 0.7:
            new[key] = updated[-1]
            continue
        # What it was, another leaf or an intermediate: mostly something late.
        new[key] = own if ending.random() < 0.15 else ending.choice(fitting[-3:] if ending.random() < 0.7 else fitting)
    metrics = [ending.choice(author.values[-6:]) for _ in range(ending.randint(0, 3))]
    if ending.random() < 0.3:
        metrics.append(ending.choice(list(new.values())))
    state = ", ".join(f"'{key}': {value.name}" for key, value in new.items())
    body = [f"{k} = state['{k}']" for k in STATE] + [f"{k} = batch['{k}']" for k in BATCH] + author.lines
    body.append(f"return {{{state}}}, [{', '.join(v.name for v in metrics)}]")
    source = "def step(state, batch):\n" + "\n".join("    " + line for line in body) + "\n"
    namespace: dict[str, Any] = {"torch": torch, "fdp": fdp, "F": torch.nn.functional}
    exec(compile(source, "<drawn step>", "exec"), namespace)
    return Program(source, namespace["step"])


def new_state(seed: int = 0) -> Tree:
    g = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=g) for key, shape in STATE.items()}


def new_batch(seed: int) -> Tree:
    g = torch.Generator().manual_seed(1000 + seed)
    return {key: torch.randn(shape, generator=g) for key, shape in BATCH.items()}
