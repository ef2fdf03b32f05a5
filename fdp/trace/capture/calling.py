"""Call a step with other tensors in place of those in its arguments: traced, and untraced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdp import pytree
from fdp.context.axis import step_axis
from fdp.distributed.group import Group
from fdp.distributed.other_ranks import OthersHold
from fdp.distributed.wire import Wire
from fdp.errors import TraceError, build_message
from fdp.pytorch.dynamo import uncompiled
from fdp.state.containers import bare, bare_spec, lies_in_parts
from fdp.trace.calls.arguments import Flat, Roles
from fdp.trace.calls.closure import closed_over_where
from fdp.trace.calls.keywords import not_taken, signature_of
from fdp.trace.capture.capture import is_fake
from fdp.trace.capture.switches import recording
from fdp.trace.capture.untouched import untouched
from fdp.tracebacks import could_not_begin


def name_of_step(step: Callable[..., Any]) -> str:
    """The name of a step in messages."""
    return getattr(step, "__name__", type(step).__name__)


def call_with(step: Callable[..., Any], flat: Flat, roles: Roles, values: Sequence[torch.Tensor]) -> Any:
    """Call a step with other tensors in place of those in the flattened arguments.

    Raises:
        CallError: it does not take so many.
    """
    it = iter(values)
    leaves = [next(it) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]
    moving = iter(pytree.unflatten(bare_spec(flat.spec), leaves))
    fixed = iter(flat.static)
    args = [next(fixed) if i in roles.static else next(moving) for i in range(len(roles.names))]
    try:
        return step(*args)
    except TypeError as error:
        if could_not_begin(error):
            raise not_taken(name_of_step(step), signature_of(step), error) from None
        raise


def _call_like_the_caller(step: Callable[..., Any], flat: Flat, roles: Roles, values: Sequence[torch.Tensor]) -> Any:
    """Call a step as its caller did, with other tensors in place of the caller's.

    Each replaces a tensor in the caller's own arguments, found by its `id`. Tracing uses `call_with`, which goes by
    position in the flat list. A mistake there shows when the trace is compared with this call.
    """
    others: dict[int, list[torch.Tensor]] = {}
    for tensor, value in zip(flat.tensors, values, strict=True):
        others.setdefault(id(tensor), []).append(value)
    args: list[Any] = []
    for position, arg in enumerate(flat.args):
        if position not in roles.static:
            leaves, spec = pytree.flatten(bare(arg))
            if not all(others.get(id(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)):
                return call_with(step, flat, roles, values)  # a container that makes new tensors whenever it is asked
            found = [others[id(leaf)].pop(0) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            arg = pytree.unflatten(spec, found)
        args.append(arg)
    return step(*args)


def run_untraced(
    step: Callable[..., Any],
    flat: Flat,
    roles: Roles,
    group: Group,
    values: Sequence[torch.Tensor],
    wire: Wire | None = None,
    others: OthersHold = "different",
) -> Any:
    """Run a step untraced, on this rank alone: `others` says which values collectives assume on the other ranks.

    With a wire, gradients are rounded to what is sent.

    Raises:
        TraceError: the step kept a tensor when it was traced, and now uses it.
    """
    try:
        with step_axis(f"{others} ranks", group, wire), recording(), uncompiled():
            out = _call_like_the_caller(step, flat, roles, values)
    except Exception as error:
        if closed_over_where(step, is_fake):
            raise _kept(step) from error
        raise
    if any(is_fake(leaf) for leaf in pytree.leaves_of(out)):
        raise _kept(step)
    return out


def _kept(step: Callable[..., Any]) -> TraceError:
    return TraceError(
        build_message(
            f"step {name_of_step(step)!r} uses tensors that it kept when it was traced; they have no values.",
            closed_over_where(step, is_fake),
            remedy="make such tables before the first call, or in every call; what a step is to keep, it returns.",
        )
    )


def runs_untraced(step: Callable[..., Any], flat: Flat, roles: Roles, group: Group) -> bool:
    """Whether a step runs untraced. If it does, an error under the tracer is due to tracing."""
    if any(map(lies_in_parts, pytree.leaves_of(flat.args))):
        return False  # it would take all of what is sharded
    values = [tensor.detach().clone() for tensor in flat.tensors]
    try:
        with untouched(step), torch.random.fork_rng():
            run_untraced(step, flat, roles, group, values)
    except Exception:
        return False
    return True
