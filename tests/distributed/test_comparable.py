"""Texts that ranks compare are the same in every process: no address, no order of a set goes into one."""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import ALL_SAMPLES, exhaustive

import fdp
from fdp.distributed.comparable import comparable, without_addresses
from fdp.runtime.agreement import schedule_text

Tree = Any


class Kind(enum.Enum):
    FIRST = 1


@dataclasses.dataclass(frozen=True)
class Settings:
    names: frozenset[str]
    act: Any = torch.relu
    hidden: Any = dataclasses.field(default=None, repr=False)


class Opaque:
    pass


class Holder:
    def __repr__(self) -> str:
        return f"Holder of {object()!r}"


def function() -> None:
    """Has a name."""


def values() -> list[Any]:
    words = {"alpha", "beta", "gamma", "delta", "epsilon"}
    return [
        1, 1.0, True, None, "at 0x7f", b"x", 1j, torch.float32, torch.device("cpu"), Kind.FIRST,
        words, frozenset(words), [words, (words,)], {"k": words}, Settings(frozenset(words), hidden=object()),
        function, Opaque, Opaque().__init__, torch.sym_float, len, "x".join,
        functools.partial(function, Opaque(), k=words),
        Opaque(), Holder(), torch.Generator(), lambda: None, slice(1, 2), torch.ops.aten.add.Tensor,
    ]  # fmt: skip


def test_two_processes_write_the_same_texts() -> None:
    """Under other hash seeds, of which this process has one, and at other addresses: what is made before moves them."""
    script = textwrap.dedent("""
        import sys
        ballast = [bytearray(1000 * n) for n in range(int(sys.argv[1]))]
        import test_comparable as t
        from fdp.distributed.comparable import comparable
        print([comparable(value) for value in t.values()])
    """)
    found = {f"{[comparable(value) for value in values()]}\n"}
    for seed in ("1", "2", "3") if ALL_SAMPLES else ("1",):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = [sys.executable, "-c", script, str(50 * int(seed))]
        found.add(subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout)
    (text,) = found
    assert " at 0x7f" not in text.replace("'at 0x7f'", "")


def test_values_that_differ_have_texts_that_differ() -> None:
    texts = [comparable(value) for value in values() if not isinstance(value, (Opaque, Holder, torch.Generator))]
    assert len(set(texts)) == len(texts), texts
    assert comparable({1, 2}) != comparable({1, 3}) and comparable((1,)) != comparable([1])
    assert comparable(Settings(frozenset("a"))) != comparable(Settings(frozenset("b")))


def floating(state: Tree, batch: Tree) -> Tree:
    """Adam's correction as people write it: a number that is read from a tensor, in floating-point arithmetic."""
    step = state["t"].item()
    grads = fdp.grad(lambda w: ((w * batch) ** 2).mean())(state["w"])
    return {"w": state["w"] - 0.1 * grads / (1 - 0.9 ** (step + 1)), "t": state["t"] + 1}


def settings(state: Tree, batch: Tree, static: Any) -> Tree:
    return {"w": state["w"] * 2 + fdp.pmean(batch).sum()}


def run_steps(dtype: torch.dtype) -> list[Any]:
    state = {"w": torch.ones(3), "t": torch.tensor(0, dtype=dtype)}
    step = fdp.data_parallel(floating)
    batch = torch.arange(3.0) + (dist.get_rank() if dist.is_initialized() else 0)
    for _ in range(3):
        state = step(state, batch)
    other = fdp.data_parallel(settings, batch_argnums=1, static_argnums=2)
    words = frozenset({"alpha", "beta", "gamma", "delta", "epsilon"})
    for static in (words, Settings(words), (Opaque, torch.sym_float), functools.partial(function, words)):
        other({"w": torch.ones(2)}, torch.ones(2), static)
    return [state["w"].tolist(), state["t"].item()]


@pytest.mark.parametrize("dtype", [torch.int64, pytest.param(torch.float32, marks=exhaustive)])
def test_ranks_agree_on_numbers_that_are_read_from_tensors(dtype: torch.dtype) -> None:
    """(These ranks are forks of one process, where functions lie alike: that texts do is tested above.)"""
    found = ranks.run(2, run_steps, dtype)
    assert found[0] == found[1] and found[0][1] == 3
    # The same in one process on both batches at once, as plain torch.
    w, t = torch.ones(3), 0
    for _ in range(3):
        grad = sum(2 * w * (torch.arange(3.0) + rank) ** 2 / 3 for rank in range(2)) / 2
        w, t = w - 0.1 * grad / (1 - 0.9 ** (t + 1)), t + 1
    torch.testing.assert_close(torch.tensor(found[0][0]), w)


def test_no_address_is_left_in_what_ranks_compare() -> None:
    step = fdp.data_parallel(floating)
    plan = step.plan({"w": torch.ones(3), "t": torch.tensor(0)}, torch.ones(3))
    text = schedule_text(plan)
    assert "sym_float" in text and "0x" not in text
    assert all("0x" not in operation.target for operation in plan.trace.operations)
    assert without_addresses("<f at 0x7f00deadbeef>, 0x10") == "<f at ...>, 0x10"
