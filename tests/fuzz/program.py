"""What a random program is: a step as text, the state that it begins with, and how it is run.

The text defines one function, `define(fdp, kit)`, and can be run with fdp itself or with `plain.Plain` in its place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

Tree = Any
"""The name of a leaf, or ("dict" | "list" | "tuple" | "box", ((key, tree), ...))."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the state.

    Attributes:
        name: the variable that the step holds it in.
        make: an expression of its first value; of `kit`, and of the leaves before it.
        new: an expression of its next value, in the step.
        own: whether it is labelled as each rank's own.
    """

    name: str
    make: str
    new: str
    own: bool = False


@dataclasses.dataclass(frozen=True)
class Result:
    """One thing that the step returns beside the state; `own` if it is declared with `fdp.per_rank`."""

    text: str
    own: bool


@dataclasses.dataclass(frozen=True)
class Options:
    """How a program is run; the names are those of `fdp.data_parallel` where it has one.

    Attributes:
        latency_s: of the network that buckets are chosen for, if `bucket_cap_mb` is "auto".
        same_batch: every call gets the batch of the first.
        shard: each rank gets a part of each leaf of the state that can be divided.
    """

    donate: bool = False
    compile: bool = False
    bucket_cap_mb: Any = 25.0
    wire_dtype: str | None = None
    accumulate_dtype: str | None = None
    check_trace: bool = True
    latency_s: float | None = None
    calls: int = 3
    same_batch: bool = False
    shard: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A random program.

    Attributes:
        seed: what it was drawn from, for people.
        world: the number of ranks.
        exact: its numbers are small whole ones.
        leaves: of the state, in the order in which they are made.
        tree: the structure of the state.
        batch: names and shapes of the tensors of the batch.
        setup: lines before all, such as the making of an optimizer.
        closed: names of the tensors that the step closes over, and how each is made.
        body: the lines of the step.
        results: what it returns beside the state.
        between: lines that the user runs between two calls.
        traits: what it does that a step may be refused for, or that one may want to leave out.
    """

    seed: int
    world: int
    exact: bool
    leaves: tuple[Leaf, ...]
    tree: Tree
    batch: tuple[tuple[str, tuple[int, ...]], ...]
    setup: tuple[str, ...]
    closed: tuple[tuple[str, str], ...]
    body: tuple[str, ...]
    results: tuple[Result, ...]
    between: tuple[str, ...] = ()
    traits: frozenset[str] = frozenset()
    options: Options = Options()

    @property
    def text(self) -> str:
        """The definition of the step, its state and its batches."""
        states = [f"{leaf.name} = {leaf.make}" for leaf in self.leaves]
        unpack = [f"{name} = state{path}" for name, path in accesses(self.tree).items()]
        unpack += [f'{name} = batch["{name}"]' for name, _ in self.batch]
        new = render(self.tree, {leaf.name: leaf.new for leaf in self.leaves})
        results = ", ".join(f"fdp.per_rank({r.text})" if r.own else r.text for r in self.results)
        batch = ", ".join(
            f'"{name}": kit.num({shape}, {index} + 10 * rank + 100 * call + 7)'
            for index, (name, shape) in enumerate(self.batch)
        )
        call = "call = 0" if self.options.same_batch else "pass"
        labels = [leaf.name for leaf in self.leaves if leaf.own]
        lines = [
            "def define(fdp, kit):",
            "    F = kit.F",
            *(f"    {line}" for line in self.setup),
            *(f"    {name} = {text}" for name, text in self.closed),
            "",
            "    def state(rank):",
            *(f"        {line}" for line in states),
            *(f"        {name} = kit.label({name}, rank)" for name in labels),
            f"        return {render(self.tree, {leaf.name: leaf.name for leaf in self.leaves})}",
            "",
            "    def batch(rank, call):",
            f"        {call}",
            f"        return {{{batch}}}",
            "",
            "    def step(state, batch):",
            *(f"        {line}" for line in unpack),
            *(f"        {line}" for line in self.body),
            f"        return {new}, [{results}]",
            "",
            "    def between():",
            *(f"        {line}" for line in self.between or ("pass",)),
            "",
            f"    closed = [{', '.join(name for name, _ in self.closed)}]",
            "    return state, batch, step, between, closed",
        ]
        return "\n".join(lines) + "\n"

    @property
    def reads_what_changes(self) -> bool:
        """Whether anything that the step closes over is another object after a call."""
        return any(
            " = " in line or " += " in line or line.endswith(("reverse()", "training)")) for line in self.between
        )

    @property
    def owned(self) -> list[bool]:
        """For each result, whether it may differ between ranks."""
        return [result.own for result in self.results]

    @property
    def settings(self) -> str:
        """The keyword arguments of `fdp.data_parallel`, as text."""
        o = self.options
        words = [f"bucket_cap_mb={o.bucket_cap_mb!r}"]
        if o.donate:
            words.append("donate_argnums=0")
        if o.compile:
            words.append("compile=True")
        if o.wire_dtype:
            words.append(f"wire_dtype=torch.{o.wire_dtype}")
        if o.accumulate_dtype:
            words.append(f"accumulate_dtype=torch.{o.accumulate_dtype}")
        if not o.check_trace:
            words.append("check_trace=False")
        if o.latency_s is not None:
            words.append(f"network=fdp.Network(latency_s={o.latency_s!r}, bandwidth_bytes_per_s=1e6)")
        return ", ".join(words)


def accesses(tree: Tree, path: str = "") -> dict[str, str]:
    """The path of each leaf in the state, by name, in the order of the tree."""
    if isinstance(tree, str):
        return {tree: path}
    kind, children = tree
    found: dict[str, str] = {}
    for key, child in children:
        step = {"dict": f'["{key}"]', "box": f".{key}"}.get(kind, f"[{key}]")
        found.update(accesses(child, path + step))
    return found


def render(tree: Tree, texts: dict[str, str]) -> str:
    """The tree as an expression, with a text for each leaf."""
    if isinstance(tree, str):
        return texts[tree]
    kind, children = tree
    inside = [(key, render(child, texts)) for key, child in children]
    if kind == "dict":
        return "{" + ", ".join(f'"{key}": {text}' for key, text in inside) + "}"
    if kind == "box":
        return "kit.Box(" + ", ".join(f"{key}={text}" for key, text in inside) + ")"
    texts_only = ", ".join(text for _, text in inside)
    return f"[{texts_only}]" if kind == "list" else f"({texts_only},)"


def flat(names: list[str]) -> Tree:
    """The plainest tree."""
    return ("dict", tuple((name, name) for name in names))
