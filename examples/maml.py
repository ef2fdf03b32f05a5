"""Learn to learn sine waves: model-agnostic meta-learning (MAML), on as many ranks as there are.

    torchrun --standalone --nproc-per-node 2 examples/maml.py     # two ranks of this machine
    python examples/maml.py                                       # the same program, a world of one
    python examples/maml.py --first-order                         # without second derivatives

A task is a sine wave of unknown amplitude and phase, seen at ten points. MAML looks for initial weights from which
one step of gradient descent on those ten points fits the wave: the gradient of the outer loss goes through the
gradient of the inner one. Beside it the same network is trained on the same points of all waves at once, and then
adapted in the same way.

Finn, Abbeel, Levine: Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks, ICML 2017, section 5.1.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

import fdp

SHOTS = 10
TEST_TASKS = 1000
TEST_STEPS = (0, 1, 5, 10)
Params = dict[str, Tensor]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="MAML on sine waves with fdp.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6000, help="outer steps")
    parser.add_argument("--tasks", type=int, default=50, help="tasks in an outer step, over all ranks")
    parser.add_argument("--inner-steps", type=int, default=1, help="steps of adaptation while training")
    parser.add_argument("--inner-lr", type=float, default=0.01, help="learning rate of adaptation")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate of the outer optimizer, Adam")
    parser.add_argument("--first-order", action="store_true", help="leave out the second derivatives")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and tasks")
    args = parser.parse_args(argv)
    if min(args.steps, args.tasks, args.inner_steps) < 1:
        parser.error("--steps, --tasks and --inner-steps must be at least 1")
    return args


def sine_tasks(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw waves: points to adapt on, "x" and "y" [count, 10, 1], and to be judged on, "x_query" and "y_query"."""
    amplitude = torch.empty(count, 1, 1).uniform_(0.1, 5.0, generator=generator)
    phase = torch.empty(count, 1, 1).uniform_(0.0, math.pi, generator=generator)
    x, x_query = torch.empty(2, count, SHOTS, 1).uniform_(-5.0, 5.0, generator=generator)
    return {
        "x": x, "y": amplitude * torch.sin(x - phase),
        "x_query": x_query, "y_query": amplitude * torch.sin(x_query - phase),
    }  # fmt: skip


# The model is a function of a dict of tensors: nothing more is needed.


def init_params(generator: torch.Generator, widths: Sequence[int] = (1, 40, 40, 1)) -> Params:
    params = {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        params[f"w{i}"] = torch.randn(fan_in, fan_out, generator=generator) * fan_in**-0.5
        params[f"b{i}"] = torch.zeros(fan_out)
    return params


def predict(params: Params, x: Tensor) -> Tensor:
    h = torch.relu(x @ params["w0"] + params["b0"])
    h = torch.relu(h @ params["w1"] + params["b1"])
    return h @ params["w2"] + params["b2"]


def error(params: Params, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(predict(params, x), y)


def adapt(params: Params, x: Tensor, y: Tensor, steps: int, lr: float | Tensor, first_order: bool = False) -> Params:
    """A few steps of gradient descent on one task. Local to the task, so `torch.func.grad`: nothing is averaged."""
    for _ in range(steps):
        slope = grad(error)(params, x, y)
        if first_order:  # the outer gradient takes the step for a constant
            slope = {name: g.detach() for name, g in slope.items()}
        params = {name: p - lr * slope[name] for name, p in params.items()}
    return params


def training_step(
    optimizer: fdp.optim.Optimizer, loss_of: Callable[[Params, Any], Tensor]
) -> Callable[[Any, Any], Any]:
    """Make the outer step of either way of training: the mean loss over this rank's tasks, averaged over ranks."""

    @fdp.data_parallel(donate_argnums=0)
    def outer_step(state: Any, tasks: Any) -> Any:
        def mean_loss(params: Params) -> Tensor:
            return vmap(lambda task: loss_of(params, task))(tasks).mean()

        loss, grads = fdp.value_and_grad(mean_loss)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, fdp.pmean(loss)

    return outer_step


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    rank, ranks = int(fdp.axis_index()), fdp.axis_size()
    if args.tasks % ranks:
        raise SystemExit(f"--tasks {args.tasks} cannot be shared evenly by {ranks} ranks")

    def say(text: str) -> None:
        if rank == 0:  # one rank speaks for all
            print(text, flush=True)

    optimizer = fdp.optim.from_torch(torch.optim.Adam, lr=args.lr)
    params = init_params(torch.Generator().manual_seed(args.seed))

    def loss_after_adaptation(params: Params, task: Any) -> Tensor:
        adapted = adapt(params, task["x"], task["y"], args.inner_steps, args.inner_lr, args.first_order)
        return error(adapted, task["x_query"], task["y_query"])

    def loss_without(params: Params, task: Any) -> Tensor:
        return (error(params, task["x"], task["y"]) + error(params, task["x_query"], task["y_query"])) / 2

    @fdp.data_parallel
    def few_shot_errors(params: Params, lr: Tensor, tasks: Any) -> Tensor:
        def errors(x: Tensor, y: Tensor, x_query: Tensor, y_query: Tensor) -> Tensor:
            found, adapted = [], params
            for before, after in itertools.pairwise((0, *TEST_STEPS)):
                adapted = adapt(adapted, x, y, after - before, lr)
                found.append(error(adapted, x_query, y_query))
            return torch.stack(found)

        found = vmap(errors)(*(tasks[name] for name in ("x", "y", "x_query", "y_query")))
        return fdp.pmean(found.mean(0), weight=len(found))  # exact, also where ranks have not equally many tasks

    # Each rank is tested on a share of the same waves, which no training step has seen.
    tests = {name: x[rank::ranks] for name, x in sine_tasks(TEST_TASKS, torch.Generator().manual_seed(10**6)).items()}

    def train(name: str, loss_of: Callable[[Params, Any], Tensor]) -> Tensor:
        step = training_step(optimizer, loss_of)
        # Rank 0's weights, and for each rank tasks of its own.
        state = fdp.replicate({"params": params, "opt": optimizer.init(params)})
        generator = torch.Generator().manual_seed(1000 * args.seed + rank)
        start_s, total = time.perf_counter(), torch.zeros(())
        every = max(1, args.steps // 5)
        for i in range(1, args.steps + 1):
            state, loss = step(state, sine_tasks(args.tasks // ranks, generator))
            total += loss
            if i % every == 0:
                say(f"{name:9s} step {i:5d}/{args.steps}  mean loss of the last {every} steps {total / every:.3f}")
                total = torch.zeros(())
        fdp.assert_replicated(state)  # raises, and names the leaf, if one bit differs on one rank
        say(f"{name:9s} {args.steps / (time.perf_counter() - start_s):.0f} steps/s with the first call")
        # The rate is a tensor, an argument like any other: a new value is no reason for a new trace.
        rates = [torch.tensor(args.inner_lr * part) for part in ([1.0] if name == "MAML" else [1.0, 0.3, 0.1, 0.03])]
        return torch.stack([few_shot_errors(state["params"], rate, tests) for rate in rates]).nan_to_num(torch.inf)

    order = "first order" if args.first_order else "second order"
    say(f"MAML, {order}, {args.tasks} tasks a step on {ranks} ranks; {TEST_TASKS} new waves, {SHOTS} points each")
    errors = {"MAML": train("MAML", loss_after_adaptation), "pretrained": train("pretrained", loss_without)}
    say("mean squared error on new waves after    " + "".join(f"{n:>8d}" for n in TEST_STEPS) + "  steps of adaptation")
    say(f"{'MAML':>40s} " + "".join(f"{e:8.3f}" for e in errors["MAML"][0].tolist()))
    best = errors["pretrained"].amin(0)  # in favour of the baseline: for each column the best of four rates
    say(f"{'pretrained, the best of four rates':>40s} " + "".join(f"{e:8.3f}" for e in best.tolist()))
    say(f"all {ranks} ranks hold the same bits")


if __name__ == "__main__":
    if dist.is_torchelastic_launched():  # by torchrun
        dist.init_process_group("gloo")
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
