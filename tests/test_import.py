"""`import fdp` brings in little besides torch: what takes long to import waits until something needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from samples import some

SLOW = [
    "matplotlib", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint",
    "torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes",
]  # fmt: skip

PROGRAM = f"""
import sys, torch
before = set(sys.modules)
import fdp
print([name for name in {SLOW} if name in sys.modules and name not in before])
assert {{"save", "load", "CheckpointManager"}} <= set(dir(fdp))
from fdp import CheckpointManager, load, save
print("torch.distributed.checkpoint" in sys.modules, fdp.save is save)
step = fdp.data_parallel(lambda x: fdp.pmean(x))
print("torch._dynamo" in sys.modules)
print(step(torch.ones(1)))
"""


def test_nothing_slow_is_imported_before_it_is_needed() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert ended.stdout.splitlines()[0] == "[]", ended.stderr
    assert ended.stdout.splitlines()[1:] == ["True True", "False", "tensor([1.])"], ended.stdout + ended.stderr


DRAWS_NOTHING = """
import random, numpy, torch, fdp

def states():
    return random.getstate(), [str(part) for part in numpy.random.get_state()], torch.get_rng_state().tolist()

before = states()
step = fdp.data_parallel(lambda w, x: w + fdp.pmean((x * torch.arange(3.0)).sum()), compile=COMPILE)
w, x = torch.ones(1), torch.ones(3)
plan = step.plan(w, x)
print(plan, plan.memory_plan(), plan.memory(), sep="\\n")
for _ in range(3):
    w = step(w, x)
assert states() == before
"""


@pytest.mark.parametrize("compile", some([False, True]))
def test_calls_and_tables_draw_no_random_numbers(compile: bool) -> None:
    """In a new process: what is imported late, such as Rich, may draw as it is imported."""
    program = DRAWS_NOTHING.replace("COMPILE", str(compile))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
