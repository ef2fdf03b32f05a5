"""Sharded state on many ranks, simulated: how far a step is from what must be computed and sent.

    python benchmarks/sharded_simulated.py [--ranks N ...] [--batch N] [--model gpt2|gpt|mlp]

GPT-2 small with AdamW, float32, on the accelerators and the network of benchmarks/paper.py. Nothing is run: for each
number of ranks the step is traced as a rank of that many, its operators are estimated and its messages taken from the
network's rates. Ranks are a "fake" process group, which sends nothing. The other models are those of
benchmarks/sharded.py.

The bound is the longest of three:

- everything is computed;
- all messages of the plan, one behind the other;
- the forward and the backward pass, and the messages that neither can hide: the first parameter arrives before anything
  is computed with it (ZeRO-3); the gradient that comes last is sent when the backward pass is over. Its new parameter
  is gathered behind that (ZeRO-1). The first and the last are one parameter: of GPT-2 the table of tokens, the largest.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # which makes the "fake" backend known
from paper import CLUSTER, V100
from rich.console import Console
from rich.table import Table
from sharded import CASES, GPT2, Case, training

import fdp
from fdp.plan import estimate
from fdp.plan.simulate import phases

GPT2_LONG = dataclasses.replace(GPT2, batch=lambda: torch.zeros(1, 1024, dtype=torch.long))
MODELS = {"gpt2": GPT2_LONG, **CASES}


@dataclasses.dataclass(frozen=True)
class Simulated:
    """A step on some number of ranks.

    Attributes:
        step_s: seconds of it.
        compute_s: seconds of its operators.
        passes_s: seconds of those that are no part of the optimizer.
        messages_s: seconds of its messages, one behind the other.
        ends_s: seconds of the messages before the forward and behind the backward pass.
    """

    step_s: float
    compute_s: float
    passes_s: float
    messages_s: float
    ends_s: float

    @property
    def bound_s(self) -> float:
        """No step with these messages is shorter."""
        return max(self.compute_s, self.messages_s, self.passes_s + self.ends_s)


def simulated(case: Case, way: str, ranks: int, batch: int) -> Simulated:
    """Plan and simulate a step with whole state (""), a sharded optimizer ("opt"), or all of it sharded ("all")."""
    train_step, state = training(case, way)
    one = case.batch()[:1]
    trace = fdp.data_parallel(train_step, donate_argnums=0).trace(state, one.repeat(batch, *[1] * (one.dim() - 1)))
    costs = estimate(trace, V100)
    plan = trace.plan(network=CLUSTER, costs=costs)
    seconds = [CLUSTER.message_s(bucket.op, bucket.size_bytes, ranks) for bucket in plan.buckets]
    passes = [s for s, phase in zip(costs.operations_s, phases(trace.operations), strict=True) if phase != "optimizer"]
    first = f"['{next(iter(state['params']))}']"
    of_first = [
        CLUSTER.message_s(reduction.op, reduction.size_bytes, ranks)
        for reduction in trace.reductions
        if reduction.name.endswith(first)
    ]
    step_s = plan.timeline(CLUSTER).step_s
    return Simulated(step_s, sum(costs.operations_s), sum(passes), sum(seconds), sum(of_first))


def main() -> None:
    """Print a row for each number of ranks and each way to hold the state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--batch", type=int, default=8, help="sequences, or rows, of a rank")
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    case = MODELS[chosen.model]
    shape = [chosen.batch, *case.batch().shape[1:]]
    table = Table(title=f"{chosen.model}, AdamW, a batch of {shape} a rank, simulated: ms a step")
    for name in ("ranks", "state", "computed", "all messages", "bound", "step", "step / bound"):
        table.add_column(name, justify="left" if name == "state" else "right")
    for ranks in chosen.ranks:
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=ranks)
        for name, way in (("whole", ""), ("ZeRO-1", "opt"), ("ZeRO-3", "all")):
            found = simulated(case, way, ranks, chosen.batch)
            times = (found.compute_s, found.messages_s, found.bound_s, found.step_s)
            table.add_row(str(ranks), name, *(f"{s * 1e3:.1f}" for s in times), f"{found.step_s / found.bound_s:.3f}")
        dist.destroy_process_group()
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
