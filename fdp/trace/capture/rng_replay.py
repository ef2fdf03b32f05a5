"""Random numbers of a checkpointed function, which draws them again in the backward pass: the same ones.

torch keeps the state of its generators, and sets it back around the recomputation. A trace has neither the state nor
the moment; so both become operators of the graph: `state` keeps it, `rewind` goes back to it and keeps where it was,
`resume` goes on from there. They count as random themselves, so they keep their places among those that draw.
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


def rewind(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Go back to a state of a device's generator; returns the one that it was in."""
    before = _get(device)
    _set(state, device)
    return before


def _fake_state(device: torch.device) -> torch.Tensor:
    return torch.empty(_CPU_BYTES if device.type == "cpu" else _CUDA_BYTES, dtype=torch.uint8)


for _schema, _real, _fake in (
    ("state(Device device) -> Tensor", _get, _fake_state),
    ("rewind(Tensor state, Device device) -> Tensor", rewind, lambda state, device: torch.empty_like(state)),
    ("resume(Tensor state, Device device) -> ()", _set, lambda state, device: None),
):
    _library.define(_schema, tags=(torch.Tag.nondeterministic_seeded,))
    _name = _schema.split("(")[0]
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fdp_generator::{_name}", _fake, lib=_library)

STATE, REWIND, RESUME = (getattr(torch.ops.fdp_generator, name).default for name in ("state", "rewind", "resume"))
let_pass((STATE, REWIND, RESUME))


@contextmanager
def rewound(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
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
            before = [REWIND(state, device) for state, device in zip(states, devices, strict=True)]
            try:
                return function(*args, **kwargs)
            finally:  # torch leaves the function by an exception when it has all that it needs
                for state, device in zip(before, devices, strict=True):
                    RESUME(state, device)

        return same_numbers, False

    with recomputed_by(again):
        yield


def drop_idle_rewinds(graph: fx.Graph) -> None:
    """Leave out what goes back to a state from which nothing is drawn."""
    drawn: dict[fx.Node, int] = {}
    count = 0
    for node in graph.nodes:
        drawn[node] = count
        count += node.op == "call_function" and node.target not in (STATE, REWIND, RESUME) and effects_of(node).random
    for node in reversed(list(graph.nodes)):
        if node.target is REWIND:
            (resume,) = node.users
            if drawn[node] == drawn[resume]:
                graph.erase_node(resume)
                graph.erase_node(node)
        elif node.target is STATE and not node.users:
            graph.erase_node(node)


def drawn_anew(graph: fx.Graph) -> Iterator[fx.Node]:
    """The operators that draw random numbers in a backward pass, and not again those of the forward pass.

    So does what is recomputed with a generator of its own: only those of devices are gone back to.
    """
    depth = 0
    for node in graph.nodes:
        if node.target is REWIND:
            depth += 1
        elif node.target is RESUME:
            depth -= 1
        elif (
            node.op == "call_function"
            and node.meta.get("backward")
            and effects_of(node).random
            and not (depth and _is_gone_back_to(node.kwargs.get("generator")))
        ):
            yield node


def _is_gone_back_to(generator: Any) -> bool:
    """Whether what an operator is given as its generator is the one of a device."""
    if isinstance(generator, fx.Node):  # a constant of the graph
        generator = getattr(generator.graph.owning_module, str(generator.target), generator)
    # Not the objects: an operator is given another one for the same generator.
    devices: list[Any] = [torch.default_generator, *torch.cuda.default_generators]
    ours = [generator_id(one) for one in devices]
    return generator is None or generator_id(generator) in ours
