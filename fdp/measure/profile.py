"""A real step on two lanes: what computed when, which messages were under way, and what was exposed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdp.compare import inputs_for_one_run, undisturbed
from fdp.distributed.exchange import come_together
from fdp.errors import ArgumentError, CompileError, build_message
from fdp.measure.agreed import agreed_seconds, refuse_left
from fdp.measure.clock import clock_for
from fdp.measure.intervals import EventRecorder, intervals_between_events, messages, operations
from fdp.measure.operations import device_of_messages
from fdp.runtime import Emitted
from fdp.timeline.timeline import Timeline


def profile_step(emitted: Emitted, tensors: Sequence[torch.Tensor], repeats: int = 3) -> Timeline:
    """Run a step for real, including its messages, and record what happened when; its results are discarded.

    A step that runs operation by operation is timed so, by a variant of its program with a stamp between one and the
    next. Another one, such as a compiled one, is timed from one start or wait to the next.

    Args:
        emitted: the step; all ranks of its group call this together.
        tensors: its inputs, in the order of `Trace.inputs`; they are not changed. Random numbers go on afterwards as if
            none had been drawn.
        repeats: runs that are timed, after one that is not. The one of median length is returned.

    Returns:
        The timeline of this rank, in seconds from when it began; all ranks tell of the same run. A message lasts from
        its start until it has arrived; where the backend does not tell that, until the wait for it is over.

    Raises:
        ArgumentError: `repeats` is not a positive number.
        CompileError: the messages are sent by a recording, out of sight.
        AgreementError: another rank does something else, or did not come in time.
        PeerError: another rank died or stopped answering.
    """
    plan, group = emitted.plan, emitted.group
    name = plan.trace.name
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ArgumentError(
            build_message(
                f"step {name!r} was to be profiled with repeats={repeats!r}.",
                remedy="say how many runs are to be timed: 1 or more.",
            )
        )
    if emitted.hides_messages:
        raise CompileError(
            build_message(
                f"step {name!r} cannot be profiled: its messages are sent inside a CUDA graph, where fdp "
                "does not see them.",
                remedy="profile the step without CUDA graphs.",
            )
        )
    if group.size > 1:
        refuse_left(group)
        # Equal names are not enough: it may be another signature there, whose messages would meet those of this one.
        what = f"is to be profiled (schedule {emitted.consensus.digest[:12]}, repeats={repeats})"
        come_together(group, f"step {name!r}", what)
    device = device_of_messages(plan)
    clock = clock_for(item.device for item in plan.trace.inputs)
    stamps: list[Any] = []
    step = emitted.timed(lambda: stamps.append(clock.stamp())) if emitted.backend.by_operation else emitted
    runs: list[Timeline] = []
    with undisturbed(emitted):
        for _ in range(1 + repeats):
            inputs = inputs_for_one_run(plan, tensors)
            # All begin at once, as in training, where the last wait of one step holds ranks together for the next.
            agreed_seconds(group, device, [0.0], "max")
            clock.settle()
            stamps.clear()
            recorder = EventRecorder(clock)
            first = clock.stamp()
            step.run(inputs, recorder)
            last = clock.stamp()
            clock.settle()
            seconds = clock.seconds(first, [*stamps, last])
            if emitted.backend.by_operation:
                compute = operations(plan, step.program.parts, seconds)
            else:
                compute = intervals_between_events(plan, recorder.events(first), seconds[-1])
            intervals = (*compute, *messages(plan, recorder.events(first)))
            runs.append(Timeline(name, group.size, "measured", intervals, seconds[-1]))
    del runs[0]
    steps_s = agreed_seconds(group, device, [run.step_s for run in runs], "max")
    return runs[sorted(range(repeats), key=steps_s.__getitem__)[repeats // 2]]
