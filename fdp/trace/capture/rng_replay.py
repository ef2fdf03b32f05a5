"""RNG state replay: a checkpointed function draws the same random numbers when the backward pass recomputes it.

torch saves the states of its generators, and restores them around the recomputation. A trace cannot: it holds no state,
and the recomputation happens in each later call. So operators of the graph do it. `state` returns the state of a
generator, `replay` restores it and returns the present one, and `resume` restores that after the recomputation. They
are tagged as random themselves, so they keep their order among the operators that draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fdp.pytorch.recomputation import let_pass, recomputed_by
from fdp.pytorch.tensors import generator_id
from fdp.trace.operators.effects import effects_of

_library = torch.library.Library("fdp_generator", "DEF")
_CPU_BYTES = torch.default_generator.get_state().numel()
_CUDA_BYTES = 16


def _get(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _set(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def exchange_state(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Restore an earlier state of a device's generator; returns its present state."""
    before = _get(device)
    _set(state, device)
    return before


def _fake_state(device: torch.device) -> torch.Tensor:
    return torch.empty(_CPU_BYTES if device.type == "cpu" else _CUDA_BYTES, dtype=torch.uint8, device="cpu")


for _schema, _real, _fake in (
    ("state(Device device) -> Tensor", _get, _fake_state),
    ("replay(Tensor state, Device device) -> Tensor", exchange_state, lambda state, device: torch.empty_like(state)),
    ("resume(Tensor state, Device device) -> ()", _set, lambda state, device: None),
):
    _library.define(_schema, tags=(torch.Tag.nondeterministic_seeded,))
    _name = _schema.split("(")[0]
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fdp_generator::{_name}", _fake, lib=_library)

STATE, REPLAY, RESUME = (getattr(torch.ops.fdp_generator, name).default for name in ("state", "replay", "resume"))
let_pass((STATE, REPLAY, RESUME))


@contextmanager
def replaying_rng_state(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Trace checkpointed functions so that they draw the same random numbers when they run again.

    Args:
        tensors: the inputs of the step; on their devices, and on the CPU, random numbers may be drawn.
    """
    devices = [torch.device("cpu"), *sorted({x.device for x in tensors if x.is_cuda}, key=str)]

    def again(function: Callable[..., Any], preserve: bool) -> tuple[Callable[..., Any], bool]:
        if not preserve:
            return function, False
        states = [STATE(device) for device in devices]

        def same_numbers(*args: Any, **kwargs: Any) -> Any:
            before = [REPLAY(state, device) for state, device in zip(states, devices, strict=True)]
            try:
                return function(*args, **kwargs)
            finally:  # torch leaves the function by an exception when it has all that it needs
                for state, device in zip(before, devices, strict=True):
                    RESUME(state, device)

        return same_numbers, False

    with recomputed_by(again):
        yield


def drop_unused_replays(graph: fx.Graph) -> None:
    """Remove the replays during which no random number is drawn, and the states that nothing replays."""
    drawn: dict[fx.Node, int] = {}
    count = 0
    for node in graph.nodes:
        drawn[node] = count
        count += node.op == "call_function" and node.target not in (STATE, REPLAY, RESUME) and effects_of(node).random
    for node in reversed(list(graph.nodes)):
        if node.target is REPLAY:
            (resume,) = node.users
            if drawn[node] == drawn[resume]:
                graph.erase_node(resume)
                graph.erase_node(node)
        elif node.target is STATE and not node.users:
            graph.erase_node(node)


def drawn_anew(graph: fx.Graph) -> Iterator[fx.Node]:
    """The operators of a backward pass that draw random numbers other than those of the forward pass.

    Among them are recomputed operators with a generator of the user's: only states of default generators are replayed.
    """
    depth = 0
    for node in graph.nodes:
        if node.target is REPLAY:
            depth += 1
        elif node.target is RESUME:
            depth -= 1
        elif (
            node.op == "call_function"
            and node.meta.get("backward")
            and effects_of(node).random
            and not (depth and _is_replayed(node.kwargs.get("generator")))
        ):
            yield node


def _is_replayed(generator: object) -> bool:
    """Whether the generator that an operator is given is the default one of a device, whose state is replayed."""
    if isinstance(generator, fx.Node):  # a constant of the graph
        generator = getattr(generator.graph.owning_module, str(generator.target), generator)
    # Not the objects: an operator is given another one for the same generator.
    devices: list[Any] = [torch.default_generator, *torch.cuda.default_generators]
    ours = [generator_id(one) for one in devices]
    return generator is None or generator_id(generator) in ours
