"""What programs compute as plain PyTorch, call by call and rank by rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

import fdp
from fuzz import plain
from fuzz.joint import defined
from fuzz.program import Program


@dataclasses.dataclass
class Call:
    """One call on one rank.

    Attributes:
        leaves: paths and copies of what the step returned: the state, and the results.
        strides: of each leaf.
        shared: for each leaf, whether it shares memory with the new state or with what the step closes over.
        changed: for each kind of input, the paths of those that were changed in place.
        written: kinds of input that were written in place, if only with what they held.
        geometry: of state, batch and closed-over tensors after the call.
        closed: copies of the closed-over tensors, after the call.
        drawn: a random number that is drawn after the call.
    """

    leaves: list[tuple[str, Any]]
    strides: list[Any]
    shared: list[bool]
    changed: dict[str, list[str]]
    written: set[str]
    geometry: list[Any]
    closed: list[Any]
    drawn: float


def seed_of(rank: int, call: int) -> int:
    return 1000 * call + rank + 1


def run_plain(
    programs: Sequence[Program], wide: bool = False, noise: float = 0.0, noise_seed: int = 0
) -> list[list[Call]]:
    """Run programs as one step in plain PyTorch.

    Args:
        programs: with the same world and options.
        wide: in float64, and gradients are not rounded for the wire.
        noise: relative size of random changes to inputs and to what collectives return.
        noise_seed: of these.

    Returns:
        For each rank its calls.
    """
    first, options = programs[0], programs[0].options
    wire = getattr(torch, options.wire_dtype) if options.wire_dtype else None
    world = plain.World(first.world, wire, wide, noise, noise_seed)
    define = defined(programs)

    def one(rank: int) -> list[Call]:
        own = plain.Plain(world, rank)
        own.random = fdp.random  # numbers by key: a function, of plain operators, that ranks and calls do not change
        kit = plain.Kit(own, first.exact)
        make_state, make_batch, step, between, closed = define(own, kit)
        state, calls = make_state(rank), []
        for number in range(options.calls):
            batch = make_batch(rank, number)
            inputs = {"state": state, "batch": batch, "closed": closed}
            before = {kind: plain.mapped(copied, tree) for kind, tree in inputs.items()}
            versions = {kind: versions_of(tree) for kind, tree in inputs.items()}
            torch.manual_seed(seed_of(rank, number))
            new, results = step(state, batch)
            drawn = float(torch.rand(()))
            changed = {
                kind: [
                    path
                    for (path, x), (_, y) in zip(plain.parts(tree), plain.parts(before[kind]), strict=False)
                    if not same(x, y)
                ]
                for kind, tree in inputs.items()
            }
            leaves = plain.parts((new, results))
            held = {memory(leaf) for _, leaf in plain.parts((new, closed)) if isinstance(leaf, torch.Tensor)}
            calls.append(
                Call(
                    [(path, copied(leaf)) for path, leaf in leaves],
                    [strides(leaf) for _, leaf in leaves],
                    [memory(leaf) in held for _, leaf in leaves],
                    changed,
                    {kind for kind, tree in inputs.items() if changed[kind] or versions[kind] != versions_of(tree)},
                    geometry((state, batch, closed)),
                    [copied(x) for _, x in plain.parts(closed)],
                    drawn,
                )
            )
            state = unshared(new) if "state" in calls[-1].written else apart_from(closed, new)
            between()
        return calls

    return world.run(one)


def detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def apart_from(closed: Any, state: Any) -> Any:
    """The state, with copies of what lies in the memory of closed-over tensors: fdp returns no such memory."""
    theirs = {memory(x) for _, x in plain.parts(closed)}
    return plain.mapped(lambda x: copied(x) if memory(x) in theirs else detached(x), state)


def unshared(state: Any) -> Any:
    """A copy of each leaf: what a step returned twice is two values, of which a later call may write one."""
    return plain.mapped(lambda x: x.detach().contiguous().clone() if isinstance(x, torch.Tensor) else x, state)


def copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def versions_of(tree: Any) -> list[int]:
    return [x._version for _, x in plain.parts(tree) if isinstance(x, torch.Tensor)]


def memory(leaf: Any) -> int:
    return leaf.untyped_storage().data_ptr() if isinstance(leaf, torch.Tensor) else -1


def strides(leaf: Any) -> Any:
    """How a tensor lies in memory: what asks for it (`contiguous`, `reshape`) goes one way or another."""
    if not isinstance(leaf, torch.Tensor) or leaf.numel() == 0:
        return None
    return [step for step, size in zip(leaf.stride(), leaf.shape, strict=True) if size != 1]


def geometry(tree: Any) -> list[Any]:
    """Shape and strides of every tensor of a tree."""
    return [
        (path, tuple(x.shape), tuple(x.stride())) if isinstance(x, torch.Tensor) else (path, x)
        for path, x in plain.parts(tree)
    ]


def same(x: Any, y: Any) -> bool:
    """Equal to the bit, or both NaN; constants are equal."""
    if not isinstance(x, torch.Tensor):
        return bool(x == y)
    # fdp.axis_index() is on the CPU.
    x, y = x.detach().cpu(), y.detach().cpu()
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x.nan_to_num(12345.0), y.nan_to_num(12345.0))
