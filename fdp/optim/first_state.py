"""The state of a parameter before its first step, of classes that make it in that step.

The classes of torch have a method for it. Most others ask in `step` whether a parameter has a state yet, and make one
if it has none. So one step is taken on a copy, and what each entry was first set to is kept. That is the state before
the step only where it does not depend on the gradient, and where a step from it does what the first step does. Both are
tried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim

from fdp.state.containers import container_of

Build = Callable[[list[Tensor]], optim.Optimizer]
OptimizerStep = Callable[[optim.Optimizer], Any]


class NoFirstState(Exception):
    """A class whose first step cannot be taken apart into a state and a step from it."""


def first_values(build: Build, step: OptimizerStep, p: Tensor) -> dict[str, Any]:
    """Find what a class sets each entry of a parameter's state to before its first step.

    Args:
        build: makes an instance for some parameters.
        step: takes a step of an instance.
        p: the parameter, which stays as it is.

    Returns:
        The entries. Those that are tensors are copies.

    Raises:
        NoFirstState: the class has no such state: an entry starts with the gradient, or a step from this state differs
            from the first one.
    """
    # The same numbers whatever the run has drawn so far, and none of those that the run will draw.
    generator = torch.Generator().manual_seed(0)
    grads = [_drawn(p, generator) for _ in range(2)]
    with torch.random.fork_rng():
        (q, state), (_, other) = (_after(build, step, p, grad, _Recorded(), seed=1) for grad in grads)
        first = dict(state.first)
        late = [key for key in first if not _same(first[key], other.first.get(key))]
        if late or first.keys() != other.first.keys():
            raise NoFirstState(
                f"its state starts with the first gradient ({', '.join(map(repr, late or other.first))})"
            )
        copies = {key: _copy(value) for key, value in first.items()}
        again, found = _after(build, step, p, grads[0], copies, seed=1)
    if not _same(q, again) or found.keys() != state.keys() or not all(_same(state[key], found[key]) for key in state):
        raise NoFirstState("its first step is not a step from the state that it starts with")
    return first


class _Recorded(dict[str, Any]):
    """The state of a parameter, with what each entry was first set to."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = _copy(value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: object = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> _Recorded:  # type: ignore[override, misc]
        self.update(other)
        return self


def _after(build: Build, step: OptimizerStep, p: Tensor, grad: Tensor, state: object, seed: int) -> tuple[Tensor, Any]:
    """A copy of a parameter after one step from a state, and the state."""
    torch.manual_seed(seed)
    q = p.detach().clone()
    optimizer = build([q])
    q.grad, optimizer.state[q] = grad.clone(), state
    step(optimizer)
    return q, state


def _drawn(p: Tensor, generator: torch.Generator) -> Tensor:
    """A gradient. That of a parameter in parts has one number everywhere, so that no rank needs the whole."""
    if container_of(p).role == "part":
        return torch.full_like(p, float(torch.randn((), generator=generator, device="cpu")))
    dtype = torch.complex64 if p.is_complex() else torch.float32
    return torch.randn(p.shape, generator=generator, dtype=dtype, device="cpu").to(dtype=p.dtype, device=p.device)


def _copy(value: object) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _same(one: object, two: object) -> bool:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return type(one) is type(two) and bool(one == two)
    alike = (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
    return alike and torch.equal(_bits(one), _bits(two))


def _bits(value: Tensor) -> Tensor:
    tensor: Tensor = container_of(value).tensor(value.detach())
    return tensor.reshape(-1).view(torch.uint8)
