"""Direct calls of torch.distributed in a step: refused, with what to call instead.

The graph of a trace would hold none of them, or hold them where no plan sees them: ranks would wait for each other in
an order that they have not agreed on. So the functions of torch.distributed are replaced while a step is traced; and
since a caller may hold one of them under a name of its own, the operators that they end in are refused as well.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fdp.errors import TraceError, build_message
from fdp.pytorch.overloads import all_overloads
from fdp.trace.capture.silent_changes import replaced

_SUM = "call fdp.psum, fdp.pmean, fdp.pmax or fdp.pmin"
_GATHER = "call fdp.all_gather; gradients come back through it"
_SCATTER = "call fdp.psum_scatter or fdp.pmean_scatter"
_SEND = "call fdp.ppermute(x, [(source, destination), ...]) on every rank"
_OUTSIDE = "call it between steps, and pass in what comes of it as an argument"
_BARRIER = "leave it out: ranks wait for each other where a result needs it; between steps it is as good as ever"

_REMEDIES: tuple[tuple[str, str], ...] = (
    ("object", _OUTSIDE),
    ("barrier", _BARRIER),
    ("allreduce", _SUM),
    ("reducescatter", _SCATTER),
    ("reduce", f"{_SUM}: every rank gets the result"),
    ("broadcast", "call fdp.broadcast(x, root=...)"),
    ("allgather", _GATHER),
    ("gather", f"{_GATHER}, and every rank gets the result"),
    ("alltoall", "call fdp.all_to_all(x, split_axis, concat_axis)"),
    ("scatter", "call fdp.broadcast(x, root=...), and take this rank's part: x.chunk(n)[...] by fdp.axis_index()"),
    ("send", _SEND),
    ("recv", _SEND),
    ("p2p", _SEND),
)
"""By a part of the name of a function or an operator, without underscores; the first that fits."""

_FUNCTIONS = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "broadcast_object_list", "gather", "gather_into_tensor", "gather_object", "gather_single",
    "monitored_barrier", "new_group", "recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list", "split_group",
)  # fmt: skip
"""Not `isend` and `irecv`: by these very objects another thread says what it wants of `batch_isend_irecv`. Their
operators are refused."""

_MODULES = {
    "torch.distributed": "torch.distributed",
    # There its own functions look for each other.
    "torch.distributed.distributed_c10d": "torch.distributed",
    "torch.distributed.nn": "torch.distributed.nn.functional",
    "torch.distributed.nn.functional": "torch.distributed.nn.functional",
}
"""Where functions of torch.distributed are looked up, and how errors call the place."""

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


def raw_message_refusal(what: str) -> TraceError:
    """The error for a call of a function or an operator of torch.distributed."""
    bare = what.rpartition(".")[2].replace("_", "")
    remedy = next((text for part, text in _REMEDIES if part in bare), _OUTSIDE)
    return TraceError(
        build_message(
            f"{what} was called inside of a step, whose messages fdp sends.",
            remedy=f"{remedy}.",
        )
    )


@functools.cache
def refused_operators() -> Mapping[Any, Callable[..., Any]]:
    """A decomposition table in which each operator of torch.distributed is refused."""
    found: dict[Any, Callable[..., Any]] = {}
    for full_name in all_overloads():
        namespace, _, rest = full_name.partition("::")
        if namespace in _NAMESPACES:
            packet = getattr(getattr(torch.ops, namespace), rest.partition(".")[0])
            for overload in packet.overloads():
                found[getattr(packet, overload)] = _refusing(f"torch.ops.{namespace}.{rest.partition('.')[0]}")
    return found


@contextmanager
def raw_messages_refused(tracing: Callable[[], bool]) -> Iterator[None]:
    """Patch the functions of torch.distributed that send, or wait for other ranks: they refuse.

    Args:
        tracing: whether the thread that asks is the one that traces.
    """
    with ExitStack() as stack:
        for module, shown in _MODULES.items():
            owner = sys.modules.get(module)
            for name in _FUNCTIONS:
                if hasattr(owner, name):
                    make = functools.partial(_unless, tracing, f"{shown}.{name}")
                    stack.enter_context(replaced(owner, name, make))
        yield


def _unless(tracing: Callable[[], bool], what: str, original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if tracing():
            raise raw_message_refusal(what)
        return original(*args, **kwargs)

    return call


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise raw_message_refusal(name)

    return refuse
