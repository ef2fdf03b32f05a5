"""Steps that ranks call in different orders: an error on all ranks that names both, before anything is returned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from samples import ALL_SAMPLES, exhaustive, some

import fdp
from fdp.distributed.desynchronised import why_desynchronised
from fdp.distributed.header import CALLS
from fdp.runtime.buffers import Buffer

Tree = Any

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)


def of(collective: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> tuple[Any, Any]:
    """Two steps whose messages are alike in number, size and kind, and whose results are not."""

    def first(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w + collective(b).to(w.dtype)

    def second(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w - collective(b).to(w.dtype)

    return tuple(fdp.data_parallel(step, **options) for step in (first, second))


def gathered(b: torch.Tensor) -> torch.Tensor:
    return fdp.all_gather(b).sum(0)


def wired(**options: Any) -> Callable[..., tuple[Any, Any]]:
    """Two steps whose gradients are sent in a narrow dtype."""

    def pair(group: Any) -> tuple[Any, Any]:
        def first(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return w - fdp.grad(lambda w: (w * b).sum())(w)

        def second(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return w + fdp.grad(lambda w: (w * b).sum())(w)

        return tuple(fdp.data_parallel(step, group=group, **options) for step in (first, second))

    return pair


def several_buckets(group: Any) -> tuple[Any, Any]:
    """Gradients in buckets of their own, the state is donated, and the first bucket is read last."""

    def loss(w: Tree, b: torch.Tensor) -> torch.Tensor:
        return ((w["a"] * b).sum() * w["b"] * w["c"]).sum()

    def first(w: Tree, b: torch.Tensor) -> Tree:
        early = fdp.pmean(b * 2)
        grads = fdp.grad(lambda w: loss(w, b))(w)
        return {name: w[name] - grads[name] for name in w}, early

    def second(w: Tree, b: torch.Tensor) -> Tree:
        early = fdp.pmean(b * 3)
        grads = fdp.grad(lambda w: loss(w, b))(w)
        return {name: w[name] + grads[name] for name in w}, early

    options = {"group": group, "donate_argnums": 0, "bucket_cap_mb": 1e-5}
    return tuple(fdp.data_parallel(step, **options) for step in (first, second))


def of_other_sizes(group: Any) -> tuple[Any, Any]:
    """A pair as in a GAN: other parameters, so other messages, which no backend can pair."""

    def first(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w + fdp.pmean(b)

    def second(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w - fdp.pmean(b.repeat(5000)).sum()

    return tuple(fdp.data_parallel(step, group=group) for step in (first, second))


def of_other_kinds(group: Any) -> tuple[Any, Any]:
    def first(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w + fdp.pmean(b)

    def second(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w - gathered(b)

    return tuple(fdp.data_parallel(step, group=group) for step in (first, second))


def one_function_twice(group: Any) -> tuple[Any, Any]:
    """Steps that nothing tells apart but that ranks have agreed on each."""

    def step(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w + fdp.pmean(b)

    return fdp.data_parallel(step, group=group), fdp.data_parallel(step, group=group)


def _means(group: Any) -> tuple[Any, Any]:
    return of(fdp.pmean, group=group)


Pair = Callable[[Any], tuple[Any, Any]]
PAIRS: dict[str, tuple[torch.dtype, Pair]] = {
    **{f"mean of {dtype}": (dtype, _means) for dtype in FLOATS},
    **{f"sum of {dtype}": (dtype, lambda group: of(fdp.psum, group=group)) for dtype in (torch.float32, *INTEGERS)},
    "max": (torch.int64, lambda group: of(fdp.pmax, group=group)),
    "max of floats": (torch.float32, lambda group: of(fdp.pmax, group=group)),
    "min": (torch.int32, lambda group: of(fdp.pmin, group=group)),
    "all_gather": (torch.float32, lambda group: of(gathered, group=group)),
    "broadcast": (torch.float32, lambda group: of(lambda b: fdp.broadcast(b, root=1), group=group)),
    "bfloat16 on the wire": (torch.float32, wired(wire_dtype=torch.bfloat16)),
    "bfloat16 on the wire, added up in float32": (
        torch.float32, wired(wire_dtype=torch.bfloat16, accumulate_dtype=torch.float32),
    ),
    "float16 on the wire": (torch.float32, wired(wire_dtype=torch.float16)),
    "other sizes": (torch.float32, of_other_sizes),
    "other kinds": (torch.float32, of_other_kinds),
    "one function twice": (torch.float32, one_function_twice),
}  # fmt: skip

FEW = (
    "mean of torch.float32", "sum of torch.int64", "all_gather", "bfloat16 on the wire, added up in float32",
    "other sizes", "one function twice",
)  # fmt: skip
"""One of each way in which a call says which it is; the others are much like them."""


def attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except fdp.FdpError as error:
        return error


def refused(outcome: Any, odd: bool, names: tuple[str, str], calls: tuple[int, int], group: Any) -> None:
    """Check the error of a rank: it names where each rank is."""
    assert isinstance(outcome, fdp.AgreementError), repr(outcome)
    lines = str(outcome).splitlines()
    assert lines[-1].startswith("Remedy: call the same steps in the same order"), outcome
    for rank in range(dist.get_world_size()):
        where = 0 if rank == 0 else 1
        assert f"  rank {rank}: at call {calls[where]} of step {names[where]!r} (test_order.py:" in str(outcome), (
            outcome
        )
    assert f"step {names[0 if odd else 1]!r} on rank {dist.get_rank()}" in lines[0]


def swap(names: list[str]) -> None:
    """Each pair on a group of its own: in order for a while, and then in another order on rank 0."""
    odd = dist.get_rank() == 0
    for name in names:
        dtype, pair = PAIRS[name]
        group = dist.new_group()
        first, second = pair(group)
        w, b = torch.ones(3, dtype=dtype), torch.tensor([1, 2, 3], dtype=dtype)
        results = []
        for _ in range(CALLS + 2):
            results.append((first(w, b), second(w, b)))
        for one, two in results:
            assert torch.equal(one, results[0][0]) and torch.equal(two, results[0][1]), name
        before = w.clone()
        outcome = attempt(lambda: first(w, b) if odd else second(w, b))  # noqa: B023
        named = tuple(step.__wrapped__.__name__ for step in (first, second))
        refused(outcome, odd, named, (CALLS + 3, CALLS + 3), group)
        assert torch.equal(w, before)
        again = attempt(lambda: second(w, b) if odd else first(w, b))  # noqa: B023
        assert isinstance(again, fdp.PeerError) and "desynchronised" in str(again), name


@pytest.mark.parametrize("world", some([3, 2]))
def test_swapped_steps_are_refused_on_all_ranks(world: int) -> None:
    for outcome in ranks.run_fresh(world, swap, list(PAIRS if ALL_SAMPLES else FEW), deadline_s=140):
        assert outcome.ok, outcome.describe()


def swap_donated() -> str:
    odd, group = dist.get_rank() == 0, dist.new_group()
    first, second = several_buckets(group)
    plan = first.plan({name: torch.ones(3) for name in "abc"}, torch.ones(3))
    assert len(plan.buckets) > 2
    w, b = {name: torch.ones(3) for name in "abc"}, torch.ones(3)
    for _ in range(2):
        w, _ = first(w, b)
        w, _ = second(w, b)
    held = {name: value.clone() for name, value in w.items()}
    outcome = attempt(lambda: first(w, b) if odd else second(w, b))
    refused(outcome, odd, ("first", "second"), (3, 3), group)
    assert all(torch.equal(w[name], held[name]) for name in w), "something that came back was written"
    return str(outcome)


def test_nothing_of_a_message_of_another_call_is_written_to_donated_state() -> None:
    for outcome in ranks.run_fresh(2, swap_donated, deadline_s=60):
        assert outcome.ok, outcome.describe()
        assert "donated state may be half updated" in outcome.value


def skip_a_call() -> None:
    """Steps take turns; one rank leaves a call out."""
    odd, group = dist.get_rank() == 0, dist.new_group()
    first, second = _means(group)
    w, b = torch.ones(3), torch.ones(3)
    for _ in range(5):
        first(w, b)
        second(w, b)
    first(w, b)
    outcome = attempt(lambda: first(w, b) if odd else second(w, b))
    refused(outcome, odd, ("first", "second"), (7, 6), group)


def test_a_call_that_one_rank_leaves_out_is_seen_at_the_next_step() -> None:
    for outcome in ranks.run_fresh(3, skip_a_call, deadline_s=60):
        assert outcome.ok, outcome.describe()


def in_order() -> list[Any]:
    """What looks like another order and is none."""
    rank = dist.get_rank()
    seen: list[Any] = []
    # A shorter last batch on one rank, again and again; steps that take turns; and profiles between.
    group = dist.new_group()

    def train(w: torch.Tensor, b: torch.Tensor) -> Tree:
        loss, grad = fdp.value_and_grad(lambda w: ((b @ w) ** 2).mean())(w)
        return w - 0.1 * grad, fdp.pmean(loss)

    def evaluate(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return fdp.pmean(((b @ w) ** 2).mean())

    step, score = (fdp.data_parallel(each, group=group, donate_argnums=()) for each in (train, evaluate))
    w = torch.ones(4)
    for turn in range(2 * CALLS + 3):
        rows = 1 + (rank + 1) * (turn % 3)
        w, loss = step(w, torch.full((rows, 4), 0.1))
        if turn % 5 == 0:
            seen.append(float(score(w, torch.full((rows + 1, 4), 0.1))))
        if turn == 10:
            assert step.profile(w, torch.full((rows, 4), 0.1), repeats=2).step_s > 0
    seen += [w.tolist(), float(loss)]
    # Groups of their own, called in another order by each rank's threads.
    groups = [dist.new_group() for _ in range(2)]
    steps = [_means(each) for each in groups]
    found: list[Any] = [None, None]

    def work(k: int) -> None:
        w, b = torch.zeros(2), torch.full((2,), 1.0 + rank)
        for _ in range(20):
            w = steps[k][0](steps[k][1](w, b), b) + 1
        found[k] = w.tolist()

    threads = [threading.Thread(target=work, args=(k,)) for k in ((0, 1) if rank else (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [*seen, *found, [why_desynchronised(fdp.distributed.group.resolve_group(each)) for each in (group, *groups)]]


def test_what_is_in_order_is_not_refused() -> None:
    outcomes = ranks.run_fresh(2, in_order, deadline_s=120)
    assert all(outcome.ok for outcome in outcomes), outcomes[0].describe()
    first, second = (outcome.value for outcome in outcomes)
    assert first == second
    assert first[-3] == first[-2] == [20.0, 20.0] and first[-1] == [None] * 3
    w = torch.ones(4)
    for _ in range(2 * CALLS + 3):
        b = torch.full((1, 4), 0.1)
        w = w - 0.1 * 2 * (b @ w) * b[0]
    torch.testing.assert_close(torch.tensor(first[-5]), w)


def compiled_swap() -> str:
    odd, group = dist.get_rank() == 0, dist.new_group()
    first, second = of(fdp.pmean, group=group, compile=True)
    w, b = torch.ones(3), torch.ones(3)
    for _ in range(3):
        assert first(w, b).tolist() == [2.0] * 3 and second(w, b).tolist() == [0.0] * 3
    outcome = attempt(lambda: first(w, b) if odd else second(w, b))
    refused(outcome, odd, ("first", "second"), (4, 4), group)
    return "refused"


@exhaustive
def test_compiled_steps_say_which_call_they_are() -> None:
    for outcome in ranks.run_fresh(2, compiled_swap, deadline_s=200):
        assert outcome.ok and outcome.value == "refused", outcome.describe()


def break_down() -> tuple[str, float]:
    """A message that fails while another rank has said that it is elsewhere."""
    odd, group = dist.get_rank() == 0, dist.new_group()
    first, second = _means(group)
    w, b = torch.ones(3), torch.ones(3)
    for _ in range(2):
        first(w, b)
        second(w, b)

    def fail(*_: Any) -> None:
        raise RuntimeError("connection closed by peer")

    Buffer.start = fail  # type: ignore[method-assign,assignment]
    begun = time.monotonic()
    outcome = attempt(lambda: first(w, b) if odd else second(w, b))
    assert isinstance(outcome, fdp.AgreementError), repr(outcome)
    return str(outcome), time.monotonic() - begun


def test_a_message_that_fails_since_ranks_are_elsewhere_says_so() -> None:
    for outcome in ranks.run_fresh(2, break_down, deadline_s=60):
        assert outcome.ok, outcome.describe()
        message, waited_s = outcome.value
        assert "rank 0: at call 3 of step 'first'" in message and "rank 1: at call 3 of step 'second'" in message
        assert f"failed on rank {outcome.rank}" in message and waited_s < 10


def look_back() -> str:
    """A header that came back on a device is looked at when it is here, at a later call."""
    group = dist.new_group()
    first, _ = _means(group)
    w, b = torch.ones(3), torch.ones(3)
    first(w, b)
    (known,) = first._known.values()

    class Late:
        call, look = 1, None

        def __init__(self, here: bool, unanimous: bool) -> None:
            self.has_arrived, self.is_unanimous = (lambda: here), (lambda: unanimous)

    order = known.emitted.consensus._order
    order._header_copies += [Late(True, True), Late(False, False)]
    assert first(w, b).tolist() == [2.0] * 3 and len(order._header_copies) == 1
    order._header_copies[:] = [Late(True, False)]
    outcome = attempt(lambda: first(w, b))
    assert isinstance(outcome, fdp.AgreementError) and "What it returned is wrong" in str(outcome)
    assert isinstance(attempt(lambda: first(w, b)), fdp.PeerError)
    return str(outcome)


def test_what_is_known_late_is_raised_at_the_next_call() -> None:
    for outcome in ranks.run_fresh(2, look_back, deadline_s=60):
        assert outcome.ok and "rank 1: at call 1 of step 'first'" in outcome.value, outcome.describe()
