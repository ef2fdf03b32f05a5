"""Estimate what operations cost from their floating-point operations and bytes, without running anything.

References: Williams, Waterman and Patterson, Roofline: an insightful visual performance model for multicore
architectures (CACM 2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fdp.errors import ArgumentError, build_message
from fdp.plan.cost.costs import Costs
from fdp.pytorch.overloads import OpOverload
from fdp.tables import of_fields
from fdp.trace.graph.loops import is_loop
from fdp.trace.operators.effects import effects_of, entries_of, inner_nodes, is_marker, list_arguments
from fdp.trace.trace import Trace


@dataclass(frozen=True, repr=False)
class Machine:
    """How fast one rank computes, in round numbers; the defaults are those of a data-centre accelerator.

    Attributes:
        flops_per_s: floating-point operations a second in matrix products and convolutions: one number, or one for
            each dtype, with torch.float32 for all that are not listed.
        bytes_per_s: bytes a second that other operators read and write.
        overhead_s: seconds that an operator takes however little it does.
        start_s: seconds to start one message.
        pack_bytes_per_s: bytes a second that are copied into buckets; math.inf if gradients are made in place.

    Raises:
        ArgumentError: a number has no meaning.

    Example:
        >>> Machine(flops_per_s={torch.float32: 15e12, torch.float16: 110e12}, bytes_per_s=0.8e12).flops_of(torch.half)
        110000000000000.0
    """

    flops_per_s: float | Mapping[torch.dtype, float] = 50e12
    bytes_per_s: float = 1e12
    overhead_s: float = 5e-6
    start_s: float = 20e-6
    pack_bytes_per_s: float = 0.5e12

    def __repr__(self) -> str:
        return of_fields(self)

    def __post_init__(self) -> None:
        many = isinstance(self.flops_per_s, Mapping)
        listed: Any = self.flops_per_s if many else {torch.float32: self.flops_per_s}
        rates = {f"flops_per_s of {dtype}" if many else "flops_per_s": rate for dtype, rate in listed.items()}
        rates |= {"bytes_per_s": self.bytes_per_s, "pack_bytes_per_s": self.pack_bytes_per_s}
        wrong = [f"{name}: {rate!r} is no rate" for name, rate in rates.items() if not rate > 0]
        times = {"overhead_s": self.overhead_s, "start_s": self.start_s}
        wrong += [f"{name}: {time!r} is no time" for name, time in times.items() if not 0 <= time < math.inf]
        if torch.float32 not in listed:
            wrong.append("flops_per_s: torch.float32 is missing, which holds for all that are not listed")
        if wrong:
            raise ArgumentError(
                build_message(
                    "a Machine with numbers that have no meaning.",
                    wrong,
                    remedy="pass operations and bytes a second, more than 0, and seconds, 0 or more.",
                )
            )

    def flops_of(self, dtype: torch.dtype) -> float:
        """Floating-point operations a second in a dtype."""
        if isinstance(self.flops_per_s, Mapping):
            return self.flops_per_s.get(dtype, self.flops_per_s[torch.float32])
        return self.flops_per_s


def estimate(trace: Trace, machine: Machine | None = None) -> Costs:
    """Estimate what each operation of a trace takes on a machine.

    An operator takes its overhead, and then as long as its floating-point operations or its bytes, whichever takes
    longer. The entries of one call share what it takes by their bytes. Views and reductions take nothing. Operators
    whose floating-point operations torch cannot count (all but products, convolutions and attention) are taken to be
    bound by their bytes.

    Args:
        trace: of a step.
        machine: that it is to run on; None for the default `Machine`.

    Returns:
        The costs, in seconds.

    Example:
        >>> import fdp
        >>> step = fdp.data_parallel(lambda w, x: fdp.pmean(x @ w))
        >>> costs = estimate(step.trace(torch.ones(64, 64), torch.ones(8, 64)), Machine(flops_per_s=1e9, overhead_s=0))
        >>> costs.operations_s  # 8 x 64 x 64 products and as many sums; then the mean over ranks
        (6.5536e-05, 0.0)
    """
    machine = machine or Machine()
    by_node: dict[str, list[float]] = {
        node.name: _node_s(node, machine) for node in trace.graph.graph.nodes if node.op == "call_function"
    }
    seconds = [
        0.0 if operation.view or operation.reduction is not None else by_node[operation.node][operation.entry or 0]
        for operation in trace.operations
    ]
    return Costs(tuple(seconds), machine.start_s, 1 / machine.pack_bytes_per_s, "estimated")


def _node_s(node: fx.Node, machine: Machine) -> list[float]:
    """Seconds of a call, or of each of its entries."""
    if is_marker(node):
        return [0.0]
    if is_loop(node):
        return [node.args[1] * sum(sum(_node_s(n, machine)) for n in inner_nodes(node) if n.op == "call_function")]  # type: ignore[list-item, operator]
    entries = entries_of(node)
    shares = (
        [_size_bytes(node, entry) for entry in range(entries)] if entries is not None else [_size_bytes(node, None)]
    )
    size_bytes = sum(shares)
    rate = machine.flops_of(_dtype(node))
    total = machine.overhead_s + max(_flops(node) / rate, size_bytes / machine.bytes_per_s)
    if not size_bytes:
        return [total / len(shares)] * len(shares)
    return [total * share / size_bytes for share in shares]


def _flops(node: fx.Node) -> float:
    target = node.target
    packet = target.overloadpacket if isinstance(target, OpOverload) else None
    count = flop_registry.get(packet) or _ATTENTION_ON_CPU.get(packet)
    if count is None:
        return 0.0
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda argument: argument.meta["val"])
    try:
        return float(count(*args, **kwargs, out_val=node.meta["val"]))
    except Exception:  # torch's formulas assert that shapes are among those that they know
        return 0.0


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    result: int = sdpa_flop_count(query.shape, key.shape, value.shape)
    return result


def _attention_backward(grad_out: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    result: int = sdpa_backward_flop_count(grad_out.shape, query.shape, key.shape, value.shape)
    return result


_ATTENTION_ON_CPU: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""What torch's own table lacks."""


def _size_bytes(node: fx.Node, entry: int | None) -> int:
    """Bytes that a call, or one entry of it, reads and writes."""
    nodes = list(_arguments(node, entry))
    effects = effects_of(node)
    written = [argument for argument in nodes if argument in effects.writes]
    total = sum(_bytes_of(argument.meta.get("val")) for argument in [*nodes, *written])
    if not written:
        result = node.meta.get("val")
        if entry is not None and isinstance(result, (list, tuple)):
            result = result[entry]
        total += _bytes_of(result)
    return total


def _arguments(node: fx.Node, entry: int | None) -> Iterator[fx.Node]:
    if entry is None:
        yield from node.all_input_nodes
        return
    for _, value in list_arguments(node):
        if value and isinstance(value[entry], fx.Node):
            yield value[entry]


def _dtype(node: fx.Node) -> torch.dtype:
    for argument in node.all_input_nodes:
        value = argument.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.dtype
    return torch.float32


def _bytes_of(value: object) -> int:
    if isinstance(value, torch.Tensor):
        size_bytes = value.numel() * value.itemsize
        # What is expanded lies in memory once.
        return min(size_bytes, value.untyped_storage().nbytes()) if value.layout == torch.strided else size_bytes
    if isinstance(value, (list, tuple)):
        return sum(_bytes_of(item) for item in value)
    return 0
