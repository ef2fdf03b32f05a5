"""What inductor is wrong about, and a compiled step is right about all the same."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import ranks
import torch
from fuzz.plain import numbers
from samples import ALL_SAMPLES, exhaustive
from torch._inductor import config

import fdp
from fdp.emit.compiled import inductor
from fdp.pytorch.parts import release


def reads_what_was_scattered(state: torch.Tensor, x: torch.Tensor) -> Any:
    """Inductor lays the loops of the mean and of the sums anew, so as to fuse them, and there is a scatter before.

    (Drawn by the fuzzer; made smaller, it comes out right by luck.)
    """
    a = state
    v1 = torch.arange(x.numel())
    v2 = a @ x.t()
    v4 = torch.maximum(x, x)
    v2.scatter_(0, torch.ones_like(a, dtype=torch.int64).cumsum(0) - 1, a)
    v6 = v2 + 0.5 * v4
    v8 = fdp.random.randint(fdp.random.key(3), (4, 4), -2, 3).to(torch.float32)
    v9, v10 = fdp.pmean((x, v4))
    v12 = torch.func.vmap(torch.func.grad(lambda p, row: (row @ p).amax() + (p * p).sum()), (None, 0))(v8, x)
    v17 = v12.mean(0) + 0.5 * v6
    v18 = v17 * v9.max(0)[0]
    return a, [fdp.per_rank(v17[:]), fdp.per_rank(v18[:]), fdp.per_rank(v1), v10.clone()]


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    return numbers((4, 8), 1, False)[:, ::2], numbers((4, 4), 7, False)


def test_what_reads_changed_memory_comes_after_the_change() -> None:
    due = fdp.data_parallel(reads_what_was_scattered)(*arguments())[1]
    found = fdp.data_parallel(reads_what_was_scattered, compile=True)(*arguments())[1]
    for one, two in zip(found, due, strict=True):
        torch.testing.assert_close(one, two)


@exhaustive
@pytest.mark.skipif(release(torch.__version__) >= (2, 14), reason="inductor does it right by itself from torch 2.14 on")
def test_a_read_before_the_change_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a maximum excuses nothing: rounding does not move it away from what it was taken from."""
    monkeypatch.setattr(inductor, "reads_ordered_after_changes", lambda node: contextlib.nullcontext())
    step = fdp.data_parallel(reads_what_was_scattered, compile=True)
    with config.patch(force_disable_caches=True), pytest.raises(fdp.CompileError, match="rounding does not explain it"):
        step(*arguments())


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "padded"),
    [
        ((1, 1), 8, None, 0, True),
        pytest.param((6, 7), (4, 3), (3, 2), (2, 0), True, marks=exhaustive),
        pytest.param((4, 4, 5), 3, 2, 1, True, marks=exhaustive),
        pytest.param((4, 4), 3, 2, 0, False, marks=exhaustive),
    ],
)
def test_gradients_of_averages_over_what_there_is(
    size: tuple[int, ...], kernel: Any, stride: Any, padding: Any, padded: bool
) -> None:
    pool = torch.nn.functional.avg_pool2d if len(size) == 2 else torch.nn.functional.avg_pool3d

    def step(scale: torch.Tensor, x: torch.Tensor) -> Any:
        def loss(scale: torch.Tensor) -> torch.Tensor:
            return (pool(x * scale, kernel, stride, padding, ceil_mode=True, count_include_pad=padded) ** 2).sum()

        return scale, fdp.grad(loss)(scale)

    given = torch.ones(3, *size), numbers((2, 3, *size), 1, False)
    (_, due), (_, found) = (fdp.data_parallel(step, compile=how)(*given) for how in (False, True))
    torch.testing.assert_close(found, due)


REPEATED = {
    "a constant": lambda x: torch.ones(()).expand(4),
    "a sum": lambda x: x.sum().expand(4),
    "an element": lambda x: x[:1].expand(4),
    "windows": lambda x: x.unfold(0, 2, 1).reshape(-1)[:4],
}
SCATTERS = {
    "index_fill": lambda x, i, s: x.index_fill(0, i, 0),
    "index_copy": lambda x, i, s: x.index_copy(0, i, s),
    "index_put": lambda x, i, s: x.index_put((i,), s, accumulate=True),
    "index_add": lambda x, i, s: x.index_add(0, i, s),
    "put": lambda x, i, s: x.put(i, s),
    "rows": lambda x, i, s: x.expand(4, 4).index_put((i,), s),
    "windows": lambda x, i, s: x.clone().unfold(0, 2, 1).index_add(0, i, s.expand(1, 2)),
    "slice_scatter": lambda x, i, s: x.slice_scatter(s, 0, 1, 2),
    "select_scatter": lambda x, i, s: x.select_scatter(s[0], 0, 1),
    "diagonal_scatter": lambda x, i, s: x.expand(4, 4).diagonal_scatter(s.expand(4)),
}


def test_scatters_into_what_lies_upon_itself_change_one_element() -> None:
    def step(x: torch.Tensor, s: torch.Tensor) -> Any:
        index = torch.tensor([1])
        made = {
            (kind, scatter): 2 * SCATTERS[scatter](REPEATED[kind](x), index, s)
            for one, kind in enumerate(REPEATED)
            for two, scatter in enumerate(SCATTERS)
            if ALL_SAMPLES or two == one  # each is a kernel of its own
        }
        return x, made

    given = torch.tensor([3.0, 1.0, 2.0, 5.0]), torch.tensor([7.0])
    due = step(*given)[1]
    for compile in (False, True):
        found = fdp.data_parallel(step, compile=compile, check_trace=False, check_replication=False)(*given)[1]
        assert [name for name, one in found.items() if not torch.equal(one, due[name])] == []


@exhaustive
def test_a_value_put_by_a_mask_changes_what_was_scattered() -> None:
    def step(x: torch.Tensor, value: torch.Tensor) -> Any:
        copied = torch.zeros(4)
        copied.unfold(0, 2, 2).copy_(x.unfold(0, 2, 2))
        copied[copied > 1] = 1.0
        scattered = torch.zeros(4, 2).index_add(0, torch.tensor([2, 1, 0, 3]), x.unsqueeze(1).expand(4, 2))
        rows = scattered.clone()
        rows[scattered[:, 0] > 0] = 7.0  # a mask of fewer dimensions
        added = scattered.index_put((scattered < 0,), value, accumulate=True)
        return x, [copied, scattered, rows, added]

    given = torch.tensor([-2.0, 2.0, 0.0, -1.0]), torch.tensor([3.0])
    due = step(*given)[1]
    for compile in (False, True):
        found = fdp.data_parallel(step, compile=compile, check_trace=False, check_replication=False)(*given)[1]
        for one, two in zip(found, due, strict=True):
            assert one.tolist() == two.tolist()


@exhaustive
def test_what_is_chosen_by_a_mask_lies_as_before() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        mask = y > 0
        turned, blocks = (x * 2).t(), torch.stack([x, y, x]).permute(2, 0, 1)
        turned[mask] = 0.0
        blocks[mask.unsqueeze(1).expand(4, 3, 4).contiguous()] = 1.0
        rows = torch.index_put(x.t(), (y[0] > 0,), x.sum())
        added = torch.index_put((x[:, :2] * 1).t(), (mask[:2],), x.sum(), accumulate=True)
        return x, [turned, blocks, rows, added, added.t().view(-1), blocks.permute(1, 2, 0).view(-1)]

    given = torch.arange(-8.0, 8.0).view(4, 4), torch.tensor([-1.0, 1.0]).repeat(4, 2)
    due = step(*given)[1]
    for compile in (False, True):
        found = fdp.data_parallel(step, compile=compile, check_trace=False, check_replication=False)(*given)[1]
        assert [(one.stride(), one.tolist()) for one in found] == [(one.stride(), one.tolist()) for one in due]


TWO, ROW = torch.tensor([2, 0]), torch.tensor([[1, 2, 0, 3]])
INTO = {
    "diagonal": lambda a, d: a.diagonal().copy_(d),
    "as_strided": lambda a, d: a.as_strided((4,), (5,)).copy_(d),
    "select": lambda a, d: a[1].copy_(d),
    "columns": lambda a, d: a[:, ::2].copy_(d[:, None]),
    "index_put": lambda a, d: a.__setitem__(TWO, torch.stack([d, d])),
    "index_add": lambda a, d: a.index_add_(0, TWO, torch.stack([d, d])),
    "scatter": lambda a, d: a.scatter_(0, ROW, d[None]),
    "scatter_amax": lambda a, d: a.scatter_reduce_(0, ROW, d[None], "amax"),
    "put": lambda a, d: a.put_(TWO, d[:2]),
    "masked": lambda a, d: a.masked_fill_(a > 3, 9.0),
}
OUT_OF = {"product": lambda a, d: a @ d, "flip": lambda a, d: a.flip(0) * 3, "sum": lambda a, d: a.sum(0)}


def test_an_input_that_is_scattered_into_is_read_before_it_is_written_again() -> None:
    cases = list(itertools.product(INTO, OUT_OF, ("add", "add through a view", "again")))
    if not ALL_SAMPLES:  # each is several kernels
        cases = [("select", "flip", "add"), ("scatter", "sum", "add through a view"), ("index_add", "flip", "again")]

    def step(state: Any, d: torch.Tensor) -> Any:
        found = []
        for into, out, then in cases:
            a = state[f"{into} {out} {then}"]
            INTO[into](a, d)
            value = OUT_OF[out](a, d)
            if then == "again":
                INTO[into](a, value[0] if value.dim() == 2 else value)
            else:
                (a if then == "add" else a.t()).add_(value)
            found.append(value * 3)
        return state, found

    def made() -> Any:
        return {" ".join(case): torch.arange(-8.0, 8.0).view(4, 4) for case in cases}

    d = torch.arange(20.0, 24.0)
    due, values = step(made(), d)
    for compile in (False, True):
        options: Any = {"donate_argnums": 0, "check_trace": False, "check_replication": False}
        state, found = fdp.data_parallel(step, compile=compile, **options)(made(), d)
        assert [name for name in due if not torch.equal(state[name], due[name])] == []
        assert [case for case, one, two in zip(cases, found, values, strict=True) if not torch.equal(one, two)] == []


READERS = {
    "product": lambda x, v: x @ v,
    "flip": lambda x, v: v.flip(0) * 3,
    "sums": lambda x, v: (x * v).sum(1),
    "running sum": lambda x, v: v.cumsum(0) + x[0],
    "elements": lambda x, v: v[[1, 1, 3, 0]] - x[1],
}
CHANGERS = {
    "product": lambda v, u: v.mul_(u).add_(0.5),
    "copy": lambda v, u: v.copy_(u * 2),
    "view": lambda v, u: v.view(2, 2).t().add_(u.view(2, 2)),
    "slice": lambda v, u: v[1:].sub_(u[:-1]),
    "twice": lambda v, u: v.add_(u).mul_(v.flip(0)),
}
MESSAGES = {"alone": fdp.pmean, "packed": lambda v: fdp.psum((v * 2, v))[1], "gathered": fdp.all_gather}


def change_what_messages_brought() -> list[str]:
    """The cases in which a compiled step gives other numbers than the same step op by op."""
    cases = list(itertools.product(READERS, CHANGERS, MESSAGES))
    if not ALL_SAMPLES:  # each is a kernel of its own
        cases = [("product", "product", "packed"), ("flip", "slice", "alone"), ("product", "view", "gathered")]

    def step(state: Any, batch: Any) -> Any:
        x, y = batch
        made = []
        for number, (reader, changer, message) in enumerate(cases):
            value = MESSAGES[message](y + number)
            value = value[1] if message == "gathered" else value
            CHANGERS[changer](value, READERS[reader](x, value))
            made.append(value / 2)
        return state, fdp.per_rank(made)

    seed = 3 + int(fdp.axis_index())
    batch = numbers((4, 4), seed, False), numbers((4,), seed + 10, False)
    due, found = (
        fdp.data_parallel(step, compile=how, check_trace=False)(torch.ones(1), batch)[1] for how in (False, True)
    )
    return [" ".join(case) for case, one, two in zip(cases, found, due, strict=True) if not torch.allclose(one, two)]


def test_what_a_message_brought_is_read_before_it_is_changed() -> None:
    assert ranks.run(2, change_what_messages_brought) == [[], []]


MADE_ANEW = {
    "zeros": lambda a: a.zero_(),
    "a number": lambda a: a.view(2, 8).fill_(2.0),
    "zeros that are scattered into": lambda a: a.zero_().index_fill_(0, TWO, 3.0),
    "windows": lambda a: a.unfold(0, 2, 2).copy_((a * 2).unfold(0, 2, 2)),
}


@exhaustive
def test_an_input_that_is_scattered_into_is_made_anew() -> None:
    def step(state: Any, d: torch.Tensor) -> Any:
        found = []
        for name, make in MADE_ANEW.items():
            state[name].index_add_(0, TWO, torch.stack([d, d]))
            found.append(state[name] * 3)
            make(state[name])
        return state, found

    def made() -> Any:
        return {name: torch.arange(-8.0, 8.0).view(4, 4) for name in MADE_ANEW}

    d = torch.arange(20.0, 24.0)
    due, values = step(made(), d)
    options: Any = {"donate_argnums": 0, "check_trace": False, "check_replication": False}
    state, found = fdp.data_parallel(step, compile=True, **options)(made(), d)
    assert [name for name in due if not torch.equal(state[name], due[name])] == []
    assert [name for name, one, two in zip(MADE_ANEW, found, values, strict=True) if not torch.equal(one, two)] == []


def test_a_place_without_dimensions() -> None:
    def step(w: torch.Tensor, place: torch.Tensor) -> Any:
        gradients = fdp.grad(lambda v: v.take(place) + v.index_select(0, place).square().sum())(w)
        return w.take(place), w.index_add(0, place, w[:1], alpha=2), gradients

    w, place = torch.arange(12.0).view(4, 3), torch.tensor(2)
    taken, added, gradients = fdp.data_parallel(step, compile=True, check_replication=False)(w, place)
    assert (taken.shape, taken.item()) == ((), 2.0)
    assert torch.equal(added, w + torch.tensor([[0.0], [0], [1], [0]]) * 2 * w[0])
    due = torch.zeros(4, 3)
    due[2], due[0, 2] = 2 * w[2], 1
    assert torch.equal(gradients, due)


def test_a_softmax_over_one_element() -> None:
    def step(x: torch.Tensor) -> Any:
        return x, torch.softmax(torch.softmax(x, -1), 0), torch.softmax(x.view(1), 0)

    _, one, two = fdp.data_parallel(step, compile=True, check_replication=False)(torch.tensor(0.5))
    assert (float(one), two.tolist()) == (1.0, [1.0])


LAID_OUT = {
    "transposed": lambda x: (x.t() * 2).sub(x, alpha=0.5),
    "transposed, a sum": lambda x: x.t() + x,
    "permuted": lambda x: torch.stack([x, x * 2]).permute(2, 0, 1) * 3,
    "every second": lambda x: (x.t() * 2)[::2],
    "repeated": lambda x: x.sum(0).expand(4, 4),
    "by columns": lambda x: torch.empty_strided((4, 4), (1, 4)).copy_(x * 2),
}
BRANCHES = {
    "cond": lambda q: torch.cond(q.sum() > 0, lambda q: -q, lambda q: q * 3, (q,)),
    "cond in cond": lambda q: torch.cond(
        q.sum() > 0,
        lambda q: torch.cond(q.amax() > 1, lambda r: r.exp(), lambda r: r + r, (q.transpose(0, 1) * 2,)),
        lambda q: q.transpose(0, 1) * 3,
        (q,),
    ),
    "views in branches": lambda q: torch.cond(
        q.sum() > 0, lambda q: q.transpose(0, 1).reshape(-1) * 2, lambda q: q.reshape(-1).cumsum(0), (q,)
    ),
}  # fmt: skip


@pytest.mark.parametrize("branches", [pytest.param(x, marks=() if x == "cond" else exhaustive) for x in BRANCHES])
def test_branches_read_their_operands_as_they_lie(branches: str) -> None:
    """Inductor lowers branches for the strides of the graph, and laid operands out as it liked."""
    cases = list(itertools.product(LAID_OUT.values(), (1, -1)))
    if not ALL_SAMPLES:  # a condition is several kernels
        cases = cases[:1]

    def step(state: torch.Tensor, x: torch.Tensor) -> Any:
        made = [BRANCHES[branches](lay(x * sign)) for lay, sign in cases]
        return state, fdp.per_rank(made)

    given = torch.ones(1), numbers((4, 4), 1, False)
    due = fdp.data_parallel(step)(*given)[1]
    found = fdp.data_parallel(step, compile=True, check_trace=False)(*given)[1]
    for one, two in zip(found, due, strict=True):
        torch.testing.assert_close(one, two)
        assert one.stride() == two.stride()
