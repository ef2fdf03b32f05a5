"""Ranks that are started again agree on the number of their attempt, and so on fresh keys in a store that stays."""

from __future__ import annotations

import json
import logging
import time

import torch.distributed as dist

from fdp.errors import ranks_text

_CHECKS_PER_S = 4000
"""Of the store by all ranks together, about; of few ranks each looks fifty times a second."""

_LOOKS_WITHIN_S = 2.0
"""A rank 0 that has not looked around for so long is gone, also on a machine that is busy."""

_TELLS_S = 1.0
"""So long a rank 0 that gives up stays at least, so that the others learn who is missing."""

_WARNS_S = 30.0
"""A rank that has waited so long says for whom; again each time that the wait has doubled."""

logger = logging.getLogger("fdp")


class NotJoined(Exception):
    """Some ranks have not joined in time.

    Args:
        ranks: which.
        limit_s: seconds that they had.
    """

    def __init__(self, ranks: tuple[int, ...], limit_s: float) -> None:
        super().__init__(f"{ranks_text(ranks)} did not join within {limit_s:g} seconds")
        self.ranks = ranks


def join_attempt(store: dist.Store, rank: int, size: int, limit_s: float) -> int:
    """Wait until all ranks of this attempt are there.

    A launcher can start ranks again beside a store that has outlived the attempts before. Its keys then hold what
    earlier ranks have written. No variable of torchrun tells attempts apart: `TORCHELASTIC_RESTART_COUNT` counts on
    each machine the failures of that machine.

    Rank 0 draws the number of the attempt, and all others join it. A number that they read may be of an attempt
    before, because this attempt's rank 0 has not come yet. Each rank joins an attempt once. So if it has joined that
    one, the number is old. If its predecessor ended before it joined, it joins an attempt that is over; that one is
    never complete, since its rank 0 is gone. Then the rank goes on looking for a newer number.

    This relies on launchers that end all ranks of an attempt before they start the next.

    Args:
        store: of all ranks of the job.
        rank: of this process.
        size: number of ranks.
        limit_s: seconds after which to give up.

    Returns:
        The number: the same on all ranks, and of no attempt before with as many ranks.

    Raises:
        NotJoined: some ranks have not joined in time.
    """
    joining = _Joining(dist.PrefixStore(f"fdp/{size} ranks", store), rank, size)
    begun_s = time.monotonic()
    warns_s = _WARNS_S
    while not joining.is_complete():
        waited_s = time.monotonic() - begun_s
        # None is missing where the last one joins just now: it only remains to be said that all are there.
        if (waited_s > limit_s or joining.is_given_up) and (missing := joining.give_up()):
            if rank == 0:
                time.sleep(max(_TELLS_S, 3 * _pause_s(size)))  # it may hold the store, in which others look
            raise NotJoined(missing, limit_s)
        if waited_s > warns_s and (missing := joining.missing()):
            warns_s *= 2
            text = ranks_text(missing)
            logger.warning("rank %d has waited %.0f seconds for %s to join the job", rank, waited_s, text)
        time.sleep(_pause_s(size))
    return joining.attempt


class _Joining:
    """One rank on its way into an attempt.

    Attributes:
        attempt: the number of the newest attempt that the rank knows of; 0 if there is none.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self.attempt, self._is_in = 0, False
        if rank == 0:
            self.attempt, self._is_in = store.add("attempts", 1), True
            store.set(f"{self.attempt}/joined/0", "")
            store.set("current", str(self.attempt))

    def is_complete(self) -> bool:
        """Whether all ranks have joined the attempt that this rank is in."""
        if self._rank == 0:
            self._store.add(f"{self.attempt}/looks", 1)
            if self._store.add(f"{self.attempt}/others", 0) < self._size - 1:
                return False
            self._store.set(f"{self.attempt}/complete", "")
            return True
        if self._store.check(["current"]):
            current = int(self._store.get("current"))
            if current != self.attempt:
                self.attempt = current
                is_first = self._store.add(f"{current}/joined/{self._rank}", 1) == 1
                self._is_in = is_first and not self._gave_up()
                if self._is_in:
                    self._store.add(f"{current}/others", 1)
        return self._is_in and bool(self._store.check([f"{self.attempt}/complete"]))

    @property
    def is_given_up(self) -> bool:
        """Whether rank 0 of the attempt that this rank is in has given up: those who wait on would find no store."""
        return self._rank != 0 and self._is_in and self._gave_up()

    def missing(self) -> tuple[int, ...]:
        """Which ranks have not joined: rank 0, as long as there is none in the attempt that this rank knows of."""
        if self._rank != 0 and not (self._is_in and self._has_rank_0()):
            gave_up = self._is_in and self._gave_up()
            return tuple(json.loads(self._store.get(f"{self.attempt}/missing"))) if gave_up else (0,)
        joined = [self._store.check([f"{self.attempt}/joined/{rank}"]) for rank in range(self._size)]
        return tuple(rank for rank, is_in in enumerate(joined) if not is_in)

    def give_up(self) -> tuple[int, ...]:
        """Which ranks have not joined; if rank 0 gives up, all that give up later say what it says."""
        missing = self.missing()
        if self._rank == 0 and missing:
            self._store.set(f"{self.attempt}/missing", json.dumps(missing))
        return missing

    def _gave_up(self) -> bool:
        """Whether rank 0 of the attempt waits no more."""
        return bool(self._store.check([f"{self.attempt}/missing"]))

    def _has_rank_0(self) -> bool:
        """Whether rank 0 of the attempt still looks around."""
        looks, end_s = self._store.add(f"{self.attempt}/looks", 0), time.monotonic() + _LOOKS_WITHIN_S
        while time.monotonic() < end_s and not self._gave_up():
            time.sleep(_pause_s(self._size))
            if self._store.add(f"{self.attempt}/looks", 0) > looks:
                return True
        return False


def _pause_s(size: int) -> float:
    return max(0.02, size / _CHECKS_PER_S)
