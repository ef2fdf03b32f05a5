"""Several ranks in one process, without a process group: threads of which one runs at a time.

`Turns` lets each rank run until it needs what another one sends. `Plain` is what a step calls in place of fdp: a loop
over ranks, plain eager PyTorch and nothing else. `Messages` stands for the backend of an emitted step. It may do what a
backend may do: read what it sends at once or as late as the wait, and write to the memory of a message at any time
between.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import optree
import torch


class OutOfStep(RuntimeError):
    """Ranks wait for different messages."""


class Turns:
    """Runs one function a rank, one at a time.

    Args:
        size: number of ranks.
        seed: random numbers on rank r begin with seed + r.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self._condition = threading.Condition()
        self._turn = 0
        self._posted: dict[Hashable, dict[int, Any]] = {}
        self._wanted: dict[int, Any] = {}
        self._finished: set[int] = set()
        self._error: BaseException | None = None
        self._random = [torch.Generator().manual_seed(seed + rank).get_state() for rank in range(size)]
        self._results: list[Any] = [None] * size

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Call a function with the number of each rank; the results in rank order."""
        before = torch.get_rng_state()
        threads = [threading.Thread(target=self._serve, args=(function, rank)) for rank in range(self.size)]
        torch.set_rng_state(self._random[0])
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.set_rng_state(before)
        if self._error is not None:
            raise self._error
        return self._results

    def exchange(self, rank: int, key: Hashable, value: Any, members: Sequence[int] | None = None) -> list[Any]:
        """Give a value to all ranks, or to some, and get theirs; which exchange it is, the key says."""
        members = range(self.size) if members is None else members
        key = (key, tuple(members))
        self._posted.setdefault(key, {})[rank] = value
        self._wanted[rank] = key
        while len(self._posted[key]) < len(members):
            if all(self._is_stuck(other) for other in range(self.size)):
                wanted = {other: str(key) for other, key in self._wanted.items()}
                raise OutOfStep(f"ranks wait for different messages: {wanted}")
            self._pass_on(rank)
        del self._wanted[rank]
        return [self._posted[key][other] for other in members]

    def _is_stuck(self, rank: int) -> bool:
        key = self._wanted.get(rank)
        return rank in self._finished or (key is not None and len(self._posted[key]) < len(key[1]))

    def _serve(self, function: Callable[[int], Any], rank: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == rank)
        try:
            if self._error is None:
                self._results[rank] = function(rank)
        except BaseException as error:
            self._error = self._error or error
        self._finished.add(rank)
        self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        others = [r % self.size for r in range(rank + 1, rank + self.size) if r % self.size not in self._finished]
        if not others:
            return
        self._random[rank] = torch.get_rng_state()
        with self._condition:
            self._turn = others[0]
            torch.set_rng_state(self._random[self._turn])
            self._condition.notify_all()
            if rank not in self._finished:
                self._condition.wait_for(lambda: self._turn == rank)
                if self._error is not None:
                    raise OutOfStep("another rank raised an error")


class Plain:
    """What the steps of `faulty_programs` call in place of fdp: the same names, in plain eager PyTorch."""

    def __init__(self, turns: Turns, rank: int, sizes: Sequence[tuple[str, int]] = ()) -> None:
        self._turns, self._rank, self._sizes, self._count = turns, rank, sizes, 0

    def _members(self, axis: str | None) -> list[int]:
        """The ranks that differ from this one along one dimension of the mesh alone."""
        if axis is None:
            return list(range(self._turns.size))
        coordinates = list(itertools.product(*(range(size) for _, size in self._sizes)))
        at = [name for name, _ in self._sizes].index(axis)

        def rest(rank: int) -> tuple[int, ...]:
            return coordinates[rank][:at] + coordinates[rank][at + 1 :]

        return [rank for rank in range(len(coordinates)) if rest(rank) == rest(self._rank)]

    def _all(self, x: torch.Tensor, axis: str | None = None) -> torch.Tensor:
        self._count += 1
        members = self._members(axis)
        return torch.stack(self._turns.exchange(self._rank, self._count, x.detach().clone(), members))

    def psum(self, tree: Any, axis: str | None = None) -> Any:
        return optree.tree_map(lambda x: self._all(x, axis).sum(0).to(x.dtype), tree)

    def pmean(self, tree: Any, axis: str | None = None) -> Any:
        return optree.tree_map(lambda x: self._all(x, axis).sum(0) / len(self._members(axis)), tree)

    def pmax(self, tree: Any, axis: str | None = None) -> Any:
        return optree.tree_map(lambda x: self._all(x, axis).amax(0), tree)

    def all_gather(self, tree: Any, axis: str | None = None) -> Any:
        return optree.tree_map(lambda x: self._all(x, axis), tree)

    def broadcast(self, tree: Any, root: int = 0, axis: str | None = None) -> Any:
        return optree.tree_map(lambda x: self._all(x, axis)[root].clone(), tree)

    def psum_scatter(self, tree: Any, axis: int = 0, axis_name: str | None = None) -> Any:
        return optree.tree_map(lambda x: self._part(self._all(x, axis_name).sum(0).to(x.dtype), axis, axis_name), tree)

    def pmean_scatter(self, tree: Any, axis: int = 0, axis_name: str | None = None) -> Any:
        size = len(self._members(axis_name))
        return optree.tree_map(lambda x: self._part(self._all(x, axis_name).sum(0) / size, axis, axis_name), tree)

    def all_to_all(self, x: torch.Tensor, split_axis: int, concat_axis: int) -> torch.Tensor:
        return torch.cat([self._part(each, split_axis) for each in self._all(x)], concat_axis)

    def ppermute(self, x: torch.Tensor, perm: Any) -> torch.Tensor:
        sent = self._all(x)
        return next((sent[source].clone() for source, to in perm if to == self._rank), torch.zeros_like(x))

    def _part(self, x: torch.Tensor, axis: int, axis_name: str | None = None) -> torch.Tensor:
        members = self._members(axis_name)
        return x.chunk(len(members), axis)[members.index(self._rank)].clone()

    def axis_index(self, axis: str | None = None) -> torch.Tensor:
        return torch.tensor(self._members(axis).index(self._rank))

    def value_and_grad(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Of this rank's own value; gradients averaged over ranks."""

        def both(params: Any, *others: Any) -> tuple[Any, Any]:
            value, found = self._own(function, params, *others)
            return value, self.pmean(found)

        both.own = lambda *args: self._own(function, *args)  # type: ignore[attr-defined]
        return both

    def grad(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: self.value_and_grad(function)(*args)[1]

    def accumulate(self, function: Any, microbatches: int) -> Callable[..., Any]:
        """What `value_and_grad` returned, for each part of a batch; averaged over parts, then over ranks."""

        def averaged(params: Any, batch: Any) -> tuple[Any, Any]:
            leaves, spec = optree.tree_flatten(batch)
            pieces = [
                optree.tree_unflatten(spec, [x.chunk(microbatches)[at] for x in leaves]) for at in range(microbatches)
            ]
            found = [function.own(params, piece) for piece in pieces]
            value, grads = optree.tree_map(lambda *each: sum(each) / microbatches, *found)
            return value, self.pmean(grads)

        return averaged

    @staticmethod
    def _own(function: Callable[..., Any], params: Any, *others: Any) -> tuple[Any, Any]:
        leaves, spec = optree.tree_flatten(params)
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        value = function(optree.tree_unflatten(spec, leaves), *others)
        found = torch.autograd.grad(value, leaves, allow_unused=True)
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
        return value.detach(), optree.tree_unflatten(spec, grads)


class Messages:
    """What carries the messages of emitted steps.

    Args:
        turns: of the ranks, `size` of them.
        late: whether a message reads what it sends when it is waited for; else when it is started, and its memory holds
            NaN until it is waited for. A backend may do either.
    """

    def __init__(self, turns: Turns, late: bool) -> None:
        self._turns, self._late, self.size = turns, late, turns.size
        self._counts = [0] * turns.size

    def _send(
        self, group: Any, kind: Hashable, own: torch.Tensor, to: torch.Tensor, combined: Callable[[list[Any]], Any]
    ) -> Callable[[], None]:
        me = group.members[group.rank]
        number = self._counts[me] = self._counts[me] + 1
        key = (number, kind, tuple(own.shape), own.dtype)
        sent = None if self._late else own.clone()
        if not self._late:
            poison(to)

        def wait() -> None:
            value = own.clone() if sent is None else sent
            to.copy_(combined(self._turns.exchange(me, key, value, group.members)))

        return wait

    def start_all_reduce(self, own: torch.Tensor, op: str, group: Any, arrived: Any = None) -> Callable[[], None]:
        def combined(values: list[Any]) -> Any:
            stacked = torch.stack(values)
            if op in ("max", "min"):
                return stacked.amax(0) if op == "max" else stacked.amin(0)
            return stacked.sum(0) / (len(values) if op == "mean" else 1)

        return self._send(group, op, own, own, combined)

    def start_broadcast(self, own: torch.Tensor, root: int, group: Any, arrived: Any = None) -> Callable[[], None]:
        return self._send(group, ("broadcast", root), own, own, lambda values: values[root])

    def start_all_gather(
        self, out: torch.Tensor, own: torch.Tensor, group: Any, arrived: Any = None
    ) -> Callable[[], None]:
        return self._send(group, "all_gather", own, out, lambda values: torch.stack(values).view_as(out))

    def start_all_to_all(
        self, out: torch.Tensor, own: torch.Tensor, group: Any, arrived: Any = None
    ) -> Callable[[], None]:
        def combined(values: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.cat([value.view(group.size, -1)[group.rank] for value in values]).view_as(out)

        return self._send(group, "all_to_all", own, out, combined)

    def start_reduce_scatter(
        self,
        result: torch.Tensor,
        arriving: torch.Tensor,
        own: torch.Tensor,
        op: str,
        group: Any,
        arrived: Any = None,
        accumulate: torch.dtype | None = None,
    ) -> Callable[[], None]:
        def combined(values: list[torch.Tensor]) -> torch.Tensor:
            total = torch.stack([value[group.rank] for value in values]).to(accumulate or own.dtype).sum(0)
            poison(own)
            poison(arriving)
            return (total / len(values) if op == "mean" else total).to(own.dtype)

        wait = self._send(group, ("reduce_scatter", op, accumulate), own, result, combined)
        if not self._late:
            poison(own)
            poison(arriving)
        return wait

    def start_permute(
        self, out: torch.Tensor, own: torch.Tensor, pairs: Any, group: Any, arrived: Any = None
    ) -> Callable[[], None]:
        pairs = tuple(map(tuple, pairs))

        def combined(values: list[torch.Tensor]) -> torch.Tensor:
            return next((values[source] for source, to in pairs if to == group.rank), torch.zeros_like(own))

        return self._send(group, ("permute", pairs), own, out, combined)


class SimulatedGroup:
    """As much of `fdp.distributed.group.Group` as an emitted step asks for."""

    def __init__(self, messages: Messages, rank: int, sizes: Sequence[tuple[str, int]] = ()) -> None:
        self.size, self.rank, self.sizes, self._messages = messages.size, rank, tuple(sizes), messages
        self.members: Sequence[int] = range(self.size)

    def along(self, dimension: str) -> SimulatedGroup:
        """The ranks that differ from this one along one dimension alone."""
        if not dimension:
            return self
        names, sizes = zip(*self.sizes, strict=True)
        at, everyone = names.index(dimension), torch.arange(self.size).view(sizes)
        place = [int(each) for each in (everyone == self.rank).nonzero()[0]]
        found = SimulatedGroup(self._messages, place[at])
        found.members = everyone[tuple(slice(None) if d == at else p for d, p in enumerate(place))].tolist()
        found.size = len(found.members)
        return found

    def all_reduce(self, buffer: torch.Tensor, op: str, arrived: Any = None) -> Callable[[], None]:
        return self._messages.start_all_reduce(buffer, op, self, arrived)

    def broadcast(self, buffer: torch.Tensor, root: int, arrived: Any = None) -> Callable[[], None]:
        return self._messages.start_broadcast(buffer, root, self, arrived)

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, arrived: Any = None) -> Callable[[], None]:
        return self._messages.start_all_gather(out, own, self, arrived)

    def all_to_all(self, out: torch.Tensor, own: torch.Tensor, arrived: Any = None) -> Callable[[], None]:
        return self._messages.start_all_to_all(out, own, self, arrived)

    def reduce_scatter(
        self,
        result: torch.Tensor,
        arriving: torch.Tensor,
        own: torch.Tensor,
        op: str,
        arrived: Any = None,
        accumulate: Any = None,
    ) -> Callable[[], None]:
        return self._messages.start_reduce_scatter(result, arriving, own, op, self, arrived, accumulate)

    def permute(self, out: torch.Tensor, own: torch.Tensor, pairs: Any, arrived: Any = None) -> Callable[[], None]:
        return self._messages.start_permute(out, own, pairs, self, arrived)


def poison(memory: torch.Tensor) -> None:
    """Fill contiguous memory with ones: as numbers NaN, -1 or True."""
    memory.view(-1).view(torch.uint8).fill_(255)
