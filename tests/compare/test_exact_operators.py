"""Operators that are said to round nothing compute the same numbers with twice as many digits."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from operator_traces import graphs_of
from samples import ALL_SAMPLES
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from fdp.compare.exact_operators import _EXACT, rounds_nothing

RANDOM = {"bernoulli"}
UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
NAMED_OTHERWISE = {
    "__getitem__", "double", "half", "max", "pad", "round", "scatter", "sort",
    *(f"nn.functional.{name}" for name in (
        "adaptive_max_pool2d", "adaptive_max_pool3d", "embedding", "hardtanh", "interpolate", "max_pool2d",
        "max_pool3d", "one_hot", "pad", "pixel_shuffle", "pixel_unshuffle", "relu", "threshold", "upsample_nearest",
    )),
}  # fmt: skip


def wide(x: Any) -> Any:
    if isinstance(x, torch.dtype):
        return torch.float64 if x == torch.float32 else x
    return x.double() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x


class Wider(fx.Interpreter):
    """Runs a graph, and each operator of it that is said to be exact with twice the digits as well."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: set[str] = set()
        self.rounding: set[str] = set()

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or not rounds_nothing(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        with_more = n.target(*tree_map(wide, args), **tree_map(wide, kwargs))  # type: ignore[operator]
        found = super().run_node(n)
        name = str(n.target._schema.name).split("::")[1]  # type: ignore[union-attr]
        if name not in UNINITIALISED | RANDOM:
            self.seen.add(name)
            pairs = zip(tree_leaves(found), tree_leaves(with_more), strict=True)
            if not all(torch.equal(wide(one).nan_to_num(), wide(two).nan_to_num()) for one, two in pairs):
                self.rounding.add(str(n.target))
        return found


def looked_at(graphs: list[tuple[fx.GraphModule, list[torch.Tensor]]]) -> tuple[set[str], set[str]]:
    seen, rounding = set[str](), set[str]()
    for graph, tensors in graphs:
        wider = Wider(graph)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            wider.run(*(t.detach().clone() for t in tensors))
        seen |= wider.seen
        rounding |= wider.rounding
    return seen, rounding


def test_exact_operators_compute_the_same_numbers_with_more_digits() -> None:
    names = _EXACT | NAMED_OTHERWISE | {each.removesuffix("_copy") for each in _EXACT}
    # Views by places are of memory that samples lay out, and copies here do not.
    ops = [op for op in op_db if op.name in names and not op.name.startswith("as_strided")]
    if not ALL_SAMPLES:  # one variant of each
        ops = list({op.name: op for op in ops}.values())
    graphs = [graph for op in ops for graph in graphs_of(op, 1)]
    seen, rounding = looked_at(graphs)
    assert not rounding
    assert len(seen) > 0.7 * len(_EXACT)


def test_what_rounds_is_not_said_to_be_exact() -> None:
    def rounds(x: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
        y = x.clone()
        y.index_put_((index,), x, accumulate=True)
        return [
            y,
            x.to(torch.bfloat16),
            x.round(decimals=2),
            x.sum(0),
            x.double().mul(0.1).float(),
            torch.view_as_complex(x).abs(),
            x.scatter_reduce(0, index.unsqueeze(1), x, "mean"),
        ]

    graph = make_fx(rounds, tracing_mode="fake")(torch.rand(2, 2), torch.tensor([0, 0])).graph
    exact = {str(node.target) for node in graph.nodes if node.op == "call_function" and rounds_nothing(node)}
    assert exact == {"aten.clone.default", "aten._to_copy.default"}  # the latter where it adds digits
    casts = [node for node in graph.nodes if "_to_copy" in str(node.target)]
    assert [rounds_nothing(node) for node in casts] == [False, True, False]
