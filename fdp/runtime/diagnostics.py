"""How messages of a step are named: in the trace of a profiler, and in errors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from fdp.distributed.group import Group
from fdp.distributed.sending import no_backend
from fdp.errors import PeerError, build_message
from fdp.plan import Bucket, Plan
from fdp.tables import format_bytes

_NO_CHANGE = nullcontext()


def profiler_range(plan: Plan, index: int, what: str) -> AbstractContextManager[object]:
    """A range in the trace of a profiler, if one is at work."""
    # Private to torch. Relied on: it is true while a profiler is at work; if it were not, ranges would be missing.
    if not torch.autograd.profiler._is_profiler_enabled:
        return _NO_CHANGE
    bucket = plan.buckets[index]
    size, dtype = format_bytes(bucket.size_bytes), str(bucket.dtype).removeprefix("torch.")
    described = f"{bucket.op_along} of {size} {dtype}, {_members(plan, bucket)}"
    return torch.profiler.record_function(f"fdp: bucket {index} {what}: {described}")


def lost_contact(plan: Plan, group: Group, index: int | None, error: Exception) -> PeerError:
    """The error for a failed message, of a bucket if that is known.

    Args:
        plan: of the step.
        group: the ranks.
        index: of the bucket; None if that is not known.
        error: what failed, if it is not known which rank is gone.
    """
    where = "in one of its messages"
    if index is not None:
        where = f"in {bucket_text(plan, index)}"
    others = [rank for rank in range(group.size) if rank != group.rank]
    return PeerError(
        build_message(
            f"step {plan.trace.name!r} on rank {group.rank} lost contact with the other ranks.",
            [
                where,
                f"one of ranks {others} died, stopped, or left the step",
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",
            ],
            remedy="look for the first error among the logs of all ranks; start the job again from its last "
            "checkpoint (donated state may be half updated).",
        )
    )


def refuse_missing_backends(plan: Plan, group: Group) -> None:
    """Refuse a plan with messages on a device that the process group has no backend for.

    Raises:
        ArgumentError: names the device.
    """
    for bucket in plan.buckets:
        if group.backend_for(bucket.device) is None:
            raise no_backend(f"a message of step {plan.trace.name!r}", bucket.device)


def bucket_text(plan: Plan, index: int) -> str:
    """A bucket as text, for messages."""
    bucket = plan.buckets[index]
    return f"the {bucket.op_along} of bucket {index}: {_members(plan, bucket)}"


def _members(plan: Plan, bucket: Bucket) -> str:
    names = [plan.trace.reductions[member].name for member in bucket.members]
    return ", ".join(names[:3]) + (f", ... ({len(names)} in all)" if len(names) > 3 else "")
