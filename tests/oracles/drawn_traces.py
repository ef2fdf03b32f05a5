"""Random traces for properties of plans, put together by hand: operations, views, entries, reductions."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import optree
import torch
from hypothesis import strategies as st
from torch import fx

from fdp.trace import Operation, Reduction, Trace

KIB = 1024
_DTYPES = (torch.float32, torch.float64, torch.int64, torch.float16)
_OPS = ("mean", "sum", "max", "all_gather", "broadcast", "sum_scatter", "all_to_all", "permute")
_SPLIT = ("sum_scatter", "all_to_all")


def traces(most: int = 40) -> st.SearchStrategy[Trace]:
    """Draw a trace of up to `most` calls, with what each operation needs; a shorter one begins like a longer one."""
    # From a seed: to draw each number by itself takes Hypothesis twenty times as long as to make the plan.
    return st.builds(_draw_trace, st.integers(0, 2**32), st.integers(0, most))


def _draw_trace(seed: int, calls: int) -> Trace:
    rng = random.Random(seed)
    operations: list[Operation] = []
    reductions: list[Reduction] = []
    dtypes, ops = rng.sample(_DTYPES, rng.randint(1, 3)), rng.sample(_OPS, rng.randint(1, 4))
    density = rng.choice([0.1, 0.3, 0.6])

    def maker(index: int) -> int:
        """The operation that made the memory which a view looks at; -1 for an input."""
        while operations[index].view and operations[index].needs:
            index = operations[index].needs[0]
        return -1 if operations[index].view else index

    def earlier(most: int) -> tuple[int, ...]:
        """Some operations before this one, more of the near past: graphs of training steps are long and thin."""
        count = len(operations)
        back = [rng.choice([1, 1, 2, 3, rng.randint(1, count)]) for _ in range(rng.randint(0, most)) if count]
        return tuple(dict.fromkeys(max(count - step, 0) for step in back))

    for number in range(calls):
        name, count = f"n{number}", len(operations)
        kind = "reduction" if rng.random() < density else rng.choice(["call", "call", "view", "entries"])
        if kind == "entries":
            shared = earlier(1)
            for entry in range(rng.randint(1, 4)):
                own = {need for need in earlier(2) if need < count} | set(shared)
                if entry and rng.random() < 0.1:
                    own.add(count + entry - 1)  # two entries of one piece of memory
                operations.append(Operation(name, "aten._foreach.x", tuple(sorted(own)), entry=entry))
        elif kind == "view":
            operations.append(Operation(name, "aten.view.default", earlier(1), view=True))
        elif kind == "call":
            operations.append(Operation(name, "aten.call.default", tuple(sorted(earlier(3)))))
        else:
            needs = earlier(1)
            position = maker(needs[0]) if needs else -1
            since = [k for k in range(position + 1, count) if not operations[k].view]
            if needs and since and rng.random() < 0.2:  # written in place after it was made
                position = rng.choice(since)
            size, op, dtype = rng.choice([0, 1, 3, 16, 100, 256, 1000, 5000]), rng.choice(ops), rng.choice(dtypes)
            shape = (2, size) if op in _SPLIT else (size,)
            size = size * len(shape)
            reductions.append(
                Reduction(
                    name=name,
                    kind=rng.choice(["gradient", "value", "transpose"]),
                    op=op,
                    root=rng.randint(0, 1) if op == "broadcast" else 0,
                    shape=shape,
                    dtype=dtype,
                    device=torch.device("cpu"),
                    size_bytes=size * dtype.itemsize,
                    produced_by="",
                    position=position,
                    operation=count,
                    source="",
                    pairs=rng.choice([((0, 1), (1, 0)), ((1, 0),)]) if op == "permute" else (),
                )
            )
            own = {*needs, position} - {-1}
            operations.append(Operation(name, f"fdp.{op}", tuple(sorted(own))))
    reductions.sort(key=lambda reduction: (reduction.position, reduction.operation))
    for index, reduction in enumerate(reductions):
        at = reduction.operation
        operations[at] = dataclasses.replace(operations[at], reduction=index)
    nothing = optree.tree_structure(())
    return Trace(
        name=f"drawn from {seed}",
        source="drawn_traces.py:1",
        world_size=2,
        inputs=(),
        outputs=(),
        operations=tuple(operations),
        reductions=tuple(reductions),
        replicated_constants=(),
        closed_over=(),
        replicated_calls=(),
        graph=fx.GraphModule(torch.nn.Module(), fx.Graph()),
        in_spec=nothing,
        out_spec=nothing,
    )


def caps() -> st.SearchStrategy[Any]:
    """Draw a `bucket_cap_mb`: a number, a list of numbers, "auto"; from less than one element to more than all."""
    one = st.sampled_from([1e-7, 0.5 / KIB, 1 / KIB, 4 / KIB, 20 / KIB, 1.0, 100.0])
    return st.just("auto") | one | st.lists(one, min_size=1, max_size=4)
