"""Ranks exchange values through the rendezvous store: without a collective, and within a time limit.

A thread asks the store, and not the one that waits. The process that holds the store may be stopped by a signal: then a
question to the store does not come back, and who asked could not look who is gone.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch.distributed as dist

from fdp.distributed.group import Group
from fdp.distributed.liveness.elsewhere import Elsewhere
from fdp.distributed.liveness.patience import explain
from fdp.distributed.sending import watch_over
from fdp.errors import AgreementError, PeerError, build_message, error_text


def timeout_s() -> float:
    """Seconds that ranks wait for each other in an exchange: FDP_AGREE_TIMEOUT_S, or 300."""
    return float(os.environ.get("FDP_AGREE_TIMEOUT_S", 300.0))


_ANNOUNCES_S = 5.0
"""So long a rank tries to tell others what they need not know."""

_ANSWERS_S = 2.0
"""So long the store may take to answer. Only then it is asked who is gone: a rank may leave when it has told its part,
and a busy store answers others later."""

_LONGEST_PAUSE_S = 0.05
"""From one look into the store to the next."""

Answer = TypeVar("Answer")


def ask(
    group: Group | None, question: Callable[[], Answer], what: str = "the store", limit_s: float | None = None
) -> Answer:
    """Ask the store something, and notice if the process that holds it is gone, or does not run.

    Args:
        group: the ranks of which one may hold it; None to look at none.
        question: asks it, and does not wait for other ranks.
        what: this rank waits in, for errors and warnings.
        limit_s: seconds to wait; None for as long as ranks wait for each other.

    Returns:
        What `question` returns.

    Raises:
        PeerError: another rank is gone.
        dist.DistStoreError: the store does not answer in time.
    """
    if sys.is_finalizing():  # no thread can start any more
        return question()
    answers: list[Answer] = []
    asking = Elsewhere(lambda: answers.append(question()), what, uses_device=False)
    limit_s = timeout_s() if limit_s is None else limit_s
    process_group = None if group is None else group.process_group
    if not (asking.comes(None, min(limit_s, _ANSWERS_S)) or asking.comes(process_group, limit_s)):
        raise dist.DistStoreError(f"the store did not answer within {limit_s:g} s")
    return answers[0]


def next_turn(group: Group, what: str = "the store") -> str:
    """A key for the next exchange: ranks that have exchanged equally often get the same one."""
    if group.process_group is None:
        return "one"
    watched = watch_over(group)
    # Counted in the store, so that a group made anew with a new store begins anew.
    turn = ask(group, functools.partial(group.store().add, f"fdp/turn/{group.name}/{group.rank}", 1), what)
    if watched is not None:
        watched.takes_turn(turn)
    return f"fdp/exchange/{group.name}/{turn}"


def exchange(
    group: Group, key: str, payload: bytes, timeout_s: float | None, looks: bool = True, what: str = "the store"
) -> list[bytes | None]:
    """Give every rank every other rank's bytes through the store, without a collective.

    Args:
        group: the ranks.
        key: the same on all ranks and never used before.
        payload: this rank's bytes.
        timeout_s: seconds to wait for the others, together; None to leave the payload and not wait.
        looks: whether it is an error if another rank is known to be gone.
        what: this rank waits in, for errors and warnings.

    Returns:
        One entry a rank; None for a rank that did not come in time.

    Raises:
        PeerError: another rank will not come.
    """
    watched = watch_over(group)
    if group.process_group is None:
        return [payload]
    store, among = group.store(), group if looks else None
    tell = functools.partial(store.set, f"{key}/{group.rank}", payload)  # type: ignore[arg-type]  # it takes bytes, too
    if timeout_s is None:
        ask(None, tell, what, _ANNOUNCES_S)
        return [payload]
    ask(among, tell, what, timeout_s)
    names = [f"{key}/{rank}" for rank in range(group.size)]
    with watched.in_exchange() if looks and watched is not None else nullcontext():
        came = wait_for_keys(store, names, timeout_s, among, what)
    if came:
        return ask(among, lambda: [store.get(name) for name in names], what, timeout_s)
    return ask(among, lambda: [store.get(name) if store.check([name]) else None for name in names], what, _ANNOUNCES_S)


def wait_for_keys(
    store: dist.Store, names: Sequence[str], timeout_s: float, group: Group | None = None, what: str = "the store"
) -> bool:
    """Wait until all of some keys are in a store; whether they came in time.

    By asking again and again: `store.wait` would keep other threads from the store of the process meanwhile, and they
    may be what other ranks are waiting for.

    Args:
        store: the store.
        names: of the keys.
        timeout_s: seconds to wait.
        group: the ranks that write them: it is an error if one of them is known to be gone. None to wait all the same.
        what: this rank waits in, for errors and warnings.

    Raises:
        PeerError: another rank will not come.
    """
    process_group, over = None if group is None else group.process_group, threading.Event()
    end_s, found = time.monotonic() + timeout_s, []

    def look() -> None:
        pause_s = 0.001
        while not (there := store.check(list(names))) and time.monotonic() < end_s and not over.wait(pause_s):
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        found.append(there or store.check(list(names)))

    looking = Elsewhere(look, what, uses_device=False)
    try:
        return looking.comes(process_group, timeout_s + _ANNOUNCES_S) and found[0]
    except PeerError:
        over.set()
        with suppress(RuntimeError, dist.DistError):
            if looking.comes(None, _ANSWERS_S) and found[0]:
                return True  # it had told its part
        raise
    except (RuntimeError, dist.DistError) as error:  # the store is gone, perhaps with the rank that held it
        if (explained := explain(process_group, what)) is not None:
            raise explained from error
        raise
    finally:
        over.set()


def all_say(group: Group, yes: bool, timeout_s: float = 300.0) -> bool:
    """Ask all ranks of a group for a yes or no, through the store; whether all said yes, in time."""
    if group.process_group is None or group.size == 1:
        return yes
    return exchange(group, next_turn(group), b"yes" if yes else b"no", timeout_s) == [b"yes"] * group.size


_KNOWN = "_fdp_known_to_all"
"""The attribute of an error that all ranks know of."""


@contextmanager
def known_to_all() -> Iterator[None]:
    """Mark errors of the block: they follow from what all ranks have told, so all ranks raise one, and none waits."""
    try:
        yield
    except Exception as error:
        setattr(error, _KNOWN, True)
        raise


def announce_failure(group: Group, error: Exception) -> None:
    """Report to waiting ranks that this one has no plan to compare; never raises and never waits.

    No rank waits for an error that is known to all. To announce it would take a turn, which the others do not take.
    """
    if getattr(error, _KNOWN, False):
        return
    text = f"{type(error).__name__}: {error_text(error)}"
    try:
        turn = next_turn(group)
        exchange(group, turn, json.dumps({"failed": text}).encode(), timeout_s=None)
    except Exception:  # the error that is being announced is the one to report
        return


def come_together(group: Group, subject: str, news: str, also: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Wait until all ranks are about to do the same thing, before messages are sent that only belong to it.

    Args:
        group: the ranks.
        subject: what it is about, the same on every rank, such as "step 'train'".
        news: what is to happen to it, likewise, such as "is to be profiled".
        also: what this rank has to tell besides; made of what JSON knows.

    Returns:
        The text of each rank, in rank order.

    Raises:
        AgreementError: another rank does something else, or did not come in time.
        PeerError: the store cannot be reached.
    """
    own = f"{subject} {news}"
    found = tell_all(group, {**(also or {}), "schedule": own, "marks": {}}, subject, news)
    _refuse_others(group, own, [rank for rank, other in enumerate(found) if other.get("schedule") != own], found)
    return found


def _refuse_others(group: Group, own: str, ranks: Sequence[int], found: Sequence[dict[str, Any]]) -> None:
    """Refuse that some ranks do something else than this one; `found` is what each has told."""
    others = []
    for rank in ranks:
        what = found[rank].get("failed") or str(found[rank].get("schedule", "something else")).partition("\n")[0]
        others.append(f"rank {rank}: {what}")
    if others:
        raise AgreementError(
            build_message(
                f"{own} on rank {group.rank}, and other ranks are about to do something else, or failed.",
                others,
                remedy="call the same functions in the same order on every rank.",
            )
        )


def tell_all(group: Group, own: dict[str, Any], subject: str, news: str) -> list[dict[str, Any]]:
    """Exchange a value with every rank through the store; returns all values in rank order.

    A rank that could not get so far has only "failed" to tell, and why. Who tells a "schedule" looks at that itself.

    Args:
        group: the ranks.
        own: what this rank tells; made of what JSON knows.
        subject: what it is about, such as "step 'train'".
        news: what is the matter with it.

    Raises:
        AgreementError: another rank did not come in time, or has come for something else, or failed.
        PeerError: the store cannot be reached.
    """
    return tell_all_once(group, own, subject, news)[1]


def tell_all_once(group: Group, own: dict[str, Any], subject: str, news: str) -> tuple[int, list[dict[str, Any]]]:
    """As `tell_all`; also a number for this exchange, which is the same on all ranks and no other exchange's."""
    limit, what = timeout_s(), f"the store, for {subject}"
    try:
        turn = next_turn(group, what)
        found = exchange(group, turn, json.dumps(own).encode(), limit, what=what)
    except (RuntimeError, dist.DistError) as error:
        if (explained := explain(group.process_group, what)) is not None:
            raise explained from error
        raise PeerError(
            build_message(
                f"{subject} on rank {group.rank} could not reach the rendezvous store.",
                [f"{type(error).__name__}: {error}".splitlines()[0]],
                remedy="look for the first error among the logs of all ranks: the process that holds the store "
                "(without torchrun that is rank 0) has ended.",
            )
        ) from error
    missing = [rank for rank, payload in enumerate(found) if payload is None]
    if missing:
        raise AgreementError(
            build_message(
                f"{subject} {news} on rank {group.rank}, and other ranks did not come to compare theirs within "
                f"{limit:g} s.",
                [f"rank {rank} did not come" for rank in missing],
                remedy="call the same functions the same number of times on every rank, steps with arguments of the "
                "same structure; if tracing takes that long, raise FDP_AGREE_TIMEOUT_S.",
            )
        )
    told = [json.loads(payload) for payload in found if payload is not None]
    compared = {"schedule", "failed"} if "schedule" in own else set()
    # After an error on one rank alone, that one may be in its next exchange already, of another kind.
    elsewhere = [rank for rank, each in enumerate(told) if not (own.keys() <= each.keys() or compared & each.keys())]
    with known_to_all():
        _refuse_others(group, f"{subject} {news}", elsewhere, told)
    return _number_of(turn), told


def _number_of(turn: str) -> int:
    """The number in a key that `next_turn` made."""
    last = turn.rpartition("/")[2]
    return int(last) if last.isdigit() else 0
