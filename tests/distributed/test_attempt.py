"""Ranks that are started again meet in a store that has outlived earlier attempts."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fdp.distributed import attempt as attempts
from fdp.distributed.attempt import NotJoined, join_attempt


class Dies(Exception):
    """A rank ends here."""


class Mortal(dist.Store):  # type: ignore[name-defined]
    """A store that a rank may use so many times before it dies."""

    def __init__(self, store: Any, uses: int | None, killed: threading.Event) -> None:
        super().__init__()
        self._store, self._uses, self._killed = store, uses, killed

    def _use(self) -> Any:
        if self._uses == 0 or self._killed.is_set():
            self._killed.set()  # the launcher ends the others
            raise Dies
        self._uses = None if self._uses is None else self._uses - 1
        return self._store

    def add(self, key: str, amount: int) -> int:
        return int(self._use().add(key, amount))

    def set(self, key: str, value: str) -> None:
        self._use().set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._use().get(key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._use().check(keys))


def attempt_of(store: Any, uses: list[int | None]) -> list[int | None]:
    """For each rank of one attempt the number that it has joined; None if it died before."""
    killed = threading.Event()
    found: list[int | None] = [None] * len(uses)

    def run(rank: int) -> None:
        with contextlib.suppress(Dies):
            found[rank] = join_attempt(Mortal(store, uses[rank], killed), rank, len(uses), 60.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(uses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_pause_s", lambda size: 0.001)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.one_of(st.none(), st.integers(0, 8)), min_size=1, max_size=4), max_size=5), st.data())
def test_all_ranks_of_an_attempt_join_it_and_no_earlier_one(uses: list[list[int | None]], data: st.DataObject) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    earlier: set[tuple[int, int]] = set()
    sizes = [len(each) for each in uses]
    for each in [*uses, [None] * data.draw(st.sampled_from(sizes or [3]))]:
        found = attempt_of(store, each)
        joined = {(len(each), number) for number in found if number is not None}
        assert len(joined) <= 1
        assert not joined & earlier
        if all(number is None for number in each):
            assert None not in found
        earlier |= joined


def test_who_is_missing_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_WARNS_S", 0.1)
    store = dist.HashStore()  # type: ignore[attr-defined]
    found: dict[int, NotJoined] = {}

    def run(rank: int) -> None:
        with pytest.raises(NotJoined) as error:
            join_attempt(store, rank, 4, 0.5)
        found[rank] = error.value

    for ranks, missing in (((1, 2), (0,)), ((0, 2), (1, 3)), ((1, 3), (0,))):
        found.clear()
        threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
        with caplog.at_level(logging.WARNING, "fdp"):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert {rank: error.ranks for rank, error in found.items()} == dict.fromkeys(ranks, missing)
    assert "rank 2 has waited 0 seconds for ranks 1 and 3 to join the job" in caplog.text


class JoinsAtTheLastMoment(Mortal):
    """A store through which rank 1 joins as soon as rank 0 looks who is missing."""

    def check(self, keys: list[str]) -> bool:
        store = self._use()
        if keys == ["fdp/2 ranks/1/joined/1"] and not store.check(keys):
            store.add(keys[0], 1)
            store.add("fdp/2 ranks/1/others", 1)
        return bool(store.check(keys))


def test_a_rank_that_joins_at_the_last_moment_is_not_missing() -> None:
    store = JoinsAtTheLastMoment(dist.HashStore(), None, threading.Event())  # type: ignore[attr-defined]
    assert join_attempt(store, 0, 2, 0.05) == 1
