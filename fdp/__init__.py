"""fdp: functional data parallelism for PyTorch.

A training step is a pure function over pytrees. `data_parallel` traces it and reads off the order in which
gradients are produced, plans communication buckets ahead of time, and emits a step that interleaves the backward
computation with asynchronous collectives:

    step_fn --trace--> Trace --plan--> Plan --emit--> callable

Each stage is a value: `step.trace(*args)`, `trace.plan()`, `plan.emit()`. They can be held, printed, compared and
tested without a process group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fdp.pytorch.parts  # first: it says what is wrong where nothing else could be imported

# isort: split
from fdp import optim, random
from fdp.collectives.exchanges import all_to_all, pmean_scatter, ppermute, psum_scatter
from fdp.collectives.over_pytrees import all_gather, broadcast, pmax, pmean, pmin, psum
from fdp.collectives.own_rank import axis_index, axis_size, per_rank
from fdp.data.batch_sampler import BatchSampler
from fdp.distributed.launch import initialize
from fdp.errors import (
    AgreementError,
    ArgumentError,
    CompileError,
    FdpError,
    NonFiniteError,
    PeerError,
    PurityError,
    ReplicationError,
    TraceError,
)
from fdp.gradients.accumulation import accumulate
from fdp.gradients.autodiff import grad, value_and_grad
from fdp.join import join
from fdp.nn.batch_norm import sync_batch_norm
from fdp.nn.modules import from_module
from fdp.plan import Network, Plan, Scaling, scaling
from fdp.random.generators import seed
from fdp.state.labels import PerRank
from fdp.state.replicate import assert_replicated, replicate
from fdp.state.shard import shard, unshard
from fdp.step.step import Step
from fdp.step.transform import data_parallel
from fdp.timeline import Timeline
from fdp.trace import Trace

if TYPE_CHECKING:
    from fdp.state.checkpoint import load, save
    from fdp.state.checkpoint_manager import CheckpointManager

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    # torch.distributed.checkpoint takes long to import: it waits until one of these is asked for.
    if name in ("CheckpointManager", "load", "save"):
        fdp.pytorch.parts.require("saving and loading")
        from fdp.state import checkpoint, checkpoint_manager

        globals().update(
            CheckpointManager=checkpoint_manager.CheckpointManager, load=checkpoint.load, save=checkpoint.save
        )
        return globals()[name]
    raise AttributeError(f"module 'fdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", "__doc__"]


__all__ = [
    "AgreementError",
    "ArgumentError",
    "BatchSampler",
    "CheckpointManager",
    "CompileError",
    "FdpError",
    "Network",
    "NonFiniteError",
    "PeerError",
    "PerRank",
    "Plan",
    "PurityError",
    "ReplicationError",
    "Scaling",
    "Step",
    "Timeline",
    "Trace",
    "TraceError",
    "accumulate",
    "all_gather",
    "all_to_all",
    "assert_replicated",
    "axis_index",
    "axis_size",
    "broadcast",
    "data_parallel",
    "from_module",
    "grad",
    "initialize",
    "join",
    "load",
    "optim",
    "per_rank",
    "pmax",
    "pmean",
    "pmean_scatter",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "random",
    "replicate",
    "save",
    "scaling",
    "seed",
    "shard",
    "sync_batch_norm",
    "unshard",
    "value_and_grad",
]
