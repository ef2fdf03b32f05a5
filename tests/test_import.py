"""`import fdp` brings in little besides torch: what takes long to import waits until something needs it."""

from __future__ import annotations

import subprocess
import sys

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
