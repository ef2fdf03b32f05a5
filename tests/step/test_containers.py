"""Containers of all kinds in steps: as batches, as state, as what a step returns, on ranks and under transforms."""

from __future__ import annotations

import collections
import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from containers import Batch, Box, Encoding, Frozen, Keyed, Marked, Point, Registered, Slotted, Tokens
from samples import ALL_SAMPLES

import fdp
from fdp import pytree

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="no transformers: pip install fdp[huggingface]"
)

WRAPPERS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
    # How a pair of tensors is put into a container, and got out of it.
    "dict": (lambda x, y: {"x": x, "y": y}, lambda c: (c["x"], c["y"])),
    "dataclass": (Batch, lambda c: (c.x, c.y)),
    "slots": (Slotted, lambda c: (c.b, c.a)),
    "nested": (lambda x, y: Frozen(x, Batch(None, [y])), lambda c: (c.w, c.inner.y[0])),
    "static": (lambda x, y: [Marked(x), Marked(y, "s")], lambda c: (c[0].x, c[1].x)),
    "named tuple": (Point, lambda c: (c.x, c.y)),
    "UserDict": (lambda x, y: collections.UserDict(x=x, y=y), lambda c: (c["x"], c["y"])),
    "encoding": (lambda x, y: Encoding({"x": x}, required=y), lambda c: (c["x"], c.lengths)),
    "registered": (Registered, lambda c: tuple(c.parts)),
    "keyed": (Keyed, lambda c: tuple(c.parts)),
}


def loss_of(w: Any, b: Any, x: Any, y: Any) -> torch.Tensor:
    return ((x @ w + b - y) ** 2).mean()


def train_with(name: str, folder: str) -> Any:
    """Three steps with state, batch, auxiliary result and output in one kind of container; and with plain tensors."""
    pack, unpack = WRAPPERS[name]
    rank = fdp.axis_index()
    g = torch.Generator().manual_seed(int(rank))
    # Constants may be in state, not in a batch.
    plain = name != "nested"
    pack_batch = pack if plain else lambda x, y: Batch(x, Box(y))
    unpack_batch = unpack if plain else lambda c: (c.x, c.y.value)
    optimizer = fdp.optim.from_torch(torch.optim.Adam, lr=0.1)

    @fdp.data_parallel(donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            w, b = unpack(params)
            x, y = unpack_batch(batch)
            return loss_of(w, b, x, y), pack_batch(x.sum(), (x @ w).detach())

        (loss, aux), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        metrics = pack(fdp.pmean(loss), fdp.psum(unpack_batch(aux)[0]))
        return {"params": params, "opt": opt}, metrics, fdp.per_rank(aux)

    params = pack(torch.full((3, 1), float(rank)), torch.zeros(1))
    params = fdp.replicate(params)  # rank 0's
    state = {"params": params, "opt": optimizer.init(params)}
    # The dumber program: the class itself, and gradients that are averaged by hand.
    w, b = torch.zeros(3, 1).requires_grad_(), torch.zeros(1).requires_grad_()
    by_hand = torch.optim.Adam([w, b], lr=0.1)
    for _ in range(3):
        x, y = torch.randn(4, 3, generator=g), torch.randn(4, 1, generator=g)
        by_hand.zero_grad()
        loss = loss_of(w, b, x, y)
        loss.backward()
        for p in (w, b):
            assert p.grad is not None
            p.grad.copy_(fdp.pmean(p.grad))
        before, inside = fdp.pmean(loss.detach()), (x @ w).detach()
        by_hand.step()
        old = unpack(state["params"])
        state, metrics, aux = step(state, pack_batch(x, y))
        assert type(state["params"]) is type(metrics) is type(params)
        assert type(aux) is type(pack_batch(x, y))
        torch.testing.assert_close(unpack(state["params"]), (w.detach(), b.detach()))
        torch.testing.assert_close(unpack(metrics), (before, fdp.psum(x.sum())))
        torch.testing.assert_close(unpack_batch(aux)[1], inside)
        assert all(new is was for new, was in zip(unpack(state["params"]), old, strict=True))  # donated
    fdp.assert_replicated(state)
    fdp.save(folder, state)
    blank = pytree.map_leaves(lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x, state)
    loaded = fdp.load(folder, like=blank)
    assert type(loaded["params"]) is type(params)
    torch.testing.assert_close(unpack(loaded["params"]), unpack(state["params"]), rtol=0, atol=0)
    return step.traces


def train_with_each(names: list[str], folder: str) -> dict[str, int]:
    return {name: train_with(name, f"{folder}/{name.replace(' ', '-')}") for name in names}


def test_training_in_containers_of_all_kinds(tmp_path: pathlib.Path) -> None:
    names = list(WRAPPERS) if ALL_SAMPLES else ["nested", "static", "keyed"]
    for traces in ranks.run(2, train_with_each, names, str(tmp_path)):
        assert traces == dict.fromkeys(names, 1)


def test_containers_under_transforms() -> None:
    params = Batch(torch.tensor([1.0, 2.0]), torch.tensor(3.0))

    def loss(p: Batch, x: torch.Tensor) -> Any:
        return (p.x * x).sum() * p.y, Frozen(p.x * x, None)

    (value, aux), grads = fdp.value_and_grad(loss, has_aux=True)(params, torch.ones(2))
    assert (value.item(), type(grads), aux.w.tolist()) == (9.0, Batch, [1.0, 2.0])
    assert (grads.x.tolist(), grads.y.item()) == ([3.0, 3.0], 3.0)
    assert not aux.w.requires_grad

    def both(x: torch.Tensor) -> Any:
        grads, aux = fdp.grad(loss, has_aux=True)(params, x)
        return grads.x, aux.w

    found, seen = torch.func.vmap(both)(torch.eye(2))
    assert found.tolist() == (3 * torch.eye(2)).tolist()
    assert seen.tolist() == [[1.0, 0.0], [0.0, 2.0]]


@needs_transformers
def test_a_batch_of_a_tokenizer_keeps_its_trace() -> None:
    from transformers import BatchEncoding
    from transformers.modeling_outputs import BaseModelOutput

    @fdp.data_parallel
    def step(w: Any, batch: Any) -> Any:
        assert isinstance(batch, BatchEncoding)
        hidden = batch.input_ids.float() * w
        return fdp.per_rank(BaseModelOutput(hidden, attentions=(hidden.sum(),)))

    for number in range(3):
        output = step(torch.tensor(2.0), BatchEncoding({"input_ids": torch.tensor([[number]])}, encoding=[Tokens()]))
        assert (output.last_hidden_state.item(), output.attentions[0].item()) == (2 * number, 2 * number)
        assert type(output) is BaseModelOutput
    assert step.traces == 1
