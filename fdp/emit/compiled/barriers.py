"""Operators that a compiler must not move: they start messages and wait for them, or change memory in place.

Each exists twice. The first has a schema without side effects: functionalization, which knows no messages and turns
every change of memory into a new value, leaves such an operator alone. The second declares what it changes;
`declare_effects` replaces the first by it when the graph is functional, so that the compiler keeps the order.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fdp.emit.memory.elements import with_strides
from fdp.pytorch.overloads import schema_of
from fdp.trace.capture.rng_replay import REPLAY, RESUME, STATE, exchange_state
from fdp.trace.operators.effects import FUSED_OPTIMIZERS

_aten = torch.ops.aten
_library = torch.library.Library("fdp_compiled", "DEF")

DECLARED: dict[Any, Any] = {}
"""For each operator without declared effects, the one that takes its place."""


IMPLEMENTED: dict[str, Callable[..., Any]] = {}
"""What each operator calls, by its name."""


class _Running(threading.local):
    """The step that a thread is running: what to call when its program starts a bucket, waits for one, or gets to a
    loop; and what it draws from besides torch's own generators."""

    start: Callable[[int], None] | None = None
    wait: Callable[[int], None] | None = None
    loops: Sequence[Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]] = ()
    generators: Sequence[torch.Generator] = ()


_running = _Running()


@contextmanager
def running(
    start: Any, wait: Any, loops: Sequence[Callable[..., None]] = (), generators: Sequence[torch.Generator] = ()
) -> Iterator[None]:
    """Set what `start`, `wait` and `loop` call in this thread, and the generators that `draw` knows by number.

    Compiled code is cached across processes and shared between steps, so it cannot hold them itself.
    """
    before = _running.start, _running.wait, _running.loops, _running.generators
    _running.start, _running.wait, _running.loops, _running.generators = start, wait, loops, generators
    try:
        yield
    finally:
        _running.start, _running.wait, _running.loops, _running.generators = before


def current_generators() -> Sequence[torch.Generator]:
    """The generators of the step that this thread is running, besides torch's own."""
    return _running.generators


def _start(slots: Sequence[torch.Tensor], bucket: int) -> None:
    assert _running.start is not None
    _running.start(bucket)


def _wait(slots: Sequence[torch.Tensor], bucket: int) -> None:
    assert _running.wait is not None
    _running.wait(bucket)


def _loop(changed: Sequence[torch.Tensor], others: Sequence[torch.Tensor], number: int) -> None:
    _running.loops[number](changed, others)


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    target.copy_(value)


def _multiply(target: torch.Tensor, one: torch.Tensor, two: torch.Tensor, factor: float) -> None:
    out = target.view(one.shape[0], two.shape[1])
    if factor == 1.0:
        torch.mm(one, two, out=out)
    else:
        # The sum with beta=0 does not read what is there: the product is scaled in the pass that writes it.
        torch.addmm(out, one, two, beta=0, alpha=factor, out=out)


def _snapshot(value: torch.Tensor, stride: Sequence[int] | None = None) -> torch.Tensor:
    return with_strides(value, value.stride() if stride is None else stride, anew=True)


def _fake_snapshot(value: torch.Tensor, stride: Sequence[int] | None = None) -> torch.Tensor:
    lies = value.stride() if stride is None else stride
    return torch.empty_strided(value.shape, lies, dtype=value.dtype, device=value.device)


def _fake_like(value: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(value)


def _nothing_new(*args: Any, **kwargs: Any) -> None:
    pass


def define(
    name: str, schema: str, run: Callable[..., Any], *tags: torch.Tag, fake: Callable[..., Any] = _nothing_new
) -> Any:
    """Define an operator.

    Args:
        name: its name.
        schema: what it takes and returns.
        run: what it does.
        tags: further tags.
        fake: what it returns for fake tensors.
    """
    # A compiler may lay values out as it likes, but not these: fused optimizers do not look at strides.
    _library.define(f"{name}{schema}", tags=(torch.Tag.needs_exact_strides, *tags))
    _library.impl(name, run, "CompositeExplicitAutograd")
    IMPLEMENTED[name] = run
    operator = getattr(torch.ops.fdp_compiled, name).default
    torch.library.register_fake(f"fdp_compiled::{name}", fake, lib=_library)
    # So that no pass takes it for dead code.
    torch.fx.has_side_effect(operator)
    return operator


start = define("start", "(Tensor[] slots, int bucket) -> ()", _start)
wait = define("wait", "(Tensor[] slots, int bucket) -> ()", _wait)
loop = define("loop", "(Tensor[] changed, Tensor[] others, int number) -> ()", _loop)
copy_into = define("copy_into", "(Tensor target, Tensor value) -> ()", _copy)
snapshot = define("snapshot", "(Tensor value, int[]? stride=None) -> Tensor", _snapshot, fake=_fake_snapshot)
"""A copy with the original's strides, or given ones. No pass may replace it by the original, which is changed later."""

start_ = define("start_", "(Tensor(a!)[] slots, int bucket) -> ()", _start)
wait_ = define("wait_", "(Tensor(a!)[] slots, int bucket) -> ()", _wait)
multiply_into = define("multiply_into", "(Tensor(a!) target, Tensor one, Tensor two, float factor) -> ()", _multiply)
_random = torch.Tag.nondeterministic_seeded
loop_ = define("loop_", "(Tensor(a!)[] changed, Tensor[] others, int number) -> ()", _loop, _random)
replay_ = define("replay_", "(Tensor(a!) state, Device device) -> Tensor", exchange_state, _random, fake=_fake_like)
resume_ = define("resume_", "(Tensor(a!) state, Device device) -> ()", RESUME, _random)
"""They change the generator, which a schema cannot say. The schema says it of the state instead, so that they are not
left out. The tag keeps their order among the operators that draw, as for a loop: the compiler keeps the order of
operators that have it."""
DECLARED.update({REPLAY: replay_, RESUME: resume_})
DECLARED.update({start: start_, wait: wait_, loop: loop_, copy_into: _aten.copy_.default})

FUSED: dict[Any, Any] = {}
"""For each fused optimizer, the same operator without declared effects."""


def _define_fused(operator: Any) -> None:
    stem, arguments = str(schema_of(operator)).removeprefix("aten::").split("(", 1)
    # Gradients are changed for the sake of a loss scale alone; who gives one is refused.
    arguments = re.sub(r"\([a-z]+!\)\[\] grads", "[] grads", arguments)
    stem = stem.strip("_").replace(".", "_")

    def run(*args: Any, **kwargs: Any) -> None:
        operator(*args, **kwargs)

    hidden = define(stem, "(" + re.sub(r"\([a-z]+!\)", "", arguments), run)
    FUSED[operator] = hidden
    DECLARED[hidden] = define(f"{stem}_", f"({arguments}", run)


for _name in FUSED_OPTIMIZERS:
    _packet = getattr(_aten, _name)
    for _overload in _packet.overloads():
        _define_fused(getattr(_packet, _overload))


for _operator in (STATE, REPLAY, RESUME):
    torch.fx.has_side_effect(_operator)

CHANGING = (
    multiply_into,
    *(operator for operator in DECLARED.values() if operator is not _aten.copy_.default),
)
"""The operators of this file that say that they change their arguments."""


def declare_effects(graph: fx.Graph) -> None:
    """Replace operators of a functional graph by those that declare their changes of memory."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in DECLARED:
            node.target = DECLARED[node.target]
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "fdp_compiled":
            # Strides are exact only where it is said which they are.
            node.meta["eager_input_vals"] = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
