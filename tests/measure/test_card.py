"""The simulated network card of the benchmarks: its results, its arithmetic, and who can run on it.

How exact its times are is no test, since other work on the machine decides it: benchmarks/overlap.py prints that.
"""

from __future__ import annotations

import pathlib
import textwrap

import pytest
from forked import Forked
from samples import some

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
HEAD = f"""
import math, sys, warnings
sys.path.insert(0, {str(BENCHMARKS)!r})
import torch
import torch.distributed as dist
import torch.nn.functional as F
from card import Link, plug_in
import fdp

torch.set_num_threads(1)
"""


def run(program: str, folder: pathlib.Path) -> None:
    """Runs a program in a process of its own, which becomes rank 0 of a card."""
    script = folder / "program.py"
    script.write_text(HEAD + textwrap.dedent(program) + "\ndist.destroy_process_group()\n")
    done = Forked(script, (), {})
    _, errors = done.communicate(timeout=120)
    assert done.returncode == 0, errors


def test_results_are_those_of_ranks_that_hold_the_same(tmp_path: pathlib.Path) -> None:
    run(
        """
        plug_in(Link(4, 0.0, math.inf))
        own = torch.tensor([1.0, 2.0, 3.0, 5.0])

        def reduced(op):
            out = own.clone()
            dist.all_reduce(out, op)
            return out

        assert torch.equal(reduced(dist.ReduceOp.SUM), 4 * own)
        assert all(torch.equal(reduced(op), own) for op in (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN))
        try:
            reduced(dist.ReduceOp.PRODUCT)
        except Exception as error:
            assert "does not reduce by" in str(error), error
        else:
            raise AssertionError("a product was taken")
        parts = [torch.zeros(4) for _ in range(4)]
        dist.all_gather(parts, own)
        assert all(torch.equal(part, own) for part in parts)
        rows = torch.zeros(16)
        dist.all_gather_single(rows, own)
        assert torch.equal(rows.view(4, 4), own.expand(4, 4))
        sent = torch.zeros(4)
        dist.all_to_all_single(sent, own)
        assert torch.equal(sent, own[:1].expand(4))
        part = torch.zeros(1)
        dist.reduce_scatter_single(part, own)
        assert torch.equal(part, 4 * own[:1])
        dist.broadcast(own, 0)
        dist.barrier()
        import torch.distributed._functional_collectives as functional
        assert torch.equal(functional.all_reduce(own, "avg", dist.group.WORLD) + 0, own)
        """,
        tmp_path,
    )


def test_the_seconds_of_a_ring_are_those_of_its_hops(tmp_path: pathlib.Path) -> None:
    # A dumber program: walk the hops. In each of them all ranks send a part to their neighbours at the same time.
    run(
        """
        for world in (1, 2, 3, 16, 256):
            link = Link(world, 3e-6, 2e9)
            for size in (0, 4, 10**6, 25 * 2**20):
                reduce = sum(3e-6 + size / world / 2e9 for hop in range(world - 1))
                gather = sum(3e-6 + size / world / 2e9 for hop in range(world - 1))
                assert math.isclose(link.all_reduce_s(size), reduce + gather)
                assert math.isclose(link.scatter_s(size), reduce)
                assert math.isclose(link.all_gather_s(size), sum(3e-6 + size / 2e9 for hop in range(world - 1)))
                assert math.isclose(link.broadcast_s(size), sum(3e-6 for hop in range(world - 1)) + size / 2e9)
                assert math.isclose(link.all_reduce_s(size), fdp.plan.Network(3e-6, 2e9).message_s("mean", size, world))
        plug_in(Link(2, 0.0, math.inf))
        """,
        tmp_path,
    )


def test_messages_follow_each_other_and_none_is_early(tmp_path: pathlib.Path) -> None:
    run(
        """
        import time
        card = plug_in(Link(2, 5e-3, math.inf))  # 10 ms for each all-reduce
        start = time.perf_counter()
        tensors = [torch.ones(2) for _ in range(3)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        futures = [work.get_future() for work in works]
        ended = []
        for work, future in zip(works, futures):
            work.wait()
            ended.append(time.perf_counter() - start)
            assert future.done()
        assert all(end >= 10e-3 * (i + 1) for i, end in enumerate(ended)), ended
        assert all(late >= 0 for late in card.late_s())
        assert [message[0] for message in card.messages] == ["all_reduce"] * 3
        """,
        tmp_path,
    )


@pytest.mark.parametrize("world", some([2, 16]))
def test_everybody_trains_on_it_as_alone(world: int, tmp_path: pathlib.Path) -> None:
    run(
        f"""
        from cases import Case
        from contenders import CONTENDERS
        from torch import nn

        case = Case(
            "small", "", lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)),
            lambda: {{"x": torch.randn(8, 4), "y": torch.randn(8, 2)}},
            lambda out, batch: F.mse_loss(out, batch["y"]), rounds=1,
        )

        def trained(name):
            running = CONTENDERS[name](case)
            for _ in range(3):
                running.step()
            return {{key: value.detach().clone() for key, value in running.params().items()}}

        alone = trained("eager")
        card = plug_in(Link({world}, 1e-5, 1e9))
        for name in ("ddp", "ddp-cap-1", "fdp", "fdp-cap-1"):
            before = len(card.messages)
            found = trained(name)
            assert found.keys() == alone.keys()
            assert all(torch.allclose(found[key], alone[key], atol=1e-6) for key in alone), name
            kinds = {{kind for kind, _, _ in card.messages[before:]}}
            assert {{"all_reduce", "broadcast"}} <= kinds, (name, kinds)
        """,
        tmp_path,
    )
