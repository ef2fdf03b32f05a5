"""Whether a comparison fits into memory: if not, it is left out, and a warning says so once."""

from __future__ import annotations

import math
import pathlib
import warnings
from collections import defaultdict
from collections.abc import Callable

import torch

from fdp.compare.copies import is_lack_of_memory
from fdp.runtime.emitted import Emitted
from fdp.tables import format_bytes

_CGROUP = pathlib.Path("/sys/fs/cgroup")
_MEMINFO = pathlib.Path("/proc/meminfo")


def if_memory_allows(emitted: Emitted, what: str, compare: Callable[[], None]) -> bool:
    """Compare, or warn that there is no memory for it.

    Args:
        emitted: the step.
        what: what is skipped, in words.
        compare: compares.

    Returns:
        Whether it was compared.
    """
    for device, needed in needed_bytes(emitted).items():
        if needed > (free := available_bytes(device)):
            why = f"it takes about {format_bytes(needed)} on {device}, and {format_bytes(free)} are free"
            _warn(emitted, what, why)
            return False
    try:
        compare()
    except Exception as error:
        if not is_lack_of_memory(error):
            raise
        _warn(emitted, what, "memory ran out")
        return False
    return True


def _warn(emitted: Emitted, what: str, why: str) -> None:
    warnings.warn(
        f"fdp: {what} of step {emitted.plan.trace.name!r} with the function itself was skipped: {why}. It runs "
        "unchecked from here on; check_trace=False says that this is meant.",
        stacklevel=2,
    )


def needed_bytes(emitted: Emitted) -> dict[torch.device, int]:
    """The approximate memory of a comparison on each device, beside the arguments and the memory of the step.

    Copies of the inputs, the results, as much for what a run computes in between as the program has memory for that,
    and a copy of what is closed over.
    """
    needed: defaultdict[torch.device, int] = defaultdict(int)
    trace = emitted.plan.trace
    for item in trace.inputs:
        needed[item.device] += math.prod(item.shape) * item.dtype.itemsize
    for output in trace.outputs:
        value = trace.nodes[output.node].meta["val"] if output.node is not None else None
        if isinstance(value, torch.Tensor):
            needed[value.device] += value.numel() * value.itemsize
    for target, _ in trace.closed_over:
        held = getattr(trace.graph, target)
        needed[held.device] += held.numel() * held.itemsize
    for device, layout in emitted.program.layouts.items():
        needed[device] += layout.size_bytes
    return dict(needed)


def available_bytes(device: torch.device) -> int:
    """The free memory of a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = [_left_in_meminfo(), _left_in_cgroup()] if device.type == "cpu" else []
    return min((each for each in found if each is not None), default=2**62)


def _left_in_meminfo() -> int | None:
    try:
        rows = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None  # not Linux


def _left_in_cgroup() -> int | None:
    """The free memory of a container; cached files count as free."""
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        rows = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return limit - used + int(rows.get("inactive_file", 0)) + int(rows.get("active_file", 0))
    except (OSError, ValueError):
        return None  # no container, or no limit: "max"
