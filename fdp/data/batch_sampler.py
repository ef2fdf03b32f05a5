"""The samples of each step, divided between the ranks: the same global batches on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import Any

import torch
from torch.utils.data import Sampler

from fdp.data.permutation import Permutation
from fdp.distributed.exchange import ask
from fdp.distributed.group import Group, Ranks, resolve_group
from fdp.errors import AgreementError, ArgumentError, build_message
from fdp.random import fold_in, key
from fdp.tracebacks import hiding_frames

_AT_ONCE = 2**14
"""How many of a rank's indices are computed together: an operator costs about as much for one as for a thousand."""
_LONGEST = 2**62


class BatchSampler(Sampler[list[int]]):
    """This rank's part of each batch, for `torch.utils.data.DataLoader(batch_sampler=...)`.

    Which samples a step takes depends on the seed and on the number of the step, and on nothing else: the batches of
    1, 2, 3 and 4 ranks are the same, each divided between the ranks in order. Each epoch is another permutation, in
    which every sample comes once. So a run that was stopped goes on with `sampler.at(step)`, on any number of ranks.

    Each pass through a sampler (each `for` loop over its DataLoader) is one epoch, and the next pass is the next
    epoch, also if a loop was left early. The first pass of `sampler.at(step)` is the rest of that step's epoch.

    Where ranks do not divide a batch evenly, parts differ by one in length: then weigh each rank's mean by it, with
    `fdp.pmean(loss, weight=len(x))`.

    Args:
        length: number of samples of the data set, on all ranks together.
        batch_size: samples of a step, on all ranks together.
        seed: any integer, the same on every rank. Seeds that differ by a multiple of 2**64 draw the same.
        shuffle: whether epochs are permuted; else each takes the samples in order.
        drop_last: whether to leave out the last samples of an epoch where they make no whole batch. Without
            shuffling, these are always the same.
        group: as for `data_parallel`; the default group is looked up when a pass begins.

    Raises:
        ArgumentError: an argument is no number that makes sense; or `drop_last` leaves no batch. When a pass begins:
            a batch has fewer samples than there are ranks.
        AgreementError: when a pass begins: another rank has begun a pass through another sampler, or through another
            epoch of it.

    Example:
        >>> sampler = BatchSampler(10, batch_size=4)
        >>> [len(batch) for batch in sampler]
        [4, 4, 2]
        >>> list(sampler) == list(BatchSampler(10, batch_size=4).at(3))  # the second epoch begins at step 3
        True
        >>> loader = torch.utils.data.DataLoader(torch.arange(10.0), batch_sampler=sampler.at(2))

    References:
        `torch.utils.data.DistributedSampler`, which needs `set_epoch`, and whose order depends on the number of ranks.
    """

    @hiding_frames
    def __init__(
        self,
        length: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        *,
        group: Ranks = None,
    ) -> None:
        self.length = _number("length", length, "pass the number of samples: len(dataset).", most=_LONGEST)
        self.batch_size = _number("batch_size", batch_size, "pass the samples of a step, over all ranks.")
        self.seed = _number("seed", seed, "pass an integer, the same on every rank.", least=None)
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self._group, self._next_step = group, 0
        if not self.batches_per_epoch:
            raise ArgumentError(
                build_message(
                    f"fdp.BatchSampler was given length={length}, batch_size={batch_size} and drop_last=True: an epoch "
                    "would have no batch.",
                    remedy="pass a smaller batch_size, or drop_last=False.",
                )
            )

    @property
    def batches_per_epoch(self) -> int:
        """Steps of a whole epoch."""
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)

    def at(self, step: int) -> BatchSampler:
        """The same sampler, from some step on; equally fast for any step.

        Args:
            step: number of steps that are done, counted from the first of the first epoch.

        Returns:
            A new sampler. Its first pass is the rest of the epoch that the step lies in.

        Raises:
            ArgumentError: the step is no such number.
        """
        again = BatchSampler(self.length, self.batch_size, self.seed, self.shuffle, self.drop_last, group=self._group)
        again._next_step = _number("at(step)", step, "pass the number of steps that are done.", least=0)
        return again

    def global_batch(self, step: int) -> list[int]:
        """The samples of one step on all ranks together, in order.

        Args:
            step: its number, counted from the first of the first epoch.

        Returns:
            Their indices. The ranks' parts, one behind the other, are the same.

        Raises:
            ArgumentError: the step is no such number.
        """
        step = _number("global_batch(step)", step, "pass the number of a step, from 0 on.", least=0)
        epoch, batch = divmod(step, self.batches_per_epoch)
        start = batch * self.batch_size
        return self._samples(epoch, torch.arange(start, self._end(batch), device="cpu")).tolist()

    def __len__(self) -> int:
        """How many batches the next pass has."""
        return self.batches_per_epoch - self._next_step % self.batches_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's part of each batch of the next epoch.

        Which epoch that is, is settled by the first batch that is asked for: a DataLoader with worker processes makes
        two iterators for its first pass, and uses one.
        """
        epoch, first = divmod(self._next_step, self.batches_per_epoch)
        self._next_step = (epoch + 1) * self.batches_per_epoch
        ranks = resolve_group(self._group)
        self._refuse_empty_parts(ranks)
        self._refuse_disagreement(ranks, epoch, first)
        together = max(1, _AT_ONCE * ranks.size // self.batch_size)
        for start in range(first, self.batches_per_epoch, together):
            batches = range(start, min(start + together, self.batches_per_epoch))
            parts = [self._part(batch, ranks) for batch in batches]
            positions = torch.cat([torch.arange(part.start, part.stop, device="cpu") for part in parts])
            for samples in self._samples(epoch, positions).split([len(part) for part in parts]):
                yield samples.tolist()

    def __repr__(self) -> str:
        return f"fdp.BatchSampler({self._described()}).at({self._next_step})"

    def _described(self) -> str:
        return f"{self.length}, {self.batch_size}, seed={self.seed}, shuffle={self.shuffle}, drop_last={self.drop_last}"

    def _end(self, batch: int) -> int:
        """Where a batch of an epoch ends, among the positions of the epoch."""
        return min((batch + 1) * self.batch_size, self.length)

    def _part(self, batch: int, ranks: Group) -> range:
        """This rank's positions of a batch of an epoch."""
        start, end = batch * self.batch_size, self._end(batch)
        cuts = [start + (end - start) * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1)]
        return range(*cuts)

    def _samples(self, epoch: int, positions: torch.Tensor) -> torch.Tensor:
        if not self.shuffle:
            return positions
        return Permutation(self.length, fold_in(key(self.seed, device="cpu"), epoch))(positions)

    def _refuse_empty_parts(self, ranks: Group) -> None:
        """Refuse batches with fewer samples than ranks when an epoch begins, and not at its last batch."""
        smallest = self._end(self.batches_per_epoch - 1) - (self.batches_per_epoch - 1) * self.batch_size
        if smallest < ranks.size:
            last = smallest < self.batch_size
            raise ArgumentError(
                build_message(
                    f"{self!r} cannot be divided between {ranks.size} ranks: "
                    f"{'the last batch of an epoch has' if last else 'a batch has'} {smallest} "
                    f"sample{'s' * (smallest != 1)}.",
                    remedy="pass drop_last=True, or another batch_size."
                    if last
                    else f"pass a batch_size of at least {ranks.size}: it counts the samples of all ranks.",
                )
            )

    def _refuse_disagreement(self, ranks: Group, epoch: int, first: int) -> None:
        """Compare with the rank that began this pass first, without waiting."""
        if ranks.size == 1:
            return
        store = ranks.store()
        turn = ask(ranks, lambda: store.add(f"fdp/passes/{ranks.name}/{ranks.rank}", 1))
        own = f"fdp.BatchSampler({self._described()}).at({epoch * self.batches_per_epoch + first})"
        found = ask(ranks, lambda: store.compare_set(f"fdp/pass/{ranks.name}/{turn}", "", own)).decode()
        if found not in ("", own):
            raise AgreementError(
                build_message(
                    f"ranks go through different batches: pass {turn} through an fdp.BatchSampler is not the same on "
                    f"rank {ranks.rank} as on the rank that began it first.",
                    [f"rank {ranks.rank}: {own}", f"first rank: {found}"],
                    remedy="make samplers with the same arguments on every rank, length and seed included, and go "
                    "through them equally often and in the same order. For data of each rank's own, use a sampler of "
                    "torch's and fdp.join.",
                )
            )


def _number(name: str, value: Any, remedy: str, *, least: int | None = 1, most: int | None = None) -> int:
    fits = isinstance(value, Integral) and not isinstance(value, bool)
    if not fits or (least is not None and value < least) or (most is not None and value > most):
        raise ArgumentError(build_message(f"fdp.BatchSampler was given {name}={value!r}.", remedy=remedy))
    return int(value)
