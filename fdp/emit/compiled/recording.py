"""A compiled step as one CUDA graph: recorded once, messages and updates included, and then replayed.

Launching a step of many small kernels takes the host longer than the device needs to run them; a replay is one launch.
A recording holds addresses, not values. So donated state has to stay where it is from call to call, as it does when the
state that goes in is the one that came out; everything else is copied to a place of its own first, and what the step
returns is copied out.

References: PyTorch documentation, CUDA semantics, "CUDA Graphs".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from fdp.distributed.group import Group
from fdp.plan import Plan

_WARM_UP = 2
"""Calls before the one that is recorded: they load kernels, and fill memory pools."""


class Graph(Protocol):
    """What records work and replays it."""

    def record(self, work: Callable[[], Any]) -> Any:
        """Record some work without executing it on the device; returns what the work returns."""

    def replay(self) -> None:
        """Execute what was recorded."""


class CudaGraph:
    """A CUDA graph of the current device."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def record(self, work: Callable[[], Any]) -> Any:
        # Other threads, such as the one that watches over NCCL, may go on asking for events meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            return work()

    def replay(self) -> None:
        self._graph.replay()


class Recording:
    """A compiled program that is recorded and replayed; it is called like the program.

    All ranks record at the same call or none does: ranks that replay and ranks that run plainly send the same messages,
    but whether to record is found out together.

    Args:
        name: the user's function, for messages.
        function: takes one list of inputs, empties it, and returns a sequence of tensors.
        own: how many inputs are the step's; those behind them (constants, slots) are the program's.
        donated: positions of inputs that the step writes new values into.
        compares: whether the first replay is compared with a plain run; not where the step sends messages, which it
            would send twice.
        all_say: asks all ranks for a yes or no, and says whether all said yes.
        graph: makes what records.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
        own: int,
        donated: frozenset[int],
        compares: bool,
        all_say: Callable[[bool], bool] = bool,
        graph: Callable[[], Graph] = CudaGraph,
    ) -> None:
        self.armed = False
        self._name, self._function, self._own, self._donated = name, function, own, donated
        self._compares, self._all_say, self._make = compares, all_say, graph
        self._graph: Graph | None = None
        self._inputs: list[torch.Tensor] = []
        self._outputs: Sequence[torch.Tensor] = ()
        self._where: tuple[int, ...] = ()
        self._calls = 0
        self._told = False

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the program: plainly until it is armed and warm, then by replay."""
        if not self.armed:
            return self._function(inputs)
        where = tuple(x.data_ptr() for index, x in enumerate(inputs) if self._stays(index))
        if self._graph is not None:
            if where == self._where:
                return self._replay(inputs)
            if not self._told:
                self._told = True
                self._warn("is in another place than when it was recorded, so it runs without; pass the state that the "
                           "step returned")  # fmt: skip
            return self._function(inputs)
        self._calls += 1
        if self._calls <= _WARM_UP:
            self._where = where
            return self._function(inputs)
        if not self._all_say(where == self._where):
            self.armed = False
            self._warn("was in another place at each call; pass the state that the step returned")
            return self._function(inputs)
        return self._record(inputs)

    def _warn(self, what: str) -> None:
        warnings.warn(f"fdp: step {self._name!r} is not run as a CUDA graph: its donated state {what}.", stacklevel=3)

    def _stays(self, index: int) -> bool:
        return index >= self._own or index in self._donated

    def _replay(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        assert self._graph is not None
        for index in range(self._own):
            if index not in self._donated:
                self._inputs[index].copy_(inputs[index])
        inputs.clear()
        self._graph.replay()
        return [output.clone() for output in self._outputs]

    def _record(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        self._inputs = [x if self._stays(index) else x.clone() for index, x in enumerate(inputs)]
        before = [x.clone() for x in inputs[: self._own]] if self._compares else []
        graph, why = self._make(), ""
        try:
            self._outputs = graph.record(lambda: self._function(list(self._inputs)))
        except RuntimeError as error:
            why = str(error).splitlines()[0]
        if not self._all_say(not why):
            self.armed, self._inputs, self._outputs = False, [], ()
            warnings.warn(
                f"fdp: step {self._name!r} could not be recorded as a CUDA graph and runs without: "
                f"{why or 'another rank could not'}",
                stacklevel=2,
            )
            return self._function(inputs)
        self._graph = graph
        graph.replay()
        outputs = [output.clone() for output in self._outputs]
        if self._compares:
            outputs = self._compare(before, inputs, outputs)
        inputs.clear()
        return outputs

    def _compare(
        self, before: list[torch.Tensor], inputs: Sequence[torch.Tensor], outputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run the program on copies without a graph; if the replay differs, return these results and stop recording."""
        plain = list(self._function([*before, *inputs[self._own :]]))
        pairs = list(zip(outputs, plain, strict=True))
        pairs += [(inputs[index], before[index]) for index in self._donated]
        if all(torch.allclose(one, two, rtol=1e-3, atol=1e-5, equal_nan=True) for one, two in pairs):
            return outputs
        self.armed, self._graph, self._inputs, self._outputs = False, None, [], ()
        for index in self._donated:
            inputs[index].copy_(before[index])
        warnings.warn(
            f"fdp: the CUDA graph of step {self._name!r} did not compute what the step computes; the step goes on "
            "without, from the right values.",
            stacklevel=2,
        )
        return plain


def why_not_recorded(plan: Plan, group: Group) -> str | None:
    """Why a step cannot be one CUDA graph; None if it can."""
    cpu = [item.name for item in plan.trace.inputs if item.device.type != "cuda"]
    devices = {item.device for item in plan.trace.inputs}
    if len(cpu) == len(plan.trace.inputs):
        return "it runs on the CPU, and a CUDA graph holds the work of a CUDA device"
    if cpu:
        return f"{', '.join(cpu)} is on the CPU, so its value would be frozen into the graph; move it to the device"
    if len(devices) > 1:
        return f"it runs on {len(devices)} devices"
    for node in plan.trace.graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return f"it reads a number from a tensor ({node.meta.get('source') or node.target})"
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.device.type != "cuda":
            return f"it computes on the CPU ({node.meta.get('source') or node.target})"
    if plan.buckets and group.size > 1:
        backends = {str(group.backend_for(bucket.device)) for bucket in plan.buckets}
        if backends != {"nccl"}:
            return f"its messages are sent by {', '.join(sorted(backends))}, which works from the host; NCCL need not"
    return None
