"""Uneven data: a loop that lasts on every rank until the last rank has run out of batches.

Ranks that call a step together must call it equally often. So each rank says, one batch ahead, whether it has another
one; the tiny message is under way while the step runs. A rank that has none takes part with a batch whose weight is
zero.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fdp import pytree
from fdp.context.axis import refuse_inside
from fdp.distributed.desynchronised import doubt, mark_desynchronised, why_desynchronised
from fdp.distributed.exchange import ask, exchange, next_turn, timeout_s, wait_for_keys
from fdp.distributed.group import Group, Ranks, resolve_group
from fdp.distributed.messages import start_all_gather
from fdp.errors import ArgumentError, PeerError, build_message, first_line
from fdp.pytorch.tensors import bytes_of, version_of
from fdp.pytree import Tree
from fdp.state.replicate import replicate
from fdp.tracebacks import hiding_frames

_HAS, _OUT, _RAISED = 0, 1, 2
"""What a rank says of its next batch."""

_TELLS_S = 5.0
"""Seconds for which a rank that leaves tries to say why."""

_SAMPLE = 64
"""How many numbers of a tensor are looked at to see whether it was refilled."""

Weighted = tuple[Tree, torch.Tensor]


@hiding_frames
def join(
    batches: Iterable[Tree], group: Ranks = None, *, count: Callable[[Tree], float] | None = None, padding: str = "last"
) -> Iterator[Weighted]:
    """Go through batches on all ranks together, until the last rank has run out.

    Each rank passes its own batches; their number and sizes may differ, and a rank may have none at all. With
    `fdp.pmean(..., weight=weight)` in the step, means and gradients are those of one process with all samples, and
    nothing is counted twice. All ranks iterate together, outside of steps, and leave the loop together: a rank that
    leaves alone with `break` gets a `PeerError` at its next step. Batches are fetched one ahead, so each has
    to lie in memory of its own.

    Args:
        batches: this rank's batches, such as a DataLoader.
        group: as for `data_parallel`.
        count: a function of a batch that gives its weight, for instance its number of tokens; None for the length of
            the first dimension of its first tensor.
        padding: what a rank that has run out goes on with. "last": its last batch, which has been traced
            already; or, if it never had one, a copy of another rank's first. "empty": the same with no samples in it,
            for steps that would count samples whatever their weight, as in synchronised BatchNorm.

    Returns:
        An iterator over `(batch, weight)`. The weight is a 0-dim float64 tensor on the device of the batch's first
        tensor, and zero for a batch that only keeps the rank synchronised.

    Raises:
        ArgumentError: at the call: an option has no meaning. While iterating: a batch without a tensor of one
            dimension or more, or a count that is no number, on this rank; batches that are refilled in place.
        PeerError: while iterating: another rank's batches raised an error, which is named; this one's own errors are
            raised as they are, when all ranks have done their last common step. Or another rank died, or stopped
            answering.

    Example:
        >>> for batch, weight in join([torch.ones(3, 2), torch.ones(1, 2)]):
        ...     print(list(batch.shape), weight.item())
        [3, 2] 3.0
        [1, 2] 1.0

    References:
        `torch.distributed.algorithms.Join`, which shadows the messages of ranks that have run out.
    """
    refuse_inside("join")
    ranks = resolve_group(group)
    if padding not in ("last", "empty"):
        raise ArgumentError(build_message(f"fdp.join was given padding={padding!r}.", remedy='pass "last" or "empty".'))
    if count is not None and not callable(count):
        raise ArgumentError(
            build_message(
                f"fdp.join was given a count of type {type(count).__name__}.", remedy="pass a function of a batch."
            )
        )
    return _together(batches, ranks, count, padding == "empty")


@dataclass(frozen=True)
class _Next:
    """The next item of a rank: a batch and its weight, or nothing, or an error."""

    state: int
    batch: Tree = None
    weight: torch.Tensor | None = None
    error: Exception | None = None


def _together(
    batches: Iterable[Tree], ranks: Group, count: Callable[[Tree], float] | None, empty: bool
) -> Generator[Weighted, None, None]:
    if (why := why_desynchronised(ranks)) is not None:
        raise _lost(ranks, why)
    if ranks.size == 1:
        for batch in batches:
            yield batch, _weight(batch, count)
        return
    loop, source = _Loop(ranks), _items(batches)
    own, spare = _fetch(source, count), None
    finish = loop.start(own.state)
    try:
        while True:
            states = finish()
            if _RAISED in states:
                _raise_together(ranks, own, loop.done)
            if _HAS not in states:
                return
            if loop.done == 0 and _OUT in states:
                borrowed = _borrowed(ranks, own.batch, states.index(_HAS))
                spare = _without_weight(borrowed, empty) if own.state == _OUT else None
            if own.state == _HAS:
                assert own.weight is not None
                now, following = (own.batch, own.weight), _fetch(source, count, own.batch)
                if following.state != _HAS:
                    spare = _without_weight(own.batch, empty)
            else:
                assert spare is not None
                now, following = spare, own
            finish = loop.start(following.state)
            own = following
            loop.done += 1
            yield now
    except BaseException as error:
        if not isinstance(error, Exception):  # a loop that is left closes its generator, which is no error
            loop.leave(finish)
        raise
    finally:
        loop.tell()


class _Loop:
    """The messages of one loop, and its count of batches."""

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks
        self._turn = next_turn(ranks) if ranks.size > 1 else ""
        self._device = ranks.carrier(torch.device("cpu"))
        self.done = 0

    def start(self, state: int) -> Callable[[], list[int]]:
        """Start the message about this rank's next item; the returned function waits for those of the others."""
        ranks = self._ranks
        if (why := why_desynchronised(ranks)) is not None:
            raise _lost(ranks, why)
        own = torch.tensor([state], device=self._device)
        out = torch.empty((ranks.size, 1), dtype=torch.int64, device=self._device)
        with _talking(ranks):
            wait = start_all_gather(out, own, ranks)

        def finish() -> list[int]:
            if (why := why_desynchronised(ranks)) is not None:
                raise _lost(ranks, why)
            with _talking(ranks):
                wait()
                states: list[int] = out.flatten().tolist()
            return states

        return finish

    def tell(self) -> None:
        """Write to the store after how many batches this rank left, for ranks that ask later."""
        try:
            tell = functools.partial(self._ranks.store().set, f"{self._turn}/{self._ranks.rank}", str(self.done))
            ask(None, tell, limit_s=_TELLS_S)
        except Exception:  # the group may be gone, or the interpreter on its way out: then nothing will ask
            return

    def leave(self, finish: Callable[[], list[int]]) -> None:
        """Check, before this rank's next message, whether the others have left the loop as well."""
        ranks, turn, done = self._ranks, self._turn, self.done

        def find_out() -> str | None:
            names = [f"{turn}/{rank}" for rank in range(ranks.size)]
            store = ranks.store()
            wait_for_keys(store, names, timeout_s(), ranks)
            for rank, name in enumerate(names):
                theirs = ask(ranks, lambda: int(store.get(name)) if store.check([name]) else None)  # noqa: B023
                if theirs != done:
                    where = f"after {theirs}" if theirs is not None else f"not within {timeout_s():g} s"
                    return f"it left the loop over fdp.join after {done} batches, and rank {rank} {where}"
            finish()
            return None

        try:
            doubt(ranks, find_out)
        except Exception:  # as above
            return


def _items(batches: Iterable[Tree]) -> Iterator[Tree]:
    """The batches; an error of `iter()` is raised with the first of them."""
    yield from batches


def _fetch(source: Iterator[Tree], count: Callable[[Tree], float] | None, current: Tree = None) -> _Next:
    try:
        held = [x for x in pytree.leaves_of(current) if isinstance(x, torch.Tensor)]
        before = [_mark(tensor) for tensor in held]
        for batch in source:
            if before != [_mark(tensor) for tensor in held]:
                raise ArgumentError(
                    build_message(
                        "the batches of fdp.join are refilled in place: making one changed the one before, which is "
                        "still to be used.",
                        remedy="make each batch in memory of its own, for instance with clone().",
                    )
                )
            return _Next(_HAS, batch, _weight(batch, count))
    except Exception as error:
        return _Next(_RAISED, error=error)
    return _Next(_OUT)


def _mark(tensor: torch.Tensor) -> tuple[int, bytes]:
    """A mark that changes with a tensor: its version, and a few of its numbers.

    NumPy, or a loader of one's own, writes into memory without a new version. To read all of it would take time, and
    to read from a device would wait for that.
    """
    version = version_of(tensor)
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
        return version, b""
    at = torch.linspace(0, tensor.numel() - 1, min(tensor.numel(), _SAMPLE), dtype=torch.float64, device="cpu").long()
    indices = torch.unravel_index(at, tensor.shape)
    return version, bytes_of(tensor.detach()[indices])


def _weight(batch: Tree, count: Callable[[Tree], float] | None) -> torch.Tensor:
    tensors = [leaf for leaf in pytree.leaves_of(batch) if isinstance(leaf, torch.Tensor)]
    device = tensors[0].device if tensors and tensors[0].device.type != "mps" else None  # which has no doubles
    if count is None:
        lengths = [tensor.shape[0] for tensor in tensors if tensor.dim()]
        if not lengths:
            raise ArgumentError(
                build_message(
                    f"fdp.join does not know how many samples a batch has: a {type(batch).__name__} without a tensor "
                    "of one dimension or more.",
                    remedy="pass count=, a function of a batch.",
                )
            )
        return torch.tensor(float(lengths[0]), dtype=torch.float64, device=device)
    number = float(count(batch))
    if not 0 <= number < float("inf"):
        raise ArgumentError(
            build_message(f"the count of fdp.join returned {number}.", remedy="return a number of samples.")
        )
    return torch.tensor(number, dtype=torch.float64, device=device)


def _without_weight(batch: Tree, empty: bool) -> Weighted:
    weight = _weight(batch, lambda _: 0.0)
    if empty:
        batch = pytree.map_leaves(lambda x: x[:0] if isinstance(x, torch.Tensor) and x.dim() else x, batch)
    return batch, weight


def _borrowed(ranks: Group, batch: Tree, donor: int) -> Tree:
    """Give a rank without a batch a copy of the donor's; all ranks take part.

    Not zeros in its shapes: a model need not be finite on them (a mask that hides everything), and where the loss is
    not finite, its gradient is not zero, whatever the weight.
    """
    payload = b""
    if ranks.rank == donor:
        try:
            payload = pickle.dumps(_description(batch))
        except Exception as error:
            payload = pickle.dumps(ArgumentError(_not_lent(donor, first_line(error))))
    found = exchange(ranks, next_turn(ranks), payload, timeout_s())[donor]
    if found is None:
        raise _lost(ranks, f"rank {donor} did not describe its batch within {timeout_s():g} s")
    described = pickle.loads(found)
    if isinstance(described, ArgumentError):
        raise described
    like = batch if ranks.rank == donor else _blank(described)
    with _talking(ranks):
        return replicate(like, root=donor, group=ranks)


@dataclass(frozen=True)
class _Tensor:
    """The properties of a tensor that another rank needs to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str


def _description(batch: Tree) -> tuple[Tree, list[Any]]:
    """The structure of a batch without its numbers: a tree of indices into a list, and the list.

    Not a tree of `_Tensor`s: a dataclass is a container, and would be taken apart.
    """
    leaves, spec = pytree.flatten(batch)
    described = [_Tensor(tuple(x.shape), x.dtype, x.device.type) if isinstance(x, torch.Tensor) else x for x in leaves]
    return pytree.unflatten(spec, range(len(leaves))), described


def _blank(description: tuple[Tree, list[Any]]) -> Tree:
    places, leaves = description
    blanks = [torch.empty(x.shape, dtype=x.dtype, device=x.kind) if isinstance(x, _Tensor) else x for x in leaves]
    return pytree.map_leaves(blanks.__getitem__, places)


def _not_lent(donor: int, why: str) -> str:
    return build_message(
        f"fdp.join cannot give a rank that has no batch one of rank {donor}'s.",
        [why],
        remedy="pass batches of tensors in containers that can be pickled; or give every rank a batch.",
    )


def _raise_together(ranks: Group, own: _Next, done: int) -> None:
    """Raise on every rank; ranks without an error of their own raise with the errors of the others."""
    text = "" if own.error is None else f"{type(own.error).__name__}: {first_line(own.error)}"
    # A name of a file that is not UTF-8 is in an error's text as it came.
    texts = exchange(ranks, next_turn(ranks), text.encode(errors="backslashreplace"), timeout_s())
    if own.error is not None:
        raise own.error
    offenders = [f"rank {rank}: {found.decode()}" for rank, found in enumerate(texts) if found]
    raise PeerError(
        build_message(
            f"fdp.join stopped on all ranks after {done} batches: those of another rank raised an error.",
            offenders,
            remedy="look at the log of that rank.",
        ),
        tuple(rank for rank, found in enumerate(texts) if found), "raised", 0, tuple(offenders),
    )  # fmt: skip


class _talking:
    """Turn errors of the backend into a PeerError: another rank is gone."""

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (RuntimeError, dist.DistError)):
            mark_desynchronised(
                self._ranks, f"a message of fdp.join failed: {type(error).__name__}: {first_line(error)}"
            )
            raise _lost(self._ranks, f"{type(error).__name__}: {first_line(error)}") from error


def _lost(ranks: Group, why: str) -> PeerError:
    return PeerError(
        build_message(
            f"rank {ranks.rank} lost contact with the other ranks in a loop over fdp.join.",
            [why],
            remedy="look for the first error among the logs of all ranks; all ranks must go through the loop and leave "
            "it together.",
        )
    )
