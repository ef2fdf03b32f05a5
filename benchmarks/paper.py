"""The findings of the paper that DDP was published with, beside what fdp's cost model says of the same cluster.

    python benchmarks/paper.py [--batches N ...] [--model NAME ...] [--pictures FOLDER]

Li et al., PyTorch Distributed (VLDB 2020), section 5: ResNet-50 and BERT on servers of eight V100, 100 Gbit/s between
servers, NCCL. Nothing is run: models are traced on the meta device, operators are estimated from their floating-point
operations and bytes, messages from the cluster's published rates. For each model and batch:

- overlap: a step of DDP against the same step with all messages after the backward pass, on 32 GPUs;
- caps: DDP's step with bucket caps of 0, 5, 10, 25 and 50 MiB, on 16 and 32 GPUs;
- auto: fdp's step with the buckets that its planner chooses, and what is gained over DDP's default and best cap.

How many samples a GPU had is not known to this program: it is the one number that is swept.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from paper_models import bert_base, bert_large, resnet50
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import fdp
from fdp.plan import Costs, Machine, estimate, simulate
from fdp.plan.ddp import DDP_CAPS_MB, plan_as_ddp

KERNELS, LINKS = 0.6, 0.8
"""The free numbers: the share of a published peak that kernels, and links, reach. Large matrix products and memory
copies get more, small ones less; NCCL on an idle link gets about that."""

V100 = Machine(
    flops_per_s=KERNELS * 15.7e12,  # NVIDIA V100 data sheet (SXM2): single precision
    bytes_per_s=KERNELS * 900e9,  # the same: memory bandwidth
    overhead_s=8e-6,  # a launch by eager PyTorch
    start_s=20e-6,  # a launch by NCCL
    pack_bytes_per_s=KERNELS * 900e9 / 2,  # read and written
)
CLUSTER = fdp.Network(
    latency_s=15e-6,
    bandwidth_bytes_per_s=LINKS * 100e9 / 8,
    algorithm="hierarchical",
    ranks_per_host=8,
    inner_latency_s=5e-6,
    inner_bandwidth_bytes_per_s=LINKS * 150e9,  # six NVLinks of 25 GB/s (the data sheet)
)
CAPS_MB = (0.0, 5.0, 10.0, 25.0, 50.0)
SIZES = (16, 32)
PAPER_OVERLAP = {"resnet50": 0.380, "bert_base": 0.352, "bert_large": 0.352}
PAPER_BEST = {"resnet50": "between 10 and 25", "bert_base": "50", "bert_large": "50"}


def _pictures(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.empty(rows, 3, 224, 224), "y": torch.zeros(rows, dtype=torch.long)}


def _sentences(rows: int) -> dict[str, torch.Tensor]:
    words = torch.zeros(rows, 128, dtype=torch.long)  # the length of most of BERT's own training
    return {"x": words, "y": words}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of the paper.

    Attributes:
        build: makes it.
        batch: makes the batch of a GPU with so many samples.
        batches: samples a GPU that are tried.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]
    batches: tuple[int, ...]


MODELS = {
    "resnet50": Model(resnet50, _pictures, (4, 8, 16, 32)),
    "bert_base": Model(bert_base, _sentences, (4, 8, 16, 32)),
    "bert_large": Model(bert_large, _sentences, (4, 8, 16, 32)),
}


def trace_of(name: str, rows: int) -> fdp.Trace:
    """Trace a step of plain gradient descent, in which one operator updates a parameter."""
    model = MODELS[name]
    with torch.device("meta"):
        apply, params, buffers = fdp.from_module(model.build())
        batch = model.batch(rows)

    def step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> torch.Tensor:
            output, _ = apply(params, buffers, batch["x"])
            return F.cross_entropy(output.flatten(0, -2), batch["y"].flatten())

        grads = fdp.grad(loss_fn)(params)
        return {key: torch.sub(p, grads[key], alpha=0.1) for key, p in params.items()}

    step.__name__ = name
    return fdp.data_parallel(step).trace(params, batch)


def caps_of(cap_mb: float) -> tuple[float, ...]:
    """Caps as in the paper's release: the first bucket has at most 1 MiB, whatever the others have."""
    return (min(cap_mb, DDP_CAPS_MB[0]), cap_mb)


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the model says of one model and batch, in seconds a step.

    Attributes:
        compute_s: of a GPU alone.
        communication_s: of DDP's messages on 32 GPUs.
        overlapped_s: DDP's default on 32 GPUs.
        apart_s: the same with all messages after the backward pass.
        caps_s: number of GPUs to cap to DDP.
        auto_s: number of GPUs to fdp with its own plan.
    """

    compute_s: float
    communication_s: float
    overlapped_s: float
    apart_s: float
    caps_s: dict[int, dict[float, float]]
    auto_s: dict[int, float]


def figures(trace: fdp.Trace, costs: Costs) -> Figures:
    """Simulate everything that is compared."""

    def ddp(size: int, caps: tuple[float, ...] = DDP_CAPS_MB, overlap: bool = True) -> fdp.Timeline:
        return simulate(*plan_as_ddp(trace, costs, caps, overlap), CLUSTER, size)

    auto = {size: trace.plan("auto", costs=costs, network=CLUSTER, world_size=size) for size in SIZES}
    whole = ddp(32)
    return Figures(
        compute_s=sum(costs.operations_s),
        communication_s=whole.communication_s,
        overlapped_s=whole.step_s,
        apart_s=ddp(32, overlap=False).step_s,
        caps_s={size: {cap: ddp(size, caps_of(cap)).step_s for cap in CAPS_MB} for size in SIZES},
        auto_s={size: simulate(auto[size], costs, CLUSTER, size).step_s for size in SIZES},
    )


def overlap_table(found: dict[tuple[str, int], Figures]) -> Table:
    """A row for each model and batch: what overlap saves, beside the paper's."""
    table = Table(
        "model", "samples a GPU", "compute, ms", "messages, ms", "apart, ms", "overlapped, ms", "time saved",
        "speed-up", "paper", box=box.MARKDOWN,
    )  # fmt: skip
    for (name, rows), row in found.items():
        table.add_row(
            name, str(rows), _ms(row.compute_s), _ms(row.communication_s), _ms(row.apart_s), _ms(row.overlapped_s),
            f"{1 - row.overlapped_s / row.apart_s:.1%}", f"{row.apart_s / row.overlapped_s:.2f}",
            f"{PAPER_OVERLAP[name]:.1%}",
        )  # fmt: skip
    return table


def caps_table(found: dict[tuple[str, int], Figures]) -> Table:
    """A row for each model, batch and number of GPUs: DDP by cap, and what the planner makes of it."""
    table = Table(
        "model", "samples", "GPUs", *(f"cap {cap:g}, ms" for cap in CAPS_MB), "best cap", "paper's", "auto, ms",
        "auto / default", "auto / best cap", box=box.MARKDOWN,
    )  # fmt: skip
    for (name, rows), row in found.items():
        for size in SIZES:
            caps, auto_s = row.caps_s[size], row.auto_s[size]
            best = min(caps, key=lambda cap: caps[cap])
            table.add_row(
                name, str(rows), str(size), *(_ms(caps[cap]) for cap in CAPS_MB), f"{best:g}", PAPER_BEST[name],
                _ms(auto_s), f"{auto_s / caps[25.0]:.3f}", f"{auto_s / caps[best]:.3f}",
            )  # fmt: skip
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def draw(folder: pathlib.Path) -> None:
    """Draw the pictures of the documents: a step of BERT under fdp and DDP, and how it scales."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = trace_of("bert_base", 16)
    costs = estimate(trace, V100)
    plan = trace.plan("auto", costs=costs, network=CLUSTER, world_size=32)
    ours = dataclasses.replace(simulate(plan, costs, CLUSTER, 32), name="BERT-base")
    theirs = dataclasses.replace(simulate(*plan_as_ddp(trace, costs), CLUSTER, 32), name="BERT-base under DDP")
    ours.draw(folder / "timeline.png", beside=theirs)
    dataclasses.replace(fdp.scaling(plan, network=CLUSTER, costs=costs), name="BERT-base").draw(folder / "scaling.png")


def main() -> None:
    """Prints both tables, or draws the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument(
        "--pictures", type=pathlib.Path, help="draw the pictures of docs/ into this folder, and no more"
    )
    args = parser.parse_args()
    if args.pictures is not None:
        draw(args.pictures)
        return
    console = Console(width=max(Console().width, 200))
    found = {}
    for name in args.model:
        for rows in args.batches or MODELS[name].batches:
            with console.status(f"{name}, {rows} samples a GPU"):
                trace = trace_of(name, rows)
                found[name, rows] = figures(trace, estimate(trace, V100))
    console.print(overlap_table(found))
    console.print(caps_table(found))


if __name__ == "__main__":
    main()
