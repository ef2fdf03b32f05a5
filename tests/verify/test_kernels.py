"""Out variants that the validator trusts write each result once, whatever was there and however their arguments lie."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from bits import same_bits
from fake_ranks import fake_group
from operator_traces import graphs_of, operators_to_try
from torch import fx

import fdp
from fdp.emit.codegen.program import write_program
from fdp.emit.memory import out_variants
from fdp.emit.memory.decisions import plan_memory
from fdp.verify import VerificationError, verify_program
from fdp.verify.kernels import WRITE_ONCE, why_not_trusted
from fdp.verify.memory import Block, View, view_of
from fdp.verify.schemas import operator_of


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def turned(x: torch.Tensor) -> torch.Tensor:
    """The last dimension is the first in memory."""
    order = list(reversed(range(x.dim())))
    return torch.empty([x.shape[at] for at in order], dtype=x.dtype).permute(order).copy_(x)


def rotated(x: torch.Tensor) -> torch.Tensor:
    order = [*range(1, x.dim()), 0] if x.dim() else []
    back = [order.index(at) for at in range(x.dim())]
    return torch.empty([x.shape[at] for at in order], dtype=x.dtype).permute(back).copy_(x)


def with_gaps(x: torch.Tensor) -> torch.Tensor:
    whole = torch.empty([2 * size for size in x.shape], dtype=x.dtype)
    return whole[tuple(slice(None, None, 2) for _ in x.shape)].copy_(x)


def repeated(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape) if x.dim() else x.clone()


def channels_last(x: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.clone(memory_format=formats.get(x.dim(), torch.contiguous_format))


WAYS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    as_it_is, turned, rotated, with_gaps, repeated, channels_last,
)  # fmt: skip


def seen_by_the_validator(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return view_of(Block("fresh"), value.storage_offset(), value.shape, value.stride(), value.dtype)
    return [seen_by_the_validator(each) for each in value] if isinstance(value, (list, tuple)) else value


class Trying(fx.Interpreter):
    """Runs a graph, and whatever has a form once more for each way in which its arguments may lie."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.trusted: set[str] = set()
        self.refused: list[str] = []

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = super().run_node(n)
        form = out_variants.out_variant_of(n) if n.op == "call_function" else None
        if form is not None and form.kind == "out":
            for lay in WAYS:
                self.try_one(n, form, lay, args, kwargs)
        return result

    def try_one(self, n: fx.Node, form: Any, lay: Any, args: Any, kwargs: Any) -> None:
        given, named = optree.tree_map(lambda x: lay(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        target: Any = n.target
        try:
            wanted = target(*given, **named)
        except RuntimeError:
            return  # it does not take arguments that lie so
        results = [wanted] if isinstance(wanted, torch.Tensor) else list(wanted)
        outs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in results]
        for out in outs:
            out.fill_(float("nan") if out.is_floating_point() else 77)
        places = dict(zip(form.names, outs, strict=True))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            form.operator(*given, *form.extra, **named, **places)
        operator = operator_of(form.operator)
        bound = operator.bind((*given, *form.extra), {**named, **places})
        right = all(same_bits(out, x.detach()) for out, x in zip(outs, results, strict=True))
        if why_not_trusted(operator, [seen_by_the_validator(each) for each in bound]) is None:
            assert right, f"{form.operator} reads what was there, of arguments {lay.__name__}"
            self.trusted.add(operator.name)
        elif not right:
            self.refused.append(operator.name)


OPERATORS = operators_to_try()
TRIED: list[str] = []
TRUSTED: set[str] = set()
REFUSED: list[str] = []


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.formatted_name)
def test_what_is_trusted_does_not_read_what_was_there(op: Any) -> None:
    for graph, tensors in graphs_of(op, limit=2):
        trying = Trying(graph)
        with torch.no_grad():
            trying.run(*[t.detach() for t in tensors])
        TRUSTED.update(trying.trusted)
        REFUSED.extend(trying.refused)
    TRIED.append(op.formatted_name)


def test_all_that_is_trusted_was_tried() -> None:
    if [op.formatted_name for op in OPERATORS] != TRIED:
        pytest.skip("not all of the tests above ran in this process")
    assert WRITE_ONCE - {"aten::linear"} <= TRUSTED
    assert set(REFUSED) == {"aten::native_batch_norm"}, "the one that is known to add to what was there"


@pytest.mark.parametrize("lay", WAYS)
def test_products_with_a_transposed_weight(lay: Any) -> None:
    """The only out variant that no form stands for: a product of an addmm."""
    x, weight, bias = (lay(each) for each in (torch.randn(5, 4), torch.randn(3, 4), torch.randn(3)))
    out = torch.full((5, 3), float("nan"))
    torch.ops.aten.linear.out(x, weight, bias, out=out)
    torch.testing.assert_close(out, x @ weight.t() + bias)


def test_every_form_is_trusted() -> None:
    overloads = [getattr(torch.ops.aten, name) for name in out_variants._WRITES_IN_PLACE]
    operators = [operator_of(getattr(packet, name)) for packet in overloads for name in packet.overloads()]
    assert not [each.name for each in operators if not (each.pointwise or each.name in WRITE_ONCE)]


def view(shape: tuple[int, ...], stride: tuple[int, ...]) -> View:
    return view_of(Block("fresh"), 0, shape, stride, torch.float32)


@pytest.mark.parametrize(
    "shape", [(6, 4), (2, 4, 3), (2, 4, 3, 5), (2, 4, 3, 3, 5), (6, 4, 1, 1), (1, 4, 3, 3)], ids=str
)
def test_statistics_are_trusted_exactly_where_they_are_right(shape: tuple[int, ...]) -> None:
    operator = operator_of(torch.ops.aten.native_batch_norm.out)
    for lay in WAYS:
        x = lay(torch.randn(shape))
        args = x, torch.rand(4), torch.rand(4), None, None, True, 0.1, 1e-5
        wanted = torch.ops.aten.native_batch_norm(*args)
        outs = [torch.empty_strided(t.shape, t.stride()).fill_(float("nan")) for t in wanted]
        torch.ops.aten.native_batch_norm.out(*args, out=outs[0], save_mean=outs[1], save_invstd=outs[2])
        right = all(map(torch.equal, outs, wanted))
        given = [seen_by_the_validator(x), *args[1:]]
        assert (why_not_trusted(operator, given) is None) == right, lay.__name__


# Programs.


def prove(step: Callable[..., Any], *args: Any) -> str:
    plan = fdp.data_parallel(step, group=fake_group(2), check_replication=False).plan(*args)
    made = write_program(plan_memory(plan, True), 0)
    verify_program(plan, made, 0, True)
    return made.source


def normalised(state: Any, batch: torch.Tensor) -> Any:
    x = (batch @ state).transpose(1, 2)
    out = torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0]
    return state + 1, fdp.pmean((out * 2).sum(0))


def test_an_out_variant_that_adds_to_what_was_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args = torch.randn(4, 4), torch.randn(5, 3, 4)
    assert "native_batch_norm_out" not in prove(normalised, *args)
    monkeypatch.setattr(out_variants, "_is_contiguous", lambda node: True)
    with pytest.raises(VerificationError, match="adds the statistics of an argument that lies like this one"):
        prove(normalised, *args)


def test_an_untried_out_variant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        return state + 1, fdp.pmean((batch @ state).cumprod(0) * 2)

    args = torch.randn(4, 4), torch.randn(5, 4)
    assert "cumprod_out" not in prove(step, *args)
    monkeypatch.setattr(out_variants, "_WRITES_IN_PLACE", out_variants._WRITES_IN_PLACE | {"cumprod"})
    out_variants._out_variant.cache_clear()
    try:
        with pytest.raises(VerificationError, match="it is not known that the out variant of aten::cumprod"):
            prove(step, *args)
    finally:
        out_variants._out_variant.cache_clear()


def test_an_out_variant_of_the_step_itself_is_meant() -> None:
    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        product, total = torch.zeros(5, 4), torch.zeros(4)
        torch.cumprod(batch @ state, 0, out=product)
        torch.nanmedian(product, 0, out=(total, torch.zeros(4, dtype=torch.int64)))
        return state + total, fdp.pmean(product)

    prove(step, torch.randn(4, 4), torch.randn(5, 4))
