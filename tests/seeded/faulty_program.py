"""A step with its data, for faults to be made in what emits it.

Each is written over `c`, which is fdp or, for the expected numbers, `simulated_ranks.Plain`. Sizes are as small as they
can be: a bucket of 1 MiB is filled with divided values, a member of 64 KiB is packed early.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Tree = Any
DOUBLE = torch.float64


@dataclass(frozen=True)
class Program:
    """A step with its data.

    Attributes:
        step: `step(c, state, batch) -> (new_state, results)`.
        state: makes the first state.
        batch: makes the batch of a rank and call.
        donate: whether the state is donated.
        cap: `bucket_cap_mb`.
        world: number of ranks.
        mesh: names and sizes of its dimensions, if they are on one.
        options: further ones of `data_parallel`.
        tolerance: by what share of its largest value a result may differ from plain PyTorch.
        calls: how often it is called; once where the new state lies in memory otherwise than the old.
    """

    step: Callable[[Any, Tree, Tree], Any]
    state: Callable[[], Tree]
    batch: Callable[[int, int], Tree]
    donate: bool = True
    cap: Any = 25
    world: int = 2
    mesh: tuple[tuple[str, int], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9
    calls: int = 3

    @property
    def name(self) -> str:
        return self.step.__name__


def registering(programs: dict[str, Program]) -> Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """A decorator that puts steps into a table; shapes stand for random numbers, tensors for themselves."""

    def program(
        state: dict[str, Any], batch: dict[str, Any], **kwargs: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def register(step: Callable[..., Any]) -> Callable[..., Any]:
            def make(kinds: dict[str, Any], seed: int) -> Tree:
                g = torch.Generator().manual_seed(seed)
                return {key: _make(kind, g) for key, kind in kinds.items()}

            programs[step.__name__] = Program(
                step, lambda: make(state, 1), lambda rank, call: make(batch, 100 + 10 * call + rank), **kwargs
            )
            return step

        return register

    return program


def _make(kind: Any, g: torch.Generator) -> Any:
    if isinstance(kind, torch.Tensor):
        return copied(kind)
    if isinstance(kind, dict):
        return {key: _make(each, g) for key, each in kind.items()}
    if callable(kind):
        return kind(g)
    return torch.randn(kind, generator=g, dtype=DOUBLE) / 4


def optimizer_of(cls: Any, params: dict[str, Any], **kwargs: Any) -> tuple[Any, Callable[[torch.Generator], Tree]]:
    """An optimizer, and what makes its first state for parameters."""
    import fdp

    optimizer = fdp.optim.from_torch(cls, **kwargs)
    g = torch.Generator().manual_seed(5)
    made = {key: _make(kind, g) for key, kind in params.items()}
    return optimizer, lambda g: optimizer.init(made)


def indices(most: int, *shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda g: torch.randint(0, most, shape, generator=g)


def copied(tree: Tree) -> Tree:
    """Other memory, same values and strides."""
    if isinstance(tree, dict):
        return {k: copied(v) for k, v in tree.items()}
    span = 1 + sum((size - 1) * stride for size, stride in zip(tree.shape, tree.stride(), strict=True))
    if tree.numel() == 0 or tree.is_conj() or tree.is_neg():
        return tree.clone()
    return tree.as_strided((span,), (1,)).clone().as_strided(tree.shape, tree.stride(), 0)
