"""Matrices that must be whole have owners: each rank computes for its own, and all get the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import examples, exhaustive
from sharded_steps import numbers
from torch import Tensor

import fdp
from fdp import pytree
from fdp.plan import Start, Wait
from fdp.trace import Trace
from fdp.trace.sharding import shared_gathers

State = dict[str, Tensor]


def orthogonal(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A matrix with singular values near one, as Muon makes it."""
    x = x.to(dtype, copy=True)
    x.div_(x.norm() + 1e-7)
    for _ in range(2):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.8, alpha=2.0), x, beta=3.4)
    return x.float()


def matrices(count: int, *shape: int) -> State:
    return {f"w{at}": numbers(*shape, seed=at) for at in range(count)}


def in_parts(state: State) -> Any:
    return {key: w - 0.1 * orthogonal(w * 0.5, torch.bfloat16) for key, w in state.items()}


def whole(state: State) -> Any:
    return state, [orthogonal(w * 0.5) for w in state.values()]


def of_turned(state: State) -> Any:
    """Both the part of a view and the whole of another result, with numbers from outside."""
    scale = state["w0"].sum()
    made = {key: orthogonal((w * 0.5).t()) * scale for key, w in state.items()}
    return {key: w - made[key].t() for key, w in state.items()}, [each.sum(0) for each in made.values()]


def of_one_another(state: State) -> Any:
    """Each needs the one before: no rank can compute one while another computes the next."""
    new, before = {}, torch.zeros(())
    for key, w in state.items():
        new[key] = w - 0.1 * orthogonal(w * before.mean())
        before = new[key]
    return new


def of_two(state: State) -> Any:
    """Each is computed from two values."""
    values = list(state.values())
    pairs = zip(state, values, [*values[1:], values[0]], strict=True)
    return {key: one - 0.1 * orthogonal((one * 0.5) @ (two * 0.5).t()) for key, one, two in pairs}


def of_unlike(state: State) -> Any:
    return {key: w - 0.1 * at * orthogonal(w * 0.5) @ w for at, (key, w) in enumerate(state.items())}


def read_besides(state: State) -> Any:
    """The gathered value is needed on every rank as well."""
    halves = {key: w * 0.5 for key, w in state.items()}
    new = {key: w - 0.1 * (halves[key] @ halves[key].t()) @ halves[key] for key, w in state.items()}
    return new, torch.stack(list(halves.values())).cumsum(1)


def changed_later(state: State) -> Any:
    """What is computed is changed after some of it was read, and so is what it was computed from."""
    new = {}
    for key, w in state.items():
        start = w * 0.5
        made = orthogonal(start)
        start.add_(1.0)
        first = w - made
        made.mul_(2.0)
        new[key] = first + made.cumsum(1) + start
    return new


def singular(state: State) -> Any:
    """Operators with several results, of which one is needed."""
    return {key: w - 0.1 * torch.linalg.svd(w, full_matrices=False)[1].sum() for key, w in state.items()}


STEPS: dict[str, tuple[Callable[[State], Any], tuple[int, int]]] = {
    "in parts": (in_parts, (12, 24)),
    "by columns": (in_parts, (5, 24)),
    "whole": (whole, (12, 24)),
    "of turned": (of_turned, (24, 12)),
    "of one another": (of_one_another, (12, 24)),
    "of two": (of_two, (24, 24)),
    "of unlike": (of_unlike, (24, 24)),
    "read besides": (read_besides, (12, 24)),
    "changed later": (changed_later, (12, 24)),
    "singular": (singular, (12, 24)),
}
HAVE_OWNERS = {"in parts", "by columns", "whole", "of turned", "singular"}


def products_of(trace: Trace) -> int:
    """How many products of matrices a rank computes, or decompositions."""
    names = ("aten.mm.default", "aten.addmm.default", "aten._linalg_svd.default")
    return sum(str(node.target) in names for node in trace.graph.graph.nodes)


def beside_plain(name: str, count: int, compile: bool) -> tuple[int, int, list[str]]:
    """How many products a rank computes, and how many there are; and what is different from plain PyTorch."""
    function, shape = STEPS[name]
    start = matrices(count, *shape)
    step = fdp.data_parallel(function, batch_argnums=(), compile=compile)
    state = fdp.shard(fdp.replicate(start), min_size=0)
    mine, all_of_them = products_of(step.trace(state)), products_of(step.trace(start))
    found: list[str] = []
    for call in range(3):
        result, due = step(state), function(start)
        new, start = (x[0] if isinstance(x, tuple) else x for x in (result, due))
        pairs = zip(*map(pytree.leaves_of, (fdp.unshard(result), due)), strict=True)
        for at, (one, two) in enumerate(pairs):
            # In bfloat16, and a sum of parts is added up in another order.
            if not (
                torch.equal(one, two) if name == "in parts" and not compile else torch.allclose(one, two, 2e-2, 2e-2)
            ):
                found.append(f"call {call}, leaf {at}: differs by {float((one - two).abs().max()):.3g}")
        state = fdp.shard(fdp.unshard(new), min_size=0)
    return mine, all_of_them, found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=exhaustive), pytest.param(4, marks=exhaustive)])
@pytest.mark.parametrize("name", STEPS)
def test_each_rank_computes_for_its_own_matrices(name: str, size: int) -> None:
    """Five matrices: two ranks compute for three each, three ranks for two, four ranks for two."""
    for mine, all_of_them, found in ranks.run(size, beside_plain, name, 5, False):
        assert not found, "\n".join(found[:5])
        assert mine == (all_of_them * -(-5 // size) // 5 if name in HAVE_OWNERS else all_of_them)


def test_fewer_matrices_than_ranks_are_computed_by_some_of_them_again() -> None:
    for mine, all_of_them, found in ranks.run(3, beside_plain, "in parts", 2, False):
        assert (2 * mine, found) == (all_of_them, [])


@exhaustive
@pytest.mark.parametrize("name", STEPS)
def test_compiled_steps_have_owners_as_well(name: str) -> None:
    for mine, all_of_them, found in ranks.run(2, beside_plain, name, 4, True):
        assert not found, "\n".join(found[:5])
        assert mine == (all_of_them // 2 if name in HAVE_OWNERS else all_of_them)


def messages_of_muon() -> tuple[str, str]:
    """The messages of Muon's update, if all state is sharded, and if the optimizer's is."""
    params = fdp.replicate(matrices(4, 24, 24))
    optimizer = fdp.optim.from_torch(torch.optim.Muon, lr=0.01)

    def step(state: Any, x: Tensor) -> Any:
        grads = fdp.grad(lambda p: sum((x @ w).square().mean() for w in p.values()))(state["params"])
        new, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": new, "opt": opt}

    made = fdp.data_parallel(step)
    shard = {"params": fdp.shard(params, min_size=0), "opt": optimizer.init(fdp.shard(params, min_size=0))}
    zero1 = {"params": params, "opt": fdp.shard(optimizer.init(params), min_size=0)}
    found = {}
    for name, state in (("all", shard), ("opt", zero1)):
        reductions = made.trace(state, numbers(3, 24)).reductions
        found[name] = " ".join(r.op for r in reductions if r.op != "mean_scatter" and "params" not in r.name)
    return found["all"], found["opt"]


def test_muon_exchanges_momenta_and_updates() -> None:
    """Two pairs of matrices: parameters in parts get their part of an update, and whole ones all of it."""
    (parts, whole_ones), _ = ranks.run(2, messages_of_muon)
    assert parts == "all_to_all all_to_all all_to_all all_to_all"
    assert whole_ones == "all_to_all all_gather all_to_all all_gather"


def test_ranks_of_a_host_are_owners_where_state_is_divided_among_them() -> None:
    for outcome in ranks.run(4, on_a_mesh):
        assert outcome == []


def on_a_mesh() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh, start = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "local")), matrices(4, 12, 24)
    step = fdp.data_parallel(in_parts, batch_argnums=(), group=mesh)
    state = fdp.shard(fdp.replicate(start), min_size=0, group=mesh)
    trace = step.trace(state)
    due = in_parts(start)
    found = fdp.unshard(step(state))
    wrong = [key for key in due if not torch.equal(found[key], due[key])]
    return wrong + ["products"] * (products_of(trace) * 2 != 4 * 6)


def scaled_by(kind: str, x: Tensor) -> Tensor:
    """A number that differs from rank to rank."""
    return fdp.axis_index() + 1.0 if kind == "rank" else x.mean() if kind == "mean" else x.view(-1)[:1]


def of_own_numbers(kind: str, overwritten: bool, check: bool) -> list[str]:
    """What is wrong with a step whose computations read a number of each rank's own."""
    start = matrices(4, 12, 12)

    def step(state: State, x: Tensor) -> State:
        new, own = {}, scaled_by(kind, x)
        for key, w in state.items():
            made = w @ w.t() * own
            mean = fdp.pmean(made)
            if overwritten:
                made.copy_(torch.ones(12, 12))  # by what is equal on all ranks: at the end nothing varies
                mean = mean + made.cumsum(0)
            new[key] = w - 0.1 * mean
        return new

    x = torch.full((1, 1), fdp.axis_index() + 1.0)  # 1 and 2
    state = fdp.shard(fdp.replicate(start), min_size=0)
    found = fdp.unshard(fdp.data_parallel(step, check_trace=check)(state, x))
    more = torch.ones(12, 12).cumsum(0) if overwritten else 0.0
    due = {key: w - 0.1 * (w @ w.t() * 1.5 + more) for key, w in start.items()}
    return [key for key in due if not torch.allclose(found[key], due[key], 1e-5, 1e-5)]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("overwritten", [True, False])
@pytest.mark.parametrize("kind", ["rank", "mean", "batch"])
def test_with_a_number_of_its_own_each_rank_computes_by_itself(kind: str, overwritten: bool, check: bool) -> None:
    """An owner would compute with its own number for all of them."""
    assert ranks.run(2, of_own_numbers, kind, overwritten, check) == [[], []]


def changed_by_own_values() -> list[bool]:
    """Results that are equal on all ranks, and that each rank then changes in place by its own values."""

    def step(state: State, x: Tensor) -> Any:
        made, sums, total = state["w"] @ state["w"].t(), state["w"].square().sum(1), state["w"].square().sum()
        for each in (made, sums, total):
            each += x.mean()
        return state, fdp.pmean((made, sums, total))

    w = matrices(1, 6, 12)["w0"]
    _, found = fdp.data_parallel(step)(fdp.shard({"w": w}, min_size=0), torch.full((2,), fdp.axis_index() + 1.0))
    due = w @ w.t() + 1.5, w.square().sum(1) + 1.5, w.square().sum() + 1.5
    return [torch.allclose(one, two, 1e-5, 1e-5) for one, two in zip(found, due, strict=True)]


def test_what_was_equal_on_all_ranks_may_be_changed_by_each() -> None:
    assert ranks.run(2, changed_by_own_values) == [[True] * 3] * 2


def most_under_way(limit: int) -> tuple[int, bool]:
    """How many messages that bring matrices to owners are under way at once; and whether the numbers are right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_gathers, "AHEAD_BYTES", limit)
        start = matrices(8, 12, 24)
        state, step = fdp.shard(fdp.replicate(start), min_size=0), fdp.data_parallel(in_parts, batch_argnums=())
        plan = step.plan(state)
        given = {link.node for link in plan.trace.links if link.kind == "given"}
        numbers = [
            number for number, r in enumerate(plan.trace.reductions) if plan.trace.operations[r.operation].node in given
        ]
        under_way, most = set[int](), 0
        for item in plan.schedule:
            if isinstance(item, Start):
                under_way |= {each for each in plan.buckets[item.bucket].members if each in numbers}
            elif isinstance(item, Wait):
                under_way -= set(plan.buckets[item.bucket].members)
            most = max(most, len(under_way))
        found, due = fdp.unshard(step(state)), in_parts(start)
        return most, all(torch.equal(found[key], due[key]) for key in due)


def test_matrices_are_not_sent_to_owners_long_before_they_are_needed() -> None:
    """Of four messages of 576 bytes: all at once, or the next one when one has arrived."""
    for limit, most in ((10_000, 4), (0, 1)):
        assert ranks.run(2, most_under_way, limit) == [(most, True)] * 2


Program = list[str]
SAMPLE = [
    "gram",
    "turn",
    "halve in place",
    "norm",
    "by a number",
    "square",
    "two results",
    "through a view",
    "sum",
    "gram",
]


def as_told(program: Program, ends: list[str], state: State) -> Any:
    """The same chain of operators for each matrix; what its result is used for differs."""
    new, seen, last, scale = dict(state), [], None, state["w0"].amax()
    for (key, w), end in zip(state.items(), ends, strict=True):
        h = w + 0.5
        for what in program:
            if what == "gram":
                h = h @ h.t() / 8
            elif what == "turn":
                h = h.t()
            elif what == "halve in place":
                h.mul_(0.5)
            elif what == "norm":
                h = h / (h.norm() + 1)
            elif what == "by a number":
                h = h * scale
            elif what == "square":
                h = h @ h / 8
            elif what == "two results":
                h = h + h.max(0)[0]
            elif what == "through a view":
                h[1:3].add_(1.0)
            else:
                h = h + h.sum(0)
        if end in ("part", "both"):
            new[key] = w - 0.1 * h
        if end in ("whole", "both"):
            seen.append(h)
        if end == "one after the other":
            new[key] = w - 0.1 * (h if last is None else last @ h)
            last = h
        if end == "changed":
            new[key] = w - h
            h.add_(w)
            seen.append(h.cumsum(0))
    return new, seen


def is_right(program: Program, ends: list[str]) -> bool:
    start = {key: w.double() for key, w in matrices(len(ends), 6, 6).items()}
    found, seen = fdp.data_parallel(lambda state: as_told(program, ends, state), batch_argnums=())(
        fdp.shard(start, min_size=0)
    )
    mine, due = (fdp.unshard(found), seen), as_told(program, ends, start)
    return all(torch.allclose(a, b, 1e-9, 1e-9) for a, b in zip(*map(pytree.leaves_of, (mine, due)), strict=True))


ENDS = ["part", "part", "whole", "both", "one after the other", "changed", "none"]


@examples(40, by_default=12)
@given(
    st.lists(st.sampled_from(SAMPLE), min_size=2, max_size=6),
    st.one_of(
        st.builds(lambda end, count: [end] * count, st.sampled_from(ENDS), st.integers(2, 5)),
        st.lists(st.sampled_from(ENDS), min_size=2, max_size=5),
    ),
)
def test_chains_of_operators_on_matrices_give_what_plain_pytorch_gives(program: Program, ends: list[str]) -> None:
    assert ranks.run(2, is_right, program, ends) == [True, True]
