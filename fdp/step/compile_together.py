"""Compile on every rank at once: no rank waits for another's cache, and none sends before all are ready.

A rank that finds its program in the cache has it in a second, and one that does not may take minutes. Messages of the
first one would wait for the second until the process group's time limit. So ranks report through the store when they
are ready. The others keep giving signs of life, and are waited for as long as they do.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist

from fdp.distributed.exchange import ask, next_turn, timeout_s, wait_for_keys
from fdp.distributed.group import Group
from fdp.distributed.liveness.threads import start_thread
from fdp.errors import AgreementError, FdpError, PeerError, build_message, error_text

_BEAT_S = 1.0
_PATIENCE_S = 60.0
"""A rank that has given no sign for so long (or for the time limit of an agreement, if that is shorter) is gone."""

_LONG_S = 300.0
"""After so long a rank that waits for others says so."""

_Result = TypeVar("_Result")


def compile_together(name: str, group: Group, together: bool, compile: Callable[[], _Result]) -> _Result:
    """Compile on this rank while others do.

    Args:
        name: the user's function, for messages.
        group: the ranks.
        together: whether all ranks compile now; otherwise this rank alone does, and the others wait in their next
            message.
        compile: compiles.

    Returns:
        What `compile` returns.

    Raises:
        AgreementError: another rank could not compile the step.
        PeerError: another rank gave no more signs of life.
    """
    if group.size == 1 or not together:
        return compile()
    what = f"the store, for step {name!r}, which is compiled"
    store, turn = group.store(), next_turn(group, what)
    try:
        with _signs_of_life(store, f"{turn}/alive/{group.rank}"):
            result = compile()
    except Exception as error:
        failed = f"failed\n{type(error).__name__}: {error_text(error)}"
        with suppress(FdpError, RuntimeError, dist.DistError):  # the error that is being announced is the one to report
            ask(group, lambda: store.set(f"{turn}/ready/{group.rank}", failed), what)
        raise
    ask(group, lambda: store.set(f"{turn}/ready/{group.rank}", "ready"), what)
    _wait_for_others(name, group, store, turn)
    return result


@contextmanager
def _signs_of_life(store: Any, key: str) -> Iterator[None]:
    """Give signs of life in the store while the block runs."""
    ended = threading.Event()

    def count_up() -> None:
        while not ended.wait(_BEAT_S):
            try:
                store.add(key, 1)
            except (RuntimeError, dist.DistError):
                return  # the store is gone: what needs it next says so

    thread = start_thread(count_up, "signs of life")
    try:
        yield
    finally:
        ended.set()
        thread.join(_BEAT_S)  # it may be waiting for the store; the end of the process waits for it, too


def _wait_for_others(name: str, group: Group, store: Any, turn: str) -> None:
    patience_s = min(_PATIENCE_S, timeout_s())
    begun, warned = time.monotonic(), False
    seen: dict[int, tuple[int, float]] = {}
    missing = [rank for rank in range(group.size) if rank != group.rank]
    try:
        while missing:
            wait_for_keys(store, [f"{turn}/ready/{rank}" for rank in missing], min(_BEAT_S, patience_s), group)
            counts = ask(group, functools.partial(_signs, store, turn, missing))
            missing, now = list(counts), time.monotonic()
            for rank, count in counts.items():
                if rank not in seen or seen[rank][0] != count:
                    seen[rank] = (count, now)
            if now - begun > _LONG_S and missing and not warned:
                warned = True
                warnings.warn(
                    f"fdp: step {name!r} is compiled on rank {group.rank}, which has waited {_LONG_S:g} s for ranks "
                    f"{missing}; they are still compiling it.",
                    stacklevel=2,
                )
            gone = [rank for rank in missing if now - seen[rank][1] > patience_s]
            if gone:
                raise PeerError(
                    build_message(
                        f"step {name!r} is compiled on rank {group.rank}, and other ranks stopped while they were "
                        "compiling it.",
                        [f"rank {rank} gave no sign of life for {patience_s:g} s" for rank in gone],
                        remedy="look for the first error among the logs of all ranks.",
                    )
                )
    except (RuntimeError, dist.DistError) as error:
        if isinstance(error, PeerError):
            raise
        raise PeerError(
            build_message(
                f"step {name!r} on rank {group.rank} could not reach the rendezvous store to hear whether all ranks "
                "have compiled it.",
                [f"{type(error).__name__}: {error}".splitlines()[0]],
                remedy="look for the first error among the logs of all ranks: the process that holds the store has "
                "ended.",
            )
        ) from error
    names = [f"{turn}/ready/{rank}" for rank in range(group.size)]
    said = [text.decode().splitlines() for text in ask(group, lambda: [store.get(name) for name in names])]
    offenders = [f"rank {rank}: {lines[1]}" for rank, lines in enumerate(said) if lines[0] == "failed"]
    if offenders:
        raise AgreementError(
            build_message(
                f"step {name!r} was not compiled on every rank, so the ranks cannot run it together.",
                offenders,
                remedy="fix the error there; or compile=False on all ranks.",
            )
        )


def _signs(store: Any, turn: str, missing: list[int]) -> dict[int, int]:
    """By rank the signs of life so far, of those that are not ready."""
    waited_for = [rank for rank in missing if not store.check([f"{turn}/ready/{rank}"])]
    return {rank: store.add(f"{turn}/alive/{rank}", 0) for rank in waited_for}
