"""What a rank that waits says, on a signal and in its log; and what ends the messages of a device."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

import fdp
from fdp.distributed.exchange import tell_all
from fdp.distributed.group import resolve_group
from fdp.distributed.liveness import once_a_second, patience, watched
from fdp.distributed.liveness.elsewhere import Elsewhere
from fdp.distributed.liveness.fault import Fault, order_by_cause
from fdp.distributed.liveness.on_signal import where
from fdp.distributed.liveness.watch import liveness_s
from fdp.distributed.liveness.watched import age


def waits_for_the_other() -> tuple[list[tuple[str, str]], str]:
    """Rank 1 sleeps between two calls; what rank 0 logs meanwhile, and what it would print."""
    patience._WARNS_S = 2.0
    os.environ["FDP_LIVENESS_S"] = "1.0"
    logged: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("fdp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    printed: list[str] = []

    def train(w: Any, batch: Any) -> Any:
        _, grads = fdp.value_and_grad(lambda w: (w["layer"] * batch).sum())(w)
        return {"layer": w["layer"] - grads["layer"]}

    step, w = fdp.data_parallel(train), {"layer": torch.ones(2)}
    try:
        for call in range(3):
            if call == 2 and dist.get_rank() == 1:
                time.sleep(4)
            if call == 2:
                del logged[:]  # of the first call's stages
                timer = threading.Timer(3.0, lambda: printed.append(where()))
                timer.start()
            w = step(w, torch.ones(2))
    finally:
        logger.removeHandler(handler)
        del os.environ["FDP_LIVENESS_S"]
    timer.join()
    return logged, printed[0]


def test_who_is_waited_for_is_said_in_the_log_and_on_a_signal() -> None:
    env = {"FDP_LIVENESS_S": "1"}
    (logged, printed), (silence, other) = (
        outcome.value for outcome in ranks.run_fresh(2, waits_for_the_other, env=env, deadline_s=60)
    )
    assert [level for level, _ in logged][:2] == ["INFO", "WARNING"], logged
    message = logged[1][1]
    assert "rank 0 has waited for 2 s in the mean of bucket 0: w['layer'], in call 3 of step 'train'." in message
    assert "Not waiting: rank 1, for " in message
    assert "in its own code, after call 2 of step 'train'" in message
    assert silence == []
    assert "fdp: rank 0 of 2 is in call 3 of step 'train'." in printed
    assert "s for the mean of bucket 0: w['layer']" in printed
    assert "rank 1 is not waiting: for " in printed
    assert other.startswith("fdp: rank 1 of 2 is in its own code, after call 3")


def asks_by_signal(taken: bool) -> tuple[bool, str]:
    import contextlib
    import io

    if taken:
        signal.signal(signal.SIGUSR1, lambda *_: None)
    else:
        import faulthandler

        faulthandler.unregister(signal.SIGUSR1)  # the harness's own
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    mine = signal.getsignal(signal.SIGUSR1)
    fdp.psum(torch.ones(1))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
    return signal.getsignal(signal.SIGUSR1) is mine, said.getvalue()


@pytest.mark.parametrize("taken", [True, False])
def test_the_signal_prints_unless_a_program_has_taken_it(taken: bool) -> None:
    for rank, outcome in enumerate(ranks.run_fresh(2, asks_by_signal, taken, deadline_s=60)):
        assert outcome.ok, outcome.describe()
        kept, said = outcome.value
        assert kept is taken
        assert said.startswith("" if taken else f"fdp: rank {rank} of 2 is in its own code")
        assert bool(said) is not taken


class Group:
    """What can be aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


class Watched:
    """Ranks with some faults."""

    def __init__(self) -> None:
        self.found: list[Fault] = []
        self.monitor = type("Monitor", (), {"closing": threading.Event()})()

    def faults(self, believing: bool) -> list[Fault]:
        return self.found

    faults_begun = faults


@pytest.fixture
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once_a_second, "_thread", None)
    monkeypatch.setattr(once_a_second, "_looked", [])
    monkeypatch.setattr(once_a_second, "_LOOKS_S", 0.01)
    monkeypatch.setattr(once_a_second, "_GIVES_UP_S", 0.05)


def there(group: Any) -> bool:
    return False


def test_messages_of_a_device_are_ended_when_a_rank_is_gone_for_good(looking_often: None) -> None:
    group, other, watched = Group(), Group(), Watched()
    once_a_second.look_after(group, watched, there, True)  # type: ignore[arg-type]
    once_a_second.look_after(other, watched, there, False)  # type: ignore[arg-type]
    assert not group.aborted.wait(0.3)
    watched.found = [Fault(1, "died")]
    assert group.aborted.wait(5)
    assert not other.aborted.is_set()
    watched.monitor.closing.set()


def test_a_group_is_left_when_it_is_destroyed_and_forgotten_when_it_is_gone(
    looking_often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, destroyed, kept, watched = threading.Event(), threading.Event(), Group(), Watched()
    monkeypatch.setattr(once_a_second, "leave", lambda watched: left.set())
    thread = once_a_second.look_after(kept, watched, lambda group: destroyed.is_set(), False)  # type: ignore[arg-type]
    once_a_second.look_after(Group(), watched, there, False)  # type: ignore[arg-type]
    assert not left.wait(0.1)
    destroyed.set()
    assert left.wait(5)
    until_s = time.monotonic() + 5
    while once_a_second._looked and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not once_a_second._looked
    watched.monitor.closing.set()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("calling", "call", "counts"), [(None, 3, True), (None, 4, False), (4, 4, True), (4, 5, False), (4, None, True)]
)
def test_a_device_may_wait_in_each_call_that_has_begun(calling: int | None, call: int | None, counts: bool) -> None:
    found = watched.Watched("g", 0, 2, None, calls=3, calling=calling)  # type: ignore[arg-type]
    found._read = lambda: {"story": [Fault(1, "raised", "ValueError", call=call).as_json()]}  # type: ignore[method-assign]
    assert [fault.rank for fault in found.faults_begun(believing=False)] == ([1] if counts else [])


class Looking(Watched):
    """A rank that waits, in call 5 of its step."""

    rank, size, number, calling, step, awaited, is_calling_here = 0, 3, 5, 5, "train", None, True

    def __init__(self, *found: Fault) -> None:
        self.found = list(found)

    def faults(self, believing: bool) -> list[Fault]:
        return [fault for fault in self.found if believing or not fault.suspected]

    def busy(self) -> list[Any]:
        return []

    def unreached(self) -> list[Any]:
        return []

    def mismatch(self) -> list[Any]:
        return []

    def tell_place(self, message: int, what: str) -> None:
        pass


@pytest.mark.parametrize(
    ("fault", "raises_after_s"),
    [
        (Fault(1, "died"), 0.5),
        (Fault(1, "raised", "ValueError", call=5), 1.5),  # here, too, the error may be about to be raised
        (Fault(1, "died", suspected=True), 2.5),
        (Fault(1, "frozen"), 6.0),  # of a job that was stopped as a whole it may be out of date
    ],
)
def test_what_is_less_certain_is_believed_later(
    fault: Fault, raises_after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(patience.time, "monotonic", lambda: now_s)
    waiting = patience.Patience(Looking(fault), "a message")  # type: ignore[arg-type]
    raised_s = None
    while raised_s is None and now_s < 120:
        now_s += 0.25
        try:
            waiting.look()
        except fdp.PeerError as error:
            raised_s = now_s - 100
            assert (error.ranks, error.reason, error.call) == ((1,), fault.reason, 5)
    assert raised_s == pytest.approx(raises_after_s, abs=0.3)


class Late:
    """A message that comes just after a piece of the wait has run out, before that is known."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.error = error

    def wait(self, timeout: Any = None) -> None:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return True


def test_a_message_that_came_a_little_late_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "watched_ranks", lambda group: Looking())
    monkeypatch.setattr(patience, "_EXPLAINS_S", 0.2)
    patience.finish(Late(), None)
    with pytest.raises(RuntimeError, match="closed by peer"):
        patience.finish(Late(RuntimeError("connection closed by peer")), None)


def test_who_has_left_after_this_call_may_still_have_sent_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(patience.time, "monotonic", lambda: now_s)
    waiting = patience.Patience(Looking(Fault(1, "left", calls=5)), "a message")  # type: ignore[arg-type]
    for _ in range(36):
        now_s += 0.25
        waiting.look()
    with pytest.raises(fdp.PeerError):
        for _ in range(12):
            now_s += 0.25
            waiting.look()


@pytest.mark.parametrize("cause", [Fault(1, "frozen"), Fault(1, "left", calls=5)])
def test_who_left_for_want_of_another_is_not_what_the_wait_fails_for(
    monkeypatch: pytest.MonkeyPatch, cause: Fault
) -> None:
    """Rank 2 began to wait later than rank 0, which has given up on rank 1 already."""
    now_s = 100.0
    monkeypatch.setattr(patience.time, "monotonic", lambda: now_s)
    waiting = patience.Patience(Looking(cause, Fault(0, "left", because=((1, cause.reason),))), "a message")  # type: ignore[arg-type]
    with pytest.raises(fdp.PeerError) as caught:
        for _ in range(4):
            now_s += 0.25
            waiting.look()
    assert (caught.value.ranks, caught.value.reason) == ((1,), cause.reason)


def test_what_a_suspicion_led_to_is_said_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable, left = Fault(1, "unreachable", suspected=True), Fault(0, "left", because=((1, "unreachable"),))
    told = [unreachable, left, Fault(3, "died", suspected=True)]
    news = {"story": [fault.as_json() for fault in told]}
    monkeypatch.setattr(watched.Watched, "_read", lambda _: news)
    monkeypatch.setattr(watched.Watched, "has_news", True)
    monkeypatch.setattr(patience, "warn_of_unreached", lambda _: None)
    suspecting, suspected = (watched.Watched("g", rank, 4, None) for rank in (2, 1))  # type: ignore[arg-type]
    assert [fault.rank for fault in suspecting.faults(believing=False)] == [1, 0]
    assert [fault.rank for fault in suspected.faults(believing=False)] == [0]
    with pytest.raises(fdp.PeerError, match="rank 1 cannot be reached"):
        patience.refuse_gone(suspecting)


@pytest.mark.parametrize("since", [[], [Fault(1, "died", after_s=0.9)]], ids=["taken back", "killed"])
def test_who_left_for_a_frozen_rank_is_not_blamed_when_that_one_is_killed(
    monkeypatch: pytest.MonkeyPatch, since: list[Fault]
) -> None:
    """The rank is not frozen any more: that is taken back, and its death is noticed later than that the other left."""
    left = Fault(0, "left", after_s=0.5, because=((1, "frozen"),))
    monkeypatch.setattr(watched.Watched, "_read", lambda _: {"story": [f.as_json() for f in [left, *since]]})
    found = watched.Watched("g", 2, 3, None).faults(believing=True)  # type: ignore[arg-type]
    error = patience.peer_error(Looking(*found), found, "a message")  # type: ignore[arg-type]
    assert (error.ranks, error.reason) == ((1,), "died" if since else "frozen")


def test_ranks_that_left_for_each_other_are_both_named() -> None:
    story = [Fault(0, "left", because=((1, "left"),)), Fault(1, "left", because=((0, "left"),))]
    assert [fault.rank for fault in order_by_cause(story)] == [1, 0]
    assert patience.peer_error(Looking(), story, "a message").ranks == (0, 1)  # type: ignore[arg-type]


def test_who_was_stopped_itself_looks_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(patience.time, "monotonic", lambda: now_s)
    watched = Looking()
    waiting = patience.Patience(watched, "a message")  # type: ignore[arg-type]
    for _ in range(40):
        now_s += 0.25
        waiting.look()
    now_s += 600  # all ranks were stopped; what is known of the other one is of that time
    watched.found = [Fault(1, "frozen")]
    for _ in range(8):
        waiting.look()
        now_s += 0.25
    watched.found = []
    waiting.look()


def test_those_that_go_later_are_not_named_for_the_first() -> None:
    found = [
        Fault(2, "died"),
        Fault(1, "died", after_s=0.1),
        Fault(0, "left", after_s=0.1),
        Fault(3, "died", after_s=1.0),
    ]
    error = patience.peer_error(Looking(), found, "a message")  # type: ignore[arg-type]
    assert (error.ranks, error.reason) == ((1, 2), "died")
    found = [Fault(rank, "unreachable", suspected=True, after_s=rank) for rank in (1, 2)]
    assert patience.peer_error(Looking(), found, "a message").ranks == (1, 2)  # type: ignore[arg-type]


def compares_with_who_comes_late() -> list[str]:
    """Rank 1 comes late to an exchange through the store; what rank 0 logs meanwhile."""
    os.environ["FDP_LIVENESS_S"] = "1.0"
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fdp").addHandler(handler)
    logging.getLogger("fdp").setLevel(logging.INFO)
    if dist.get_rank() == 1:
        time.sleep(3)
    tell_all(resolve_group(), {}, "CheckpointManager.restore", "was called")
    return logged


def test_who_waits_in_the_store_says_for_what() -> None:
    outcomes = ranks.run_fresh(2, compares_with_who_comes_late, deadline_s=60)
    assert any("in the store, for CheckpointManager.restore." in line for line in outcomes[0].value), outcomes


@pytest.mark.parametrize("text", ["inf", "1e999", "nan", "-1", "-0.5", "0.01", "soon", ""])
def test_a_number_of_seconds_that_makes_no_sense_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDP_LIVENESS_S", text)
    with pytest.raises(fdp.ArgumentError, match=rf"FDP_LIVENESS_S='{text}'.\nRemedy: set it to a finite number"):
        liveness_s()


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("2.5", 2.5), ("1e6", 1e6)])
def test_other_numbers_of_seconds_are_taken(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDP_LIVENESS_S", text)
    assert liveness_s() == seconds


def test_a_process_without_threads_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It read as a store that cannot be reached."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(fdp.FdpError, match="can start no more threads, and waiting in the store needs one"):
        Elsewhere(lambda: None, "the store")


def test_seconds_in_words() -> None:
    assert [age(seconds) for seconds in (0.4, 119, 3661)] == ["0 s", "119 s", "61 min 1 s"]
