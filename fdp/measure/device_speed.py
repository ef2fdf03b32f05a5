"""How fast a device computes, from three small measurements: for estimates of steps that are not run."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from fdp.measure.clock import clock_for
from fdp.plan.cost.estimate import Machine

_ROWS = {"cpu": 512, "cuda": 4096}
_COPIED_BYTES = {"cpu": 2**25, "cuda": 2**28}
_REPEATS = 5
_TINY_CALLS = 200


def measure_machine(device: torch.device | str = "cpu", start_s: float = 20e-6) -> Machine:
    """Measure what a device does in a second, with the threads that torch has now.

    A product of square matrices tells the floating-point operations, for each dtype that the device multiplies fast or
    slowly; a copy that does not fit into caches tells the bytes; the sum of two numbers tells what an operator takes
    however little it does.

    Args:
        device: the device.
        start_s: seconds that it takes to start a message, which nothing that runs alone can tell; see `measure_link`.

    Returns:
        The machine.

    Example:
        >>> measure_machine("cpu").bytes_per_s > 1e6
        True
    """
    device = torch.device(device)
    rows, size_bytes = _ROWS.get(device.type, 512), _COPIED_BYTES.get(device.type, 2**25)
    with torch.no_grad():
        flops = {dtype: 2 * rows**3 / _product_s(device, dtype, rows) for dtype in (torch.float32, torch.bfloat16)}
        source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        copy_s = _usual_s(device, lambda: target.copy_(source))
        number = torch.zeros((), device=device)
        overhead_s = _usual_s(device, lambda: [torch.add(number, number, out=number) for _ in range(_TINY_CALLS)])
    # A copy reads and writes each byte.
    return Machine(flops, 2 * size_bytes / copy_s, overhead_s / _TINY_CALLS, start_s, size_bytes / copy_s)


def _product_s(device: torch.device, dtype: torch.dtype, rows: int) -> float:
    one = torch.ones(rows, rows, dtype=dtype, device=device)
    out = torch.empty_like(one)
    return _usual_s(device, lambda: torch.mm(one, one, out=out))


def _usual_s(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds that some work takes, usually; the first run does not count."""
    clock, runs = clock_for([device]), []
    for _ in range(1 + _REPEATS):
        clock.settle()
        first = clock.stamp()
        work()
        runs += clock.seconds(first, [clock.stamp()])
    return max(statistics.median(runs[1:]), 1e-9)
