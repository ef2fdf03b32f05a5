"""Under `torch.set_default_device` fdp's own tensors stay where they belong: on the CPU, or beside the user's."""

from __future__ import annotations

import ast
import pathlib
import warnings
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from bits import same_leaves
from samples import some

import fdp

# What torch makes on the default device, if nothing says where (torch.utils._device).
MAKE = {
    "arange", "asarray", "as_tensor", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace",
    "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
}  # fmt: skip
NUMBERS_OF_THE_PROGRAM = {
    ("collectives/over_pytrees.py", "torch.tensor(leaf)"), ("collectives/own_rank.py", "torch.tensor(x)")
}  # fmt: skip
"""They become tensors where the program would make them."""


def test_every_tensor_that_fdp_makes_has_its_device_named() -> None:
    root, unnamed = pathlib.Path(fdp.__file__).parent, set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            makes = ast.unparse(node.func.value) == "torch" and node.func.attr in MAKE
            if makes and not any(keyword.arg in ("device", None) for keyword in node.keywords):
                unnamed.add((path.relative_to(root).as_posix(), ast.unparse(node)))
    assert unnamed == NUMBERS_OF_THE_PROGRAM


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")


def train(default: str, way: dict[str, Any], folder: str) -> tuple[Any, list[str]]:
    """A step of many parts under a default device, whose every tensor is on the CPU."""
    before = torch.get_default_device()
    torch.set_default_device(default)
    try:
        inner = fdp.optim.clipped(fdp.optim.from_torch(torch.optim.AdamW, lr=1e-2, fused=True), 1.0)
        optimizer = fdp.optim.scheduled(
            fdp.optim.skip_nonfinite(fdp.optim.averaged(inner, 0.9)), lambda count: 0.01 / (1 + count.double())
        )
        params = {"w": numbers(4, 3), "b": numbers(3, seed=1)}

        def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
            y = torch.utils.checkpoint.checkpoint(
                lambda a, w: torch.nn.functional.dropout(torch.tanh(a @ w), 0.3), x, p["w"], use_reentrant=False
            )
            return ((y + p["b"]) ** 2).mean()

        def step_fn(state: Any, x: torch.Tensor) -> Any:
            now, later = fdp.random.split(state["key"])
            value, grads = fdp.accumulate(fdp.value_and_grad(loss), microbatches=2)(state["params"], x)
            p, opt = optimizer.update(grads, state["opt"], state["params"])
            noise, mine = fdp.random.normal(now, (3,)), fdp.per_rank(fdp.axis_index() * 1)
            return {"params": p, "opt": opt, "key": later}, (fdp.pmean(value), noise, mine, fdp.psum(x.sum()))

        step, outs = fdp.data_parallel(step_fn, **way), []
        key = fdp.random.key(3, device="cpu")
        state = fdp.replicate({"params": params, "opt": optimizer.init(params), "key": key})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a learning rate of Python's makes the optimizer ask for little
            for call in range(4):
                torch.manual_seed(call)
                state, out = step(state, numbers(8, 4, seed=10 * dist.get_rank() + call))
                outs.append(out)
        for batch, active in fdp.join([numbers(2, 2)]):
            outs.append((batch, active))
        fdp.assert_replicated(state)
        fdp.save(folder, state)
        outs.append(fdp.load(folder, like=state))
        sharded, result = step(fdp.shard(state, min_size=0), numbers(8, 4))
        outs.append((fdp.unshard(sharded), result))
        return outs, sorted({leaf.device.type for leaf in fdp.pytree.leaves_of(outs)})
    finally:
        torch.set_default_device(before)


def trained_under_both(way: dict[str, Any], folder: str) -> None:
    expected, _ = train("cpu", way, folder + "-cpu")
    found, devices = train("meta", way, folder + "-meta")
    assert devices == ["cpu"]
    assert same_leaves(found, expected)


WAYS = {"donated, in sixteen bits": {"donate_argnums": 0, "wire_dtype": torch.bfloat16}, "compiled": {"compile": True}}


@pytest.mark.parametrize("way", some(WAYS))
def test_a_default_device_on_which_nothing_can_run_changes_no_bit(way: str, tmp_path: pathlib.Path) -> None:
    """`meta` tensors have no numbers: one that fdp made by itself would be found at once."""
    ranks.run(2, trained_under_both, WAYS[way], str(tmp_path / "state"))
