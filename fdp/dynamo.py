"""Where fdp meets `torch.compile`: what Dynamo must not look into, and what it must leave alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from fdp.errors import CompileError, build_message

_Function = TypeVar("_Function", bound=Callable[..., Any])


def breaks_graph(reason: str) -> Callable[[_Function], _Function]:
    """Keep a function out of the graphs of others: a graph under `torch.compile` breaks once, around its call.

    Args:
        reason: what whoever asks for one whole graph (`fullgraph=True`) is told.

    Returns:
        A decorator.
    """

    def decorate(function: _Function) -> _Function:
        apart: _Function = torch.compiler.disable(function, reason=reason)
        return apart

    return decorate


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run what is under `torch.compile` as plain Python: inside of a step it is part of the step's graph.

    Not by `torch.compiler.set_stance("force_eager")` alone, which would stop `torch.cond` and its like as well: they
    have their branches traced by Dynamo. (This relies on `eval_frame._callback_from_stance`, through which each
    function under `torch.compile` asks at its call whether to compile, and on `_in_hop_compile`, which is true inside
    of them.)
    """
    from torch._dynamo import config, eval_frame
    from torch._higher_order_ops.utils import _in_hop_compile

    decide = eval_frame._callback_from_stance

    def leave_alone(callback: Any) -> Any:
        return callback if _in_hop_compile() else None

    with torch.compiler.set_stance("force_eager"), config.patch(error_on_nested_fx_trace=False):
        eval_frame._callback_from_stance = leave_alone
        try:
            yield
        finally:
            eval_frame._callback_from_stance = decide


def _refuse(graph: Any, inputs: Any, **options: Any) -> Any:
    raise CompileError(
        build_message(
            'torch.compile(step, backend="fdp"): fdp has no front end through Dynamo. A captured graph does not say '
            "which inputs differ from rank to rank, which are donated, and what leaves are called.",
            remedy="decorate the step: fdp.data_parallel(step, compile=True).",
        )
    )


# So that the reason is given, and not that there is no such backend.
torch._dynamo.register_backend(compiler_fn=_refuse, name="fdp")
