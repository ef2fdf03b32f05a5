"""Draw random programs: a program is a function of its seed and the number of ranks."""

from __future__ import annotations

import dataclasses
import random
import re
import warnings
from typing import Any

import torch

import fdp
from fuzz import plain
from fuzz.author import Author, DryRun, Refused
from fuzz.dtypes import FIRST, NOT_SENT, OF_TYPES, TYPES
from fuzz.exchanges import MESHES
from fuzz.gradients import GRADIENTS
from fuzz.outside import assigned, change, hold, read
from fuzz.program import Leaf, Options, Program, Result, Tree, accesses
from fuzz.statements import OF_PARTS, ON_A_MESH, STATEMENTS, forbidden

_MATRIX = (
    "kit.num((4, 4), {s})", "kit.num((4, 4), {s}).t()", "kit.num((8, 4), {s})[::2]", "kit.num((4, 8), {s})[:, ::2]",
    "torch.zeros(4, 4).to(F)", "kit.num((4, 4), {s})", "kit.num((5, 4), {s})[1:]",
)  # fmt: skip
_OTHERS = (
    "kit.num((4,), {s})", "kit.num((), {s})", "kit.num((2, 4), {s})", "kit.num((2, 4, 4), {s})",
    "torch.zeros(4).to(F)", "kit.num((4, 1), {s})", "kit.num((8,), {s})[::2]",
)  # fmt: skip
_SHARED = ("{o}", "{o}[1:]", "{o}.t()", "{o}.view_as({o})", "{o}[0]", "torch.from_numpy({o}.numpy())", "{o}.detach()")
_CLOSED = (("table", "kit.num((4, 4), 901)"), ("row", "table[0]"), ("count", "kit.num((), 902)"))
_BETWEEN = ("table.mul_(0.5)", "table.add_(1)", "table[0].neg_()", "count.add_(1)", "row.zero_()")

OPTIMIZERS = (
    "torch.optim.SGD, lr=0.5", "torch.optim.SGD, lr=0.5, momentum=0.5",
    "torch.optim.SGD, lr=0.25, weight_decay=0.5", "torch.optim.AdamW, lr=0.125, eps=0.5",
    "torch.optim.Adam, lr=0.125, eps=0.5, fused=True", "torch.optim.RMSprop, lr=0.125, eps=0.5",
    "torch.optim.Adagrad, lr=0.25, eps=0.5", "torch.optim.SGD, lr=0.5, momentum=0.5, foreach=True",
    "torch.optim.AdamW, lr=0.125, eps=0.5, fused=False",
)  # fmt: skip
"""With a large eps: a gradient of nothing but rounding then moves nothing."""


def draw(seed: int, world: int) -> Program:
    """Draw a program.

    Args:
        seed: any number.
        world: the number of ranks.
    """
    rng = random.Random(f"{seed} {world}")
    state = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _draw(rng, seed, world)
    finally:
        torch.set_rng_state(state)


def draw_options(rng: random.Random, world: int) -> Options:
    """How a program is run."""
    cap, latency = rng.choice(
        [(25.0, None)] * 4 + [(1e-9, None)] * 3 + [([1e-5, 25.0], None), (6e-5, None), ("auto", 1e-4), ("auto", 1e-7)]
    )
    wire = rng.choice(["bfloat16", "bfloat16", "float16"]) if rng.random() < 0.08 else None
    return Options(
        donate=rng.random() < 0.5,
        bucket_cap_mb=cap,
        latency_s=latency,
        wire_dtype=wire,
        accumulate_dtype="float32" if wire and rng.random() < 0.5 else None,
        check_trace=rng.random() < 0.7,
        same_batch=rng.random() < 0.2,
        shard=world > 1 and rng.random() < 0.2,
    )


class _Drawing:
    """A program that is being drawn."""

    def __init__(self, rng: random.Random, seed: int, world: int) -> None:
        self.rng, self.exact = rng, rng.random() < 0.6
        self.options = draw_options(rng, world)
        plainly = DryRun(world)
        self.kit = plain.Kit(plainly, self.exact)
        self.author = Author(rng, self.exact, {"torch": torch, "fdp": plainly, "kit": self.kit, "F": torch.float32})
        self.author.env["fdp"].random = fdp.random
        self.setup: list[str] = []
        self.leaves: list[Leaf] = []
        self.closed: tuple[tuple[str, str], ...] = ()
        self.optimizers: list[tuple[str, str, list[str]]] = []
        # Of a generator of its own: programs without other dtypes are what they would be without these.
        self.of_types = self.author.of_types = random.Random(f"types {seed} {world}").random() < 0.3
        r = rng.random()
        self.naughty = (
            "state" if r < 0.03 else "batch" if r < 0.045 else "closed" if r < 0.08 else "data" if r < 0.1 else ""
        )

    def inputs(self, world: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        rng, env = self.rng, self.author.env
        names = iter("abcdeghst")
        for index in range(rng.randint(1, 4)):
            name, kind = next(names), rng.random()
            tensors = [leaf.name for leaf in self.leaves if isinstance(env[leaf.name], torch.Tensor)]
            if kind < 0.12 and tensors:
                text = rng.choice(_SHARED).format(o=rng.choice(tensors))
            else:
                text = rng.choice(_MATRIX if index == 0 or kind < 0.7 else _OTHERS).format(s=index + 1)
            self._leaf(name, text)
        if rng.random() < 0.25:
            self._leaf("k", rng.choice(["torch.tensor([1, 2, 0])", "torch.tensor(3)", "torch.arange(4)"]))
        if rng.random() < 0.15:
            self._leaf("n", "3")
        if rng.random() < 0.1:
            self._leaf("flag", "True")
        if rng.random() < 0.1:
            self._leaf("mask", "torch.tensor([True, False, True, False])")
        for name in "uw"[: rng.choice([0, 1, 2]) if self.of_types else 0]:
            self._leaf(name, rng.choice(FIRST).format(d=rng.choice(TYPES)))
        batch = [("x", (4, 4))] + ([("y", (4,))] if rng.random() < 0.5 else [])
        for index, (name, shape) in enumerate(batch):
            env[name] = self.kit.num(shape, 77 + index)
            self.author.add(name, True, fixed=self.naughty != "batch", given=True)
        if rng.random() < 0.35:
            self.closed = _CLOSED[: rng.randint(1, 3)]
            for name, text in self.closed:
                env[name] = eval(text, env)
                self.author.add(name, False, fixed=self.naughty != "closed", given=True)
        if rng.random() < 0.2:
            self.setup += hold(self.author)
        return tuple(batch)

    def _leaf(self, name: str, text: str) -> None:
        try:
            self.author.env[name] = eval(text, self.author.env)
        except Exception:
            return
        own = hasattr(fdp, "PerRank") and self.rng.random() < 0.1
        own = own and isinstance(self.author.env[name], torch.Tensor)
        self.leaves.append(Leaf(name, text, name, own))
        self.author.add(name, own, fixed=not self.options.donate and self.naughty != "state", given=True)

    def optimizer(self) -> None:
        """One optimizer more, for some of the state."""
        env, rng = self.author.env, self.rng
        tensors = [leaf for leaf in self.leaves if isinstance(env[leaf.name], torch.Tensor) and not leaf.own]
        fit = [leaf.name for leaf in tensors if env[leaf.name].dtype == torch.float32]
        if not fit:
            return
        params = rng.sample(fit, rng.randint(1, len(fit)))
        number = len(self.optimizers)
        name, state = f"opt{number}", f"o{number}"
        line = f"{name} = fdp.optim.from_torch({rng.choice(OPTIMIZERS)})"
        tree = "{" + ", ".join(f'"{p}": {p}' for p in params) + "}"
        exec(line, env)
        env[state] = eval(f"{name}.init({tree})", env)
        self.setup.append(line)
        self.leaves.append(Leaf(state, f"{name}.init({tree})", state))
        self.optimizers.append((name, state, params))

    def update(self) -> None:
        """A step of an optimizer, with gradients that there are."""
        author, rng = self.author, self.rng
        name, state, params = rng.choice(self.optimizers)
        if any(author.varies(param) for param in params):
            raise Refused
        grads = []
        for p in params:
            alike = author.tensors(lambda x, p=p: x.shape == author.env[p].shape and x.dtype == torch.float32)
            fit = [name for name in alike if not author.varies(name)][-4:]
            if not fit:
                raise Refused
            grads.append(rng.choice(fit))
        new, made = author.fresh(), [author.fresh() for _ in params]
        after = author.fresh()
        pairs = ", ".join(f'"{p}": {g}' for p, g in zip(params, grads, strict=False))
        olds = ", ".join(f'"{p}": {p}' for p in params)
        taken = ", ".join(f'{new}["{p}"]' for p in params)
        last = next(leaf.new for leaf in self.leaves if leaf.name == state)
        text = f"{new}, {after} = {name}.update({{{pairs}}}, {last}, {{{olds}}})\n{', '.join(made)}, = {taken},"
        author.write(text, {**dict.fromkeys(made, False), after: False})
        self.leaves = [Leaf(x.name, x.make, after, x.own) if x.name == state else x for x in self.leaves]
        by_name = dict(zip(params, made, strict=False))
        if rng.random() < 0.8:
            self.leaves = [Leaf(x.name, x.make, by_name.get(x.name, x.new), x.own) for x in self.leaves]

    def body(self) -> None:
        rng, author = self.rng, self.author
        more = ON_A_MESH if author.env["fdp"].axis_size() in MESHES else ()
        more += OF_PARTS if self.options.shard else ()
        more += tuple((4 * often, kind) for often, kind in OF_TYPES) if self.of_types else ()
        weights, kinds = zip(*(STATEMENTS + GRADIENTS + more), strict=True)
        count = rng.choice([3, 5, 8, 8, 12, 12, 16, 22])
        # Once or so in a program, several times more often: what is rare meets itself then.
        liked = rng.choices(range(len(kinds)), k=2)
        weights = tuple(w * (5 if index in liked else 1) for index, w in enumerate(weights))
        tries = 0
        while len(author.lines) < count and tries < 6 * count:
            tries += 1
            try:
                if self.optimizers and rng.random() < 0.06:
                    self.update()
                elif author.outside and rng.random() < 0.15:
                    read(author)
                elif self.naughty == "data" and rng.random() < 0.15:
                    forbidden(author)
                else:
                    rng.choices(kinds, weights)[0](author)
            except Refused:
                continue

    def finish(self) -> None:
        """Choose what becomes of the state."""
        author, rng, env = self.author, self.rng, self.author.env
        leaves = []
        for leaf in self.leaves:
            old = env[leaf.name]
            if leaf.new == leaf.name and isinstance(old, torch.Tensor) and rng.random() < 0.75:
                alike = author.tensors(lambda x, old=old: (x.shape, x.dtype) == (old.shape, old.dtype))
                fits = [n for n in alike if n[0] == "v" and (leaf.own or not author.varies(n))]
                if fits:
                    leaf = Leaf(leaf.name, leaf.make, rng.choice(fits[-5:]), leaf.own)
            if not leaf.own and isinstance(env[leaf.new], torch.Tensor) and author.varies(leaf.new):
                # It was written with what varies.
                average = "fdp.pmean({})" if old.dtype == torch.float32 else "fdp.pmax({})"
                new = ("torch.zeros_like({})" if old.dtype in NOT_SENT else average).format(leaf.new)
                leaf = Leaf(leaf.name, leaf.make, new, leaf.own)
            leaves.append(leaf)
        self.leaves = leaves

    def between(self) -> tuple[str, ...]:
        """What the user does between two calls."""
        rng, names = self.rng, {name for name, _ in self.closed}
        writes = [line for line in _BETWEEN if line.split(".")[0].split("[")[0] in names]
        lines = (rng.choice(writes),) if writes and rng.random() < 0.4 else ()
        if self.closed and rng.random() < 0.15:
            lines += assigned(rng, self.closed)
        if self.author.outside and rng.random() < 0.6:
            lines += change(self.author)
        # A name has to be called nonlocal before it is used.
        return tuple(sorted(lines, key=lambda line: not line.startswith("nonlocal")))

    def results(self) -> tuple[tuple[Result, ...], set[str]]:
        author, rng, found, traits = self.author, self.rng, [], set()
        undeclared = rng.random() < 0.08
        names = [n for n in author.names if isinstance(author.env[n], torch.Tensor) and n[0] == "v"]
        chosen = list(dict.fromkeys(rng.choices(names[-8:] or ["x"], k=3) + rng.choices(names or ["x"], k=2)))
        if rng.random() < 0.3:
            chosen.append(rng.choice([n for n in author.names if isinstance(author.env[n], torch.Tensor)]))
        for name in chosen:
            own = author.varies(name)
            if own and undeclared:
                own = False
                traits.add("undeclared")
            forms = ["{}"] * 6 + ["{} * 1", "{}[:]", "{} + 0", "{}.detach()", "{}.clone()"]
            floating = author.env[name].is_floating_point() and author.env[name].dim() > 0
            found.append(Result(rng.choice(forms if floating else ["{}"]).format(name), own))
        return tuple(found), traits


def _draw(rng: random.Random, seed: int, world: int) -> Program:
    drawing = _Drawing(rng, seed, world)
    batch = drawing.inputs(world)
    if rng.random() < 0.3:
        for _ in range(rng.choice([1, 1, 2])):
            drawing.optimizer()
    tree = _tree(rng, [leaf.name for leaf in drawing.leaves])
    drawing.body()
    drawing.finish()
    results, traits = drawing.results()
    if drawing.naughty:
        traits.add(drawing.naughty)
    if any("numpy" in leaf.make for leaf in drawing.leaves):
        traits.add("same bytes")
    names = {leaf.name for leaf in drawing.leaves}
    aliases = any(names & set(re.findall(r"\w+", leaf.make)) for leaf in drawing.leaves)
    if aliases or "state" in traits or "same bytes" in traits:  # parts are copies
        drawing.options = dataclasses.replace(drawing.options, shard=False)
    return Program(
        seed=seed,
        world=world,
        exact=drawing.exact,
        leaves=tuple(drawing.leaves),
        tree=tree,
        batch=batch,
        setup=tuple(drawing.setup),
        closed=drawing.closed,
        body=tuple(drawing.author.lines),
        results=results,
        between=drawing.between(),
        traits=frozenset(traits | drawing.author.traits),
        options=drawing.options,
    )


def _tree(rng: random.Random, names: list[str]) -> Tree:
    """Some structure around the leaves."""
    top: list[Any] = [(name, name) for name in names]
    for number in range(rng.choice([0, 0, 1, 2])):
        if len(top) < 2:
            break
        size = rng.randint(1, min(3, len(top)))
        taken, top = top[:size], top[size:]
        kind = rng.choice(["dict", "list", "tuple"] + (["box"] if size == 2 else []))
        keys: Any = {"list": range(size), "tuple": range(size), "box": "xy"}.get(kind, [key for key, _ in taken])
        top.append((f"m{number}", (kind, tuple((key, child) for key, (_, child) in zip(keys, taken, strict=False)))))
    tree = ("dict", tuple(top))
    assert set(accesses(tree)) == set(names)
    return tree
