"""torch.utils.checkpoint in steps: gradients, random numbers, statistics, and memory, against the same without it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from samples import ALL_SAMPLES, exhaustive
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import fdp

Tree = dict[str, torch.Tensor]
PLAIN = functools.partial(checkpoint, use_reentrant=False)
REENTRANT = functools.partial(checkpoint, use_reentrant=True)


BLOCKS = 5 if ALL_SAMPLES else 2


def not_at_all(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def nested(function: Callable[..., Any], *args: Any) -> Any:
    return PLAIN(lambda *inner: PLAIN(function, *inner), *args)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.norm(self.down(F.gelu(self.up(x)))), 0.3, self.training)


class Net(nn.Module):
    """Blocks that are checkpointed one by one, the way that models of libraries do it."""

    def __init__(self, width: int, through: Callable[..., Any], blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.through = through

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.through(block, x)
        return x.square().mean()


def build(through: Callable[..., Any], width: int = 8, blocks: int = BLOCKS) -> Any:
    torch.manual_seed(0)
    return fdp.from_module(Net(width, through, blocks))


def step_of(
    through: Callable[..., Any], width: int = 8, blocks: int = BLOCKS, **options: Any
) -> tuple[Any, tuple[Any, ...]]:
    apply, params, buffers = build(through, width, blocks)

    def step(params: Tree, buffers: Tree, x: torch.Tensor) -> Any:
        grad_fn = fdp.value_and_grad(lambda p: apply(p, buffers, x), has_aux=True)
        (loss, new), grads = grad_fn(params)
        return fdp.pmean(loss), grads, fdp.per_rank(new), fdp.per_rank(torch.rand(2))

    return fdp.data_parallel(step, **options), (params, buffers)


def batch(rows: int = 16, width: int = 8) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(3))


def seeded(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, and what is drawn after it."""
    torch.manual_seed(7)
    return function(*args), torch.rand(2)


@pytest.mark.parametrize(
    "through", [PLAIN, REENTRANT, pytest.param(nested, marks=exhaustive)], ids=["plain", "reentrant", "nested"]
)
def test_a_module_that_checkpoints_itself_is_what_it_is_without(through: Callable[..., Any]) -> None:
    without, state = step_of(not_at_all)
    with_it, _ = step_of(through)
    for _ in range(2):
        expected, found = seeded(without, *state, batch()), seeded(with_it, *state, batch())
        torch.testing.assert_close(found, expected)
    assert torch.equal(found[1], expected[1])  # random numbers go on from the same place
    # Outside of a step, too; and against torch itself.
    apply, params, buffers = build(through)
    torch.manual_seed(7)
    loss, _ = apply(params, buffers, batch())
    grads = torch.autograd.grad(loss, list(params.values()))
    torch.testing.assert_close(dict(zip(params, grads, strict=True)), expected[0][1])


@exhaustive
def test_compiled() -> None:
    without, state = step_of(not_at_all)
    with_it, _ = step_of(PLAIN, compile=True)
    with_it(*state, batch())
    torch.testing.assert_close(seeded(with_it, *state, batch()), seeded(without, *state, batch()))


def test_compiled_where_drawing_again_could_be_moved_ahead_of_going_back() -> None:
    """A compiler that sees no order among them moves what it can fuse."""
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU(), nn.Dropout(0.3))
    apply, params, _ = fdp.from_module(module)
    loss = lambda p, x: PLAIN(lambda x: apply(p, {}, x)[0], x).square().mean()  # noqa: E731
    x, found = batch(8, 6), []
    for compiled in (False, True):
        step = fdp.data_parallel(lambda p, x: fdp.per_rank(fdp.value_and_grad(loss)(p, x)), compile=compiled)
        step(params, x)
        found.append(seeded(step, params, x))
    torch.testing.assert_close(found[1], found[0])


def job_on_a_rank() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    step, (params, buffers) = step_of(PLAIN)
    torch.manual_seed(100 + rank)
    _, grads, _, _ = step(params, buffers, batch() * (1 + rank))
    each = []
    for other in range(world):
        apply, params, buffers = build(not_at_all)
        torch.manual_seed(100 + other)
        loss, _ = apply(params, buffers, batch() * (1 + other))
        each.append(torch.autograd.grad(loss, list(params.values())))
    torch.testing.assert_close(list(grads.values()), [sum(g) / world for g in zip(*each, strict=True)])


def test_each_rank_drops_its_own_units_again() -> None:
    ranks.run(2, job_on_a_rank)


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes that tensors hold at one time, above what they held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    held = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=exhaustive)], ids=["operators", "compiled"])
def test_the_recomputation_really_happens(compiled: bool) -> None:
    peaks = []
    for through in (not_at_all, PLAIN):
        step, state = step_of(through, width=32, blocks=5)
        emitted = step.plan(*state, batch(512, 32)).emit(compile=compiled)
        inputs = (*state, batch(512, 32))
        emitted(*inputs)
        emitted.residence.release()
        peaks.append(peak_bytes(lambda emitted=emitted, inputs=inputs: emitted(*inputs)))
    assert peaks[1] < 0.5 * peaks[0]


def test_no_state_is_replayed_where_nothing_is_drawn() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return PLAIN(lambda v: torch.tanh(x * v).square().sum(), w)

    trace = fdp.data_parallel(lambda w, x: fdp.grad(loss)(w, x)).trace(torch.ones(3), torch.ones(3))
    assert "fdp_generator" not in str(trace.graph.graph)
    _, state = step_of(PLAIN)
    trace = step_of(PLAIN)[0].trace(*state, batch())
    assert str(trace.graph.graph).count("fdp_generator.replay") == BLOCKS


def test_random_numbers_that_are_not_to_be_preserved_are_refused() -> None:
    def loss(w: torch.Tensor, p: float) -> torch.Tensor:
        return PLAIN(lambda v: F.dropout(torch.tanh(v), p).square().sum(), w, preserve_rng_state=False)

    step = fdp.data_parallel(lambda w, p: fdp.grad(loss)(w, p), batch_argnums=(), check_trace=False)
    w = torch.randn(4)
    with pytest.raises(fdp.TraceError) as caught:
        step(w, 0.5)
    assert str(caught.value) == (
        "step '<lambda>' draws random numbers again in a backward pass, and they would not be those of the forward "
        "pass.\n"
        f"  aten.bernoulli_.float at test_activation_checkpointing.py:{loss.__code__.co_firstlineno + 1} in <lambda>\n"
        "Remedy: call torch.utils.checkpoint.checkpoint without preserve_rng_state=False; what comes from a generator "
        "of your own, draw before the checkpointed function, and pass it."
    )
    torch.testing.assert_close(step(w, 0.0), fdp.grad(loss)(w, 0.0))


def test_random_numbers_from_a_generator_of_ones_own_are_refused() -> None:
    """Nothing goes back to its state, in plain PyTorch neither: the recomputation would draw others."""
    own = torch.Generator()

    def loss(w: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return PLAIN(lambda v: (torch.tanh(v) * torch.rand(4, generator=generator)).square().sum(), w)

    w = torch.randn(4)
    with pytest.raises(fdp.TraceError, match="draws random numbers again in a backward pass") as caught:
        fdp.data_parallel(lambda w: fdp.per_rank(fdp.grad(loss)(w, own)), batch_argnums=())(w)
    assert "aten.rand.generator at test_activation_checkpointing.py" in str(caught.value)
    step = fdp.data_parallel(lambda w: fdp.per_rank(fdp.grad(loss)(w, torch.default_generator)), batch_argnums=())
    step(w)
    leaf = w.clone().requires_grad_()
    torch.manual_seed(7)
    value = (torch.tanh(leaf) * torch.rand(4)).square().sum()
    torch.testing.assert_close(seeded(step, w)[0], torch.autograd.grad(value, leaf)[0])


class Counts(nn.Module):
    """Its buffer changes in every call, and what it returns depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("factor", torch.ones(()))
        self.factor: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.inner(x) * self.factor)
        self.factor = self.factor * 2
        return out


class Twice(nn.Module):
    def __init__(self, through: Callable[..., Any]) -> None:
        super().__init__()
        self.part, self.through = Counts(), through

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(self.part, self.through(self.part, x)).square().sum()


def test_a_buffer_is_recomputed_with_as_it_was() -> None:
    found = []
    for through in (not_at_all, PLAIN):
        torch.manual_seed(0)
        apply, params, buffers = fdp.from_module(Twice(through))

        @fdp.data_parallel
        def step(params: Tree, buffers: Tree, x: torch.Tensor, apply: Any = apply) -> Any:
            (_, new), grads = fdp.value_and_grad(lambda p: apply(p, buffers, x), has_aux=True)(params)
            return grads, new

        found.append(step(params, buffers, batch(3, 4)))
    torch.testing.assert_close(found[1], found[0])
    assert found[1][1]["part.factor"] == 4


@exhaustive
def test_in_microbatches() -> None:
    results = []
    for through in (not_at_all, PLAIN):
        apply, params, buffers = build(through)

        def loss(params: Tree, x: torch.Tensor, apply: Any = apply, buffers: Any = buffers) -> torch.Tensor:
            return apply(params, buffers, x)[0]

        step = fdp.data_parallel(lambda p, x, loss=loss: fdp.accumulate(fdp.grad(loss), microbatches=4)(p, x))
        step(params, batch())
        results.append(seeded(step, params, batch()))
    torch.testing.assert_close(results[1], results[0])


def test_other_forms() -> None:
    w, x = torch.randn(4, 4), batch(6, 4)

    def layer(v: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(v @ w), 0.25)

    def sequential(v: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential([layer] * 4, 2, v, use_reentrant=False).sum()

    def selective(v: torch.Tensor) -> torch.Tensor:
        def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            keep = op is torch.ops.aten.mm.default
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return PLAIN(lambda v: F.dropout(torch.tanh(v @ w), 0.25) @ w, v, context_fn=contexts).tanh().sum()

    for loss in (sequential, selective):
        step = fdp.data_parallel(lambda v, loss=loss: fdp.per_rank(fdp.grad(loss)(v)))
        step(x)
        leaf = x.clone().requires_grad_()
        torch.manual_seed(7)
        (expected,) = torch.autograd.grad(loss(leaf), leaf)
        torch.testing.assert_close(seeded(step, x)[0], expected)
        called = [o.target for o in step.trace(x).operations if not o.view]
        # Products are kept by the second, all else is computed again.
        assert called.count("aten.tanh.default") > (4 if loss is sequential else 2)
        assert called.count("aten.mm.default") == (10 if loss is sequential else 4)


def test_selective_checkpoints_of_a_module_with_buffers() -> None:
    """What fdp copies of them is no operation of the module's, which torch would look for in the recomputation."""

    def selected(function: Any, x: torch.Tensor) -> Any:
        keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return PLAIN(function, x, context_fn=keep)

    class Outer(nn.Module):
        def __init__(self, inside: Callable[..., Any], outside: Callable[..., Any]) -> None:
            super().__init__()
            self.part, self.inside, self.outside = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), inside, outside

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outside(lambda x: self.inside(self.part, x), x).tanh()

    found = []
    for inside, outside in ((not_at_all, not_at_all), (not_at_all, selected), (PLAIN, selected)):
        torch.manual_seed(0)
        apply, params, buffers = fdp.from_module(Outer(inside, outside))
        loss = lambda p, x, apply=apply, buffers=buffers: apply(p, buffers, x)[0].square().sum()  # noqa: E731
        step = fdp.data_parallel(lambda p, x, loss=loss: fdp.grad(loss)(p, x))
        found.append(step(params, batch(6, 4)))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@exhaustive
def test_library_models_that_checkpoint_their_layers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=16, attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.1,
        use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(1))
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).train()
        if checkpoints:
            # Releases of transformers for Python 3.10 have it by its older name.
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            next(getattr(model, name) for name in names if hasattr(model, name))()
        apply, params, buffers = fdp.from_module(model)

        @fdp.data_parallel
        def step(params: Tree, batch: Tree, apply: Any = apply, buffers: Any = buffers) -> Any:
            def loss(params: Tree) -> torch.Tensor:
                return apply(params, buffers, input_ids=batch["x"], labels=batch["x"])[0].loss

            value, grads = fdp.value_and_grad(loss)(params)
            return fdp.pmean(value), grads

        found.append(seeded(step, params, {"x": tokens}))
        trace = step.trace(params, {"x": tokens})
        assert ("fdp_generator.replay" in str(trace.graph.graph)) == checkpoints
    torch.testing.assert_close(found[1], found[0])
