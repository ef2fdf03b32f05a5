"""Out variants compute the same as the operators that they belong to."""

from __future__ import annotations

import warnings
from typing import Any

import optree
import pytest
import torch
from bits import same_bits
from operator_traces import graphs_of, operators_to_try
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fdp.emit.memory import out_variants


class Comparing(fx.Interpreter):
    """Runs a graph, and whatever has a form once more, into memory that is full of NaN and has a fence around it."""

    def __init__(self, graph: fx.GraphModule):
        super().__init__(graph)
        self.seen: set[str] = set()

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        form = out_variants.out_variant_of(n) if n.op == "call_function" else None
        if form is None or form.kind != "out":
            return super().run_node(n)
        before = optree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
        wanted = super().run_node(n)
        results = [wanted] if isinstance(wanted, torch.Tensor) else list(wanted)
        fences, outs = zip(*(self.fenced(value) for value in results), strict=True)
        given = dict(zip(form.names, outs, strict=True))
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            form.operator(*before[0], *form.extra, **before[1], **given)
        for fence, out, value in zip(fences, outs, results, strict=True):
            assert same_bits(out, value.detach()), f"{n.target}: {out} and not {value}"
            assert (out.shape, out.stride()) == (value.shape, value.stride()), f"{n.target} changed the shape"
            assert bool((fence[:64] == 165).all() and (fence[-64:] == 165).all()), f"{n.target} wrote elsewhere"
        self.seen.add(n.target._schema.name.removeprefix("aten::"))  # type: ignore[union-attr]
        return wanted

    @staticmethod
    def fenced(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = value.numel() * value.itemsize
        memory = torch.full((64 + size + 64,), 165, dtype=torch.uint8)
        inner = memory[64 : 64 + size].view(value.dtype)
        if value.is_floating_point():
            inner.fill_(float("nan"))
        return memory, inner.as_strided(value.shape, value.stride(), inner.storage_offset())


OPERATORS = operators_to_try()
TRIED: list[str] = []
SEEN: set[str] = set()


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.formatted_name)
def test_a_form_computes_what_the_operator_computes(op: Any) -> None:
    for graph, tensors in graphs_of(op, limit=6):
        interpreter = Comparing(graph)
        with torch.no_grad():
            interpreter.run(*[t.detach() for t in tensors])
        SEEN.update(interpreter.seen)
    TRIED.append(op.formatted_name)


def test_every_operator_with_a_form_was_tried() -> None:
    if [op.formatted_name for op in OPERATORS] != TRIED:
        pytest.skip("not all of the tests above ran in this process")
    assert out_variants._WRITES_IN_PLACE <= SEEN


@pytest.mark.parametrize("scalar", [0.3, 2])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex64])
def test_arithmetic_with_a_number(name: str, dtype: torch.dtype, scalar: Any) -> None:
    x = torch.arange(1, 9).to(dtype)
    operator = getattr(torch.ops.aten, name).Scalar
    graph = make_fx(lambda x: operator(x, scalar), tracing_mode="fake")(x)
    interpreter = Comparing(graph)
    interpreter.run(x)
    assert interpreter.seen == {name}
