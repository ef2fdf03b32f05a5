"""Values at fixed places: the layout of memory, operators that write where they are told, memory that steps share."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import optree
import pytest
import ranks
import torch
from bits import same_bits
from fake_ranks import fake_group
from hypothesis import given
from hypothesis import strategies as st
from operator_traces import graphs_of, operators_to_try
from samples import examples, exhaustive
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import fdp
from fdp.emit.codegen.bindings import bind
from fdp.emit.codegen.lines import Line, lay_out_lines
from fdp.emit.memory import out_variants, planning
from fdp.emit.memory.elements import has_gaps, laid_out
from fdp.emit.memory.layout import ALIGNMENT_BYTES, Lifetime, lay_out
from fdp.runtime import Emitted, arena

Tree = Any


# --- the layout --------------------------------------------------------------------------------------


@st.composite
def lifetimes(draw: Any) -> list[Lifetime]:
    pieces: list[Lifetime] = []
    for key in range(draw(st.integers(1, 25))):
        first = draw(st.integers(0, 20))
        last = first + draw(st.integers(0, 8))
        size = draw(st.sampled_from((1, 64, 65, 128, 1000, 4096)))
        older = [piece.key for piece in pieces if piece.first < piece.last == first]
        heirs = tuple(draw(st.lists(st.sampled_from(older), max_size=2))) if older else ()
        pieces.append(Lifetime(key, size, first, last, heirs))
    return pieces


@examples(300)
@given(lifetimes())
def test_pieces_that_are_in_use_at_once_do_not_overlap(pieces: list[Lifetime]) -> None:
    layout = lay_out(pieces)
    assert layout.offsets.keys() == {piece.key for piece in pieces}
    for piece in pieces:
        start = layout.offsets[piece.key]
        assert start % ALIGNMENT_BYTES == 0
        assert start >= 0 and start + piece.size_bytes <= layout.size_bytes
    for index, one in enumerate(pieces):
        for two in pieces[:index]:
            if two.key in one.may_reuse and two.last == one.first:
                continue  # it may take that one's place
            if one.first <= two.last and two.first <= one.last:
                first, second = layout.offsets[one.key], layout.offsets[two.key]
                assert first + one.size_bytes <= second or second + two.size_bytes <= first, (one, two)
    assert layout.needed_bytes <= layout.size_bytes


@examples(100)
@given(lifetimes())
def test_one_place_is_inherited_once(pieces: list[Lifetime]) -> None:
    layout = lay_out(pieces)
    for index, one in enumerate(pieces):
        for two in pieces[:index]:
            # Two heirs of one piece begin at the same position, and must not both have its place.
            if one.first == two.first:
                assert layout.offsets[one.key] != layout.offsets[two.key]


def test_the_layout_does_not_depend_on_the_order_of_sets() -> None:
    names, cpu = [f"value{i}" for i in range(20)], torch.device("cpu")
    memory, sizes = {name: i for i, name in enumerate(names)}, {i: (cpu, 64) for i in range(20)}
    layouts = [
        lay_out_lines([Line("", dict.fromkeys(order).keys())], memory, sizes)  # a set in an order of its own
        for order in (names, names[::-1])
    ]
    assert layouts[0] == layouts[1]


def test_a_chain_of_pointwise_results_takes_one_place() -> None:
    chain = [Lifetime(k, 100, k, k + 1, (k - 1,) if k else ()) for k in range(9)]
    assert lay_out(chain).size_bytes == 128
    assert lay_out([Lifetime(k, 100, k, k + 1) for k in range(9)]).size_bytes == 256


# --- operators that write where they are told to -----------------------------------------------------


class Comparing(fx.Interpreter):
    """Runs a graph, and whatever has a form once more, into memory that is full of NaN and has a fence around it."""

    def __init__(self, graph: fx.GraphModule):
        super().__init__(graph)
        self.seen: set[str] = set()

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        form = out_variants.form_of(n) if n.op == "call_function" else None
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


SEEN: set[str] = set()


@pytest.mark.parametrize("op", operators_to_try(), ids=lambda op: op.formatted_name)
def test_a_form_computes_what_the_operator_computes(op: Any) -> None:
    for graph, tensors in graphs_of(op, limit=6):
        interpreter = Comparing(graph)
        with torch.no_grad():
            interpreter.run(*[t.detach() for t in tensors])
        SEEN.update(interpreter.seen)


def test_every_operator_with_a_form_was_tried() -> None:
    if not SEEN:
        pytest.skip("the tests above did not run")
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


# --- the cheapest way to call an operator ------------------------------------------------------------


def example(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_a_function_is_taken_if_it_calls_just_this_operator() -> None:
    aten, x = torch.ops.aten, example(4, 4)
    assert bind(aten.mm.default, (x, x), {}) is torch.mm
    assert bind(aten.mm.out, (x, x), {"out": x}) is torch.mm
    # torch.add(x, 1) calls add.Tensor, so it does not stand for add.Scalar.
    assert bind(aten.add.Scalar, (x, 1), {}) is aten.add.Scalar._op
    assert bind(aten.add.Tensor, (x, 1), {}) is torch.add
    # No function of that name; no tensor to take the device from; a change of the example itself.
    assert bind(aten.threshold_backward.default, (x, x, 0), {}) is aten.threshold_backward.default._op
    assert bind(aten.ones.default, ([2],), {}) is aten.ones.default._op
    assert bind(aten.squeeze_.dim, (x, 0), {}) is aten.squeeze_.dim._op
    assert x.shape == (4, 4)
    # A list is known by all that is in it: torch.index_put takes no None.
    index, values = example(2).long(), example(2)
    assert bind(aten.index_put.default, (example(4, 4, 4), [index, index, index], values), {}) is torch.index_put
    without = bind(aten.index_put.default, (example(4, 4, 4), [index, index, None], example(2, 4)), {})
    assert without is aten.index_put.default._op


# --- memory ------------------------------------------------------------------------------------------


def squares(state: Tree, batch: Tree) -> Any:
    loss, grads = fdp.value_and_grad(lambda p: ((batch @ p["a"]).relu() @ p["b"]).square().mean())(state)
    return optree.tree_map(lambda p, g: p - 0.1 * g, state, grads), fdp.pmean(loss)


def start(width: int = 8) -> Tree:
    generator = torch.Generator().manual_seed(width)
    return {"a": torch.randn(4, width, generator=generator), "b": torch.randn(width, 3, generator=generator)}


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the memory of a step with NaN before each call."""
    fit = arena.Arena.fit

    def fit_and_fill(self: Any, layouts: Any) -> Any:
        blocks = fit(self, layouts)
        for block in blocks.values():
            block.fill_(255)
        return blocks

    monkeypatch.setattr(arena.Arena, "fit", fit_and_fill)


@pytest.mark.parametrize("donate", [(), 0])
def test_no_value_outlives_a_call_in_the_memory_of_a_step(donate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch)
    step = fdp.data_parallel(squares, donate_argnums=donate)
    state, other, losses = start(), start(), []
    for call in range(4):
        batch = torch.full((5, 4), float(call + 1))
        expected = squares(other, batch)
        state, loss = step(state, batch)
        losses.append((loss, expected[1]))
        other = expected[0]
        torch.testing.assert_close(state, other)
    for loss, wanted in losses:
        torch.testing.assert_close(loss, wanted)


def emitted_of(step: fdp.Step) -> list[Emitted]:
    return [known.emitted for known in step._known.values()]


def block_of(emitted: Emitted) -> torch.Tensor:
    (block,) = emitted.residence.blocks.values()
    return block


def test_what_is_returned_is_never_in_the_memory_of_the_step() -> None:
    def step(w: torch.Tensor, b: torch.Tensor) -> Any:
        y = (b @ w).relu()
        return y.sum(0), fdp.pmean(y)[:2], fdp.all_gather(b).mean(0), y.sum() * torch.ones(3)

    run = fdp.data_parallel(step, check_replication=False)
    outputs = run(torch.ones(4, 4), torch.ones(4, 4))
    inside = block_of(emitted_of(run)[0]).untyped_storage().data_ptr()
    assert all(output.untyped_storage().data_ptr() != inside for output in outputs)


def test_steps_share_memory_one_after_the_other() -> None:
    one, two = fdp.data_parallel(squares), fdp.data_parallel(squares)
    one(start(), torch.ones(5, 4))
    two(start(), torch.ones(5, 4))
    assert block_of(emitted_of(one)[0]) is block_of(emitted_of(two)[0])


def test_memory_grows_to_what_the_largest_step_needs_and_not_to_the_sum() -> None:
    step = fdp.data_parallel(squares)
    expected = {rows: squares(start(), torch.ones(rows, 4)) for rows in (3, 300, 30)}
    for rows in (3, 300, 30, 3, 300):
        torch.testing.assert_close(step(start(), torch.ones(rows, 4)), expected[rows])
    blocks = {id(block_of(emitted)) for emitted in emitted_of(step) if emitted.residence.blocks}
    assert len(blocks) == 1


def test_memory_goes_with_the_last_step_that_uses_it() -> None:
    import gc
    import weakref

    step = fdp.data_parallel(squares)
    step(start(77), torch.ones(5, 4))
    memory = weakref.ref(emitted_of(step)[0].residence.arena)
    assert memory() is not None
    shared = len(memory().tenants)  # type: ignore[union-attr]
    del step
    gc.collect()
    assert memory() is None or len(memory().tenants) < shared  # type: ignore[union-attr]


def test_threads_with_steps_of_their_own() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            step, state, other = fdp.data_parallel(squares, donate_argnums=0), start(seed + 3), start(seed + 3)
            for call in range(30):
                batch = torch.full((2 + (call * seed) % 7, 4), 0.1 * (call % 5))
                other, wanted = squares(other, batch)
                state, loss = step(state, batch)
                torch.testing.assert_close((state, loss), (other, wanted))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_a_mean_is_divided_while_its_bucket_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    state, batch = start(), torch.ones(5, 4)
    step = fdp.data_parallel(squares, group=fake_group(2))
    plain = Emitted(step.plan(state, batch), fake_group(2))
    assert "alpha" not in plain.source
    monkeypatch.setattr(planning, "_SCALED_WHEN_FILLED_BYTES", 0)
    poisoned(monkeypatch)
    scaled = Emitted(step.plan(state, batch), fake_group(2))
    assert "beta=0, alpha=0.5" in scaled.source
    tensors = optree.tree_leaves((state, batch))
    assert same_bits(plain.dry_run(list(tensors)), scaled.dry_run(list(tensors)))


def test_of_several_results_the_one_that_is_averaged_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(state: torch.Tensor, batch: torch.Tensor) -> Any:
        out, mean, _ = torch.native_batch_norm(batch, state, None, None, None, True, 0.1, 1e-5)
        return fdp.pmean(mean), fdp.pmean(out.sum())

    monkeypatch.setattr(planning, "_SCALED_WHEN_FILLED_BYTES", 0)
    state, batch = torch.ones(8), torch.arange(32.0).view(4, 8)
    emitted = Emitted(fdp.data_parallel(step, group=fake_group(2)).plan(state, batch), fake_group(2))
    expected = torch.native_batch_norm(batch, state, None, None, None, True, 0.1, 1e-5)
    mean, total = emitted.dry_run([state, batch])
    assert same_bits((mean, total), (expected[1], expected[0].sum()))
    assert "native_batch_norm_result1, 0.5" in emitted.source


def test_gradients_are_computed_in_their_bucket() -> None:
    plan = fdp.data_parallel(squares, group=fake_group(2)).plan(start(), torch.ones(5, 4))
    source = Emitted(plan, fake_group(2)).source
    body = source[source.index("inputs.clear()") :]
    filling = body[: body.rindex("start(")].replace("aten_copy_(slot0_0, mean)", "")  # the loss: mean has no form
    assert "copy_" not in filling


def test_step_counts_are_counted_up_at_once() -> None:
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=0.1, fused=True)
    state, other = start(), start()
    opt, other_opt = optimizer.init(state), optimizer.init(other)
    step = fdp.data_parallel(lambda s, g: optimizer.update(g, s[1], s[0]), batch_argnums=(), donate_argnums=0)
    for _ in range(3):
        grads = optree.tree_map(torch.ones_like, other)
        other, other_opt = optimizer.update(grads, other_opt, other)
        state, opt = step((state, opt), grads)
        assert same_bits((state, opt), (other, other_opt))
    assert "_foreach_add__List" in emitted_of(step)[0].source


def both_ways(step: Any, state: Tree, batch: Tree, calls: int = 2, **options: Any) -> Emitted:
    """Calls a step on poisoned memory, compares it with the function that it was made from, and looks for leaks."""
    transform = fdp.data_parallel(step, check_trace=False, **options)
    with pytest.MonkeyPatch.context() as patch:
        poisoned(patch)
        kept = []
        for _ in range(calls):
            expected = step(state, batch)
            found = transform(state, batch)
            assert same_bits(found, expected), f"{found}\n{expected}"
            kept.append((found, expected))
        (emitted,) = emitted_of(transform)
        memory = {block.untyped_storage().data_ptr() for block in emitted.residence.blocks.values()}
        for found, expected in kept:
            assert same_bits(found, expected), "an earlier result was changed"
            for leaf in optree.tree_leaves(found):
                assert leaf.untyped_storage().data_ptr() not in memory, "a result is in the memory of the step"
    return emitted


def test_the_second_of_two_operators_with_several_results_is_returned() -> None:
    # The graph calls it by the name of the first and a number.
    def step(s: torch.Tensor, b: torch.Tensor) -> Any:
        first = torch.nn.functional.max_pool2d(s * 2, 2)
        second = torch.nn.functional.max_pool2d(s * 3, 2)
        return first.sum() * 2, second, fdp.pmean(b.sum())

    both_ways(step, torch.randn(2, 3, 4, 4), torch.ones(3))


def test_lists_of_conjugate_views_keep_the_memory_that_they_look_at() -> None:
    def step(s: torch.Tensor, b: torch.Tensor) -> Any:
        x = torch.view_as_complex(b * 2)
        u, v = x.conj().unbind(0)
        a = u.resolve_conj() * 1
        a2 = a * s
        return fdp.pmean((a2 + a).sum() + v @ s)

    both_ways(step, torch.randn(64, dtype=torch.complex64), torch.randn(2, 64, 2))


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), 2.5])
def test_large_tensors_full_of_a_number(value: float) -> None:
    def step(s: torch.Tensor, b: torch.Tensor) -> Any:
        mask = torch.full((300, 300), value).triu(1)
        return fdp.pmean((b @ s + mask).softmax(-1).nan_to_num()), (torch.full_like(s, value) + s).isfinite() * 1.0

    both_ways(step, torch.randn(300, 300), torch.randn(300, 300))


def test_operators_that_are_called_as_the_program_calls_its_own() -> None:
    with torch.library._scoped_library("fdp_test_names", "DEF") as library:
        for name in ("start", "wait", "inputs"):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: x + 1, "CompositeExplicitAutograd")
            torch.library.register_fake(f"fdp_test_names::{name}", torch.empty_like, lib=library)

        def step(s: torch.Tensor, b: torch.Tensor) -> Any:
            operators = torch.ops.fdp_test_names
            return fdp.pmean(operators.start(operators.wait(operators.inputs(b * s))) * 2)

        emitted = both_ways(step, torch.ones(3), torch.ones(3))
        assert "def step(inputs_, start_, wait_" in emitted.source


def test_a_default_device_around_the_first_call_changes_nothing() -> None:
    optimizer = fdp.optim.from_torch(torch.optim.Adam, lr=0.1)
    state = start()
    opt = optimizer.init(state)
    step = fdp.data_parallel(
        lambda s, g: (optimizer.update(g, s[1], s[0]), fdp.per_rank(fdp.axis_index())),
        batch_argnums=(),
        check_trace=False,
    )
    grads = optree.tree_map(torch.ones_like, state)
    with torch.device("meta"):
        found = step((state, opt), grads)
    assert same_bits(found[0], optimizer.update(grads, opt, state))
    assert found[1].item() == 0


# --- on real ranks -----------------------------------------------------------------------------------


def profiled() -> list[str]:
    step = fdp.data_parallel(squares, bucket_cap_mb=1e-6)
    step(start(), torch.ones(5, 4))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(start(), torch.ones(5, 4))
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("fdp: ")]


def test_a_profiler_shows_the_buckets_by_name() -> None:
    for names in ranks.run(2, profiled):
        assert sorted(names) == sorted(
            f"fdp: bucket {index} {what}: mean of {size} float32, {label}"
            for index, size, label in ((0, "4 B", "pmean"), (1, "96 B", "p['b']"), (2, "128 B", "p['a']"))
            for what in ("starts", "is waited for")
        )
        assert names.index(next(n for n in names if "bucket 2 starts" in n)) < names.index(
            next(n for n in names if "bucket 1 is waited for" in n)
        )


def large_means(seed: int) -> None:
    """Buckets of more than 1 MiB, with gradients from products, sums, embeddings and two of these together."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    params = {
        "e": torch.randn(600, 400, generator=generator, dtype=torch.float64),
        "w": torch.randn(400, 400, generator=generator, dtype=torch.float64) / 20,
        "b": torch.randn(400, generator=generator, dtype=torch.float64),
    }

    def loss_fn(p: Tree, ids: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.embedding(ids, p["e"])
        return torch.nn.functional.cross_entropy((x @ p["w"] + p["b"]).tanh() @ p["e"].T, ids)

    @fdp.data_parallel(donate_argnums=0)
    def step(p: Tree, ids: torch.Tensor) -> Any:
        loss, grads = fdp.value_and_grad(loss_fn)(p, ids)
        return optree.tree_map(lambda w, g: w - 0.5 * g, p, grads), fdp.pmean(loss)

    own = optree.tree_map(torch.clone, params)
    for call in range(3):
        shards = [torch.randint(600, (16,), generator=generator) for _ in range(world)]
        each = []
        for shard in shards:
            leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
            loss = loss_fn(leaves, shard)
            each.append(
                (loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)))
            )
        params = {k: v - 0.5 * sum(grads[k] for _, grads in each) / world for k, v in params.items()}
        own, mean = step(own, shards[rank])
        torch.testing.assert_close(own, params, rtol=1e-12, atol=1e-12, msg=lambda m, c=call: f"call {c}: {m}")
        torch.testing.assert_close(mean, sum(loss for loss, _ in each) / world)
    fdp.assert_replicated(own)
    (emitted,) = emitted_of(step)
    assert emitted._program.scaled, "no bucket was large enough"
    assert f"alpha={1 / world!r}" in emitted.source


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=exhaustive)])
def test_large_buckets_are_divided_as_they_are_filled(world: int) -> None:
    ranks.run(world, large_means, 5)


def test_a_result_with_gaps_keeps_them() -> None:
    """Leaves of donated state that share memory come back apart, each with its strides: `contiguous` copies it."""

    def step(state: dict[str, torch.Tensor], _: torch.Tensor) -> Any:
        copied = state["a"].contiguous()
        torch._foreach_mul_([copied], 0.5)
        return {"a": state["a"], "b": state["b"]}

    a = torch.arange(32.0).view(4, 8)[:, ::2]
    expected, state = a.clone(), {"a": a, "b": a.detach()}
    run = fdp.data_parallel(step, donate_argnums=0)
    for _ in range(3):
        state = run(state, torch.ones(2))
        for leaf in state.values():
            assert leaf.stride() == (8, 2) and torch.equal(leaf, expected)
    assert state["a"].data_ptr() != state["b"].data_ptr()


@pytest.mark.parametrize(
    ("value", "gaps"),
    [
        (torch.ones(4, 4), False), (torch.ones(4, 4).t(), False), (torch.ones(4, 8)[:, ::2], True),
        (torch.ones(4, 8)[:, :5], True), (torch.ones(1).expand(4), False), (torch.ones(6).unfold(0, 3, 2), False),
        (torch.ones(0, 3), False), (torch.ones(8)[::3], True), (torch.ones(4, 1, 8)[::2].permute(2, 1, 0), True),
    ],
)  # fmt: skip
def test_gaps_are_seen(value: torch.Tensor, gaps: bool) -> None:
    assert has_gaps(value) is gaps


def turned(state: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
    """At every call, state that lies otherwise: `contiguous` copies it at every other call."""
    copied = state["a"].contiguous()
    copied.mul_(0.5)
    return {"a": (state["a"] + 1).t().clone()}


def spread(state: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
    """State that is one element, four times; and the same state under several names."""
    own = state["a"].contiguous() + 1
    return {"a": own[:1].expand(4), "b": state["a"], "c": own[::2], "d": own.view(2, 2).t()}


def halved(state: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
    """State with gaps becomes dense as `.data = ` gives it other memory."""
    state["a"].data = state["a"].data * 0.5
    state["a"].contiguous().mul_(4)
    return {"a": state["a"]}


def windows(state: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
    return {"a": state["a"], "b": state["a"][:2]}


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    ("step", "first"),
    [
        (turned, torch.arange(9.0).view(3, 3)),
        (spread, torch.arange(4.0)),
        (windows, torch.arange(6.0).unfold(0, 3, 1)),
        (halved, torch.arange(32.0).view(8, 4)[::2]),
    ],
)
def test_results_lie_in_memory_as_plain_pytorch_leaves_them(compile: bool, step: Any, first: torch.Tensor) -> None:
    """What asks how its state lies (`contiguous`, `reshape`) gets a copy at one call, the state itself at another."""
    run = fdp.data_parallel(step, donate_argnums=0, compile=compile)
    expected, state = (
        {"a": laid_out(first, first.stride(), anew=True)},
        {"a": laid_out(first, first.stride(), anew=True)},
    )
    for _ in range(4):
        expected, state = step(expected, None), run(state, torch.ones(2))
        for name, leaf in expected.items():
            assert state[name].stride() == leaf.stride(), name
            assert torch.equal(state[name], leaf), name
        expected, state = {"a": expected["a"]}, {"a": state["a"]}


@pytest.mark.parametrize("microbatches", [0, 4])
@pytest.mark.parametrize(
    "param",
    [
        torch.ones(4, 8)[:, ::2].t(),
        torch.ones(4, 4).t(),
        torch.ones(8, 4)[::2],
        torch.ones(2, 3, 4).permute(2, 0, 1)[::2],
    ],
)
def test_gradients_lie_in_the_order_of_their_parameters(param: torch.Tensor, microbatches: int) -> None:
    """Without gaps, as `torch.empty_like` has it, whether the parameter has some or not; also one that is zero."""

    def step(params: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
        def loss(params: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
            return (params["used"].contiguous() * batch.sum()).sum()

        grad = fdp.grad(loss)
        return (fdp.accumulate(grad, microbatches=microbatches) if microbatches else grad)(params, batch)

    found = fdp.data_parallel(step)({"used": param, "unused": param}, torch.ones(4))
    for grad in found.values():
        assert grad.stride() == torch.empty_like(param).stride()
