"""Restores what a step uses besides its arguments: random numbers, generators, and closed-over tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fdp.compare.leaves import same_bits
from fdp.errors import PurityError, TraceError, build_message
from fdp.runtime.emitted import Emitted
from fdp.trace.operators.effects import effects_of, storages_of
from fdp.trace.operators.source import located

_UNUSED_SEED = 0x6E6F626F6479

RandomState = list[Any]
"""The states of all generators that a step may draw from; see `random_states`."""


def accelerators(emitted: Emitted) -> list[int]:
    """The accelerators of a step's inputs."""
    return sorted({item.device.index or 0 for item in emitted.plan.trace.inputs if item.device.type == "cuda"})


def _held_generators(emitted: Emitted) -> list[torch.Generator]:
    """The generators of random numbers that a step closes over."""
    graph = emitted.plan.trace.graph
    held = [getattr(graph, str(node.target), None) for node in graph.graph.find_nodes(op="get_attr")]
    return list({id(value): value for value in held if isinstance(value, torch.Generator)}.values())


@contextmanager
def undisturbed(emitted: Emitted) -> Iterator[None]:
    """Let a step draw random numbers, and then restore the generators."""
    generators = _held_generators(emitted)
    states = [generator.get_state() for generator in generators]
    with torch.random.fork_rng(devices=accelerators(emitted)):
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def random_states(emitted: Emitted) -> RandomState:
    """The states of the generators of the devices, and of those that the step holds."""
    devices = [torch.cuda.get_rng_state(index) for index in accelerators(emitted)]
    return [torch.get_rng_state(), devices, [generator.get_state() for generator in _held_generators(emitted)]]


def set_random_states(emitted: Emitted, states: RandomState) -> None:
    """Go back to what `random_states` returned."""
    own, devices, held = states
    torch.set_rng_state(own)
    for index, state in zip(accelerators(emitted), devices, strict=True):
        torch.cuda.set_rng_state(state, index)
    for generator, state in zip(_held_generators(emitted), held, strict=True):
        generator.set_state(state)


def seed_held_generators(emitted: Emitted) -> None:
    """Seed the generators that a step holds with a number that no program uses."""
    for generator in _held_generators(emitted):
        generator.manual_seed(_UNUSED_SEED)


def held_generator_states(emitted: Emitted) -> list[bytes]:
    """The states of the generators that a step holds."""
    return [bytes(generator.get_state().tolist()) for generator in _held_generators(emitted)]


def own_generator(name: str, emitted: Emitted) -> TraceError:
    """The refusal for a generator that a step makes or seeds: the trace holds it, and would go on with it."""
    held = emitted.plan.trace.graph.graph.find_nodes(op="get_attr")
    generators = [node for node in held if isinstance(getattr(node.graph.owning_module, node.target), torch.Generator)]
    offenders = [f"{user.target} at {user.meta.get('source')}" for node in generators for user in node.users]
    return TraceError(
        build_message(
            f"step {name!r} makes a torch.Generator or seeds one: each call of the step restarts it, and the traced "
            "step would continue with it.",
            offenders,
            remedy="make the generator outside of the step, where it continues from call to call; or pass the random "
            "numbers.",
        )
    )


def other_random_state() -> tuple[Any, ...]:
    """The state of Python's random numbers, and of NumPy's if it is in use."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else _comparable(numpy.random.get_state(legacy=False))


def _comparable(state: object) -> Any:
    """A state of NumPy's, with the bytes of its arrays: their text takes milliseconds to write."""
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


@contextmanager
def closed_over_unchanged(emitted: Emitted) -> Iterator[None]:
    """Restore the tensors that a step closes over, and refuse the step if it changes one.

    A trace refuses changes that it sees. Here is what it does not: through NumPy, `.data`, a view of a view.

    Raises:
        PurityError: names each tensor that was changed, and the lines that may have done so.
    """
    trace = emitted.plan.trace
    held = {id(t): (t, target, name) for target, name in trace.closed_over for t in [getattr(trace.graph, target)]}
    kept = [
        (tensor, target, name, tensor.detach().clone())
        for tensor, target, name in held.values()
        if tensor.layout == torch.strided
    ]
    changed: list[str] = []

    def restore() -> None:
        with torch.no_grad():
            for tensor, target, name, value in kept:
                if not same_bits(tensor.detach(), value):
                    tensor.detach().copy_(value)
                    changed.append(f"{name}{_written_at(emitted, target)}")

    try:
        yield
    except Exception as error:
        restore()
        if changed:
            raise _refusal(trace.name, changed) from error
        raise
    restore()
    if changed:
        raise _refusal(trace.name, changed)


def _written_at(emitted: Emitted, target: str) -> str:
    """The lines of operators of the trace that write to the memory of a closed-over tensor, or use it."""
    graph = emitted.plan.trace.graph.graph
    memory = {storage for node in graph.find_nodes(op="get_attr", target=target) for storage in storages_of(node)}
    using = [node for node in graph.nodes if node.op == "call_function" and _touches(node, memory)]
    lines = [node for node in using if any(not memory.isdisjoint(storages_of(x)) for x in effects_of(node).writes)]
    found = lines or using
    return f", used by {located(found[0])}" if found and found[0].meta.get("source") else ""


def _touches(node: Any, memory: set[int]) -> bool:
    return any(not memory.isdisjoint(storages_of(argument)) for argument in node.all_input_nodes)


def _refusal(name: str, changed: list[str]) -> PurityError:
    return PurityError(
        build_message(
            f"step {name!r} changes tensors that it closes over; they have been put back to what they were before the "
            "comparison of step and trace.",
            changed,
            remedy="pass them as donated arguments, and return their new values.",
        )
    )
