"""Connections between monitors that end are made again, and nothing is lost; who has really ended is known at once."""

from __future__ import annotations

import contextlib
import itertools
import random
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from monitors import Watching, Wire, framed, until, watching
from samples import ALL_SAMPLES, exhaustive

from fdp.distributed.liveness import connections as liveness_connections
from fdp.distributed.liveness.connections import Connections, WatchedGroup
from fdp.distributed.liveness.fault import Fault
from fdp.distributed.liveness.links import MonitorLink
from fdp.distributed.liveness.neighbour import Neighbour
from fdp.distributed.liveness.session import Session
from fdp.distributed.liveness.tree import Node


@pytest.fixture
def pair() -> Iterator[tuple[Watching, Watching, Wire]]:
    """A parent and its child, which connects by way of a wire."""
    with watching(2) as (parent, child), Wire(parent.monitor.port) as wire:
        child.meets(parent, wire.port)
        parent.meets(child)
        assert until(lambda: 0 in child.links() and 1 in parent.links())
        yield parent, child, wire


def test_a_connection_that_is_reset_is_made_again_and_no_rank_is_suspected(
    pair: tuple[Watching, Watching, Wire],
) -> None:
    parent, child, wire = pair
    for _ in range(5):
        before = child.links()
        wire.reset()
        assert until(lambda: child.links() not in ({}, before) and bool(parent.links()))  # noqa: B023
        assert parent.faults() == child.faults() == []
        time.sleep(0.3)
    child.process.kill()
    assert until(lambda: parent.faults() == [(1, "died", False)], 2.0)


def test_what_was_said_while_there_was_no_connection_arrives(pair: tuple[Watching, Watching, Wire]) -> None:
    parent, child, wire = pair
    wire.is_closed = True
    wire.reset()
    assert until(lambda: child.links() == {})
    child.command(do="raised", group="g", text="KeyError: 'w'", call=7, attempt=1)
    time.sleep(0.5)
    assert parent.faults() == child.faults() == []  # neither leads: the other one is not lost yet
    wire.is_closed = False
    wire.reset()
    assert until(lambda: parent.faults() == child.faults() == [(1, "raised", False)])
    wire.is_closed = True
    wire.reset()
    child.command(do="clear", group="g")
    wire.is_closed = False
    wire.reset()
    assert until(lambda: parent.faults() == child.faults() == [])


def test_a_rank_that_is_killed_while_there_is_no_connection_is_named(pair: tuple[Watching, Watching, Wire]) -> None:
    parent, child, wire = pair
    wire.is_closed = True
    wire.reset()
    child.process.kill()
    time.sleep(0.5)
    wire.is_closed = False
    wire.reset()
    assert until(lambda: parent.faults() == [(1, "died", False)], 3.0)


def test_what_cannot_be_reached_again_is_lost_and_well_when_it_is_there(
    pair: tuple[Watching, Watching, Wire],
) -> None:
    parent, child, wire = pair
    child.meets(parent, wire.port)
    parent.command(do="neighbour", group="g", rank=1, addresses=["127.0.0.1"], port=wire.port, token="", host="here")
    wire.is_closed = True
    wire.reset()
    reset_s = time.monotonic()
    assert until(lambda: parent.faults() == [(1, "unreachable", True)] and child.faults() == [(0, "unreachable", True)])
    assert 2.0 < time.monotonic() - reset_s < 7.0  # the monitors' patience is 4 s
    wire.is_closed = False
    wire.reset()
    assert until(lambda: parent.faults() == child.faults() == [], 15.0)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_monitor_that_has_ended_is_known_at_once(victim: int) -> None:
    """Its port refuses connections: both sides ask, the parent as well."""
    with watching(2, liveness_s=60.0) as both:
        both[1].meets(both[0])
        both[0].meets(both[1])
        assert until(lambda: bool(both[0].links() and both[1].links()))
        both[victim].vanish()
        assert until(lambda: both[1 - victim].faults() == [(victim, "died", True)], 2.0)


def test_a_parent_connects_to_a_child_that_does_not_come() -> None:
    """It died before it knew where the parent is: its monitor knows what became of it."""
    with watching(2) as (parent, child):
        child.process.kill()
        parent.meets(child)
        assert until(lambda: parent.faults() == [(1, "died", False)], 3.0)


def test_a_connection_that_is_dead_without_a_word_is_made_again(pair: tuple[Watching, Watching, Wire]) -> None:
    """As when a machine between two forgets it: what is sent vanishes."""
    parent, child, wire = pair
    for _ in range(2 if ALL_SAMPLES else 1):
        before = child.links()
        wire.swallow()
        assert until(lambda: child.links() not in ({}, before))  # noqa: B023
        assert parent.faults() == child.faults() == []
    time.sleep(4.5)
    assert parent.faults() == child.faults() == []


def test_a_new_connection_is_a_sign_of_life() -> None:
    """Of a child that says nothing else, and connects again before it counts as silent."""
    with watching(2, liveness_s=1.5) as (parent, _):
        session = Session()
        for _ in range(5):
            link = MonitorLink(socket.create_connection(("127.0.0.1", parent.monitor.port)))
            hello = {"group": "g", "rank": 1, "token": parent.monitor.token, "host": "here", "liveness_s": 4.0}
            link.send({**hello, "received": session.received})
            link.flush()
            end_s = time.monotonic() + 0.8
            while time.monotonic() < end_s:
                for message in link.receive():
                    assert "host" in message or session.take(message)
                time.sleep(0.02)
            link.close()
            assert parent.faults() == []
        assert session.received > 0


@pytest.mark.parametrize("patience_s", [(0.8, 60.0), pytest.param((60.0, 0.8), marks=exhaustive)])
def test_who_is_less_patient_hears_of_the_other_often_enough(patience_s: tuple[float, float]) -> None:
    """A beat is a part of the time after which the other one gives up, and not of its own alone."""
    parent, child = (Watching(rank, 2, liveness_s=seconds) for rank, seconds in enumerate(patience_s))
    try:
        child.meets(parent)
        assert until(lambda: 0 in child.links() and 1 in parent.links())
        before, end_s = child.links(), time.monotonic() + 3.0
        while time.monotonic() < end_s:
            assert parent.faults() == child.faults() == []
            time.sleep(0.05)
        assert child.links() == before  # nor was the connection taken for dead
    finally:
        child.end()
        parent.end()


def test_who_never_answers_is_reported_and_not_suspected() -> None:
    """Behind a firewall: all messages may come through, and nothing is wrong with the rank."""
    with watching(2, liveness_s=1.0) as (parent, child), Wire(parent.monitor.port) as wire:
        wire.is_closed = True
        parent.host = "there"
        child.meets(parent, wire.port)
        assert until(lambda: child.news()["unreached"] != [], 15.0)
        assert child.news()["unreached"] == [[0, f"127.0.0.1:{wire.port}", "it did not answer"]]
        assert child.faults() == []
        wire.is_closed = False
        wire.reset()
        assert until(lambda: child.news()["unreached"] == [] and child.links() != {}, 15.0)


def test_who_says_goodbye_is_not_looked_for() -> None:
    with watching(2) as (parent, child):
        child.meets(parent)
        assert until(lambda: bool(child.links()))
        child.command(do="leave", group="g", reason="left", text="it is done", calls={}, because={})
        assert until(lambda: parent.faults() == [(1, "left", False)])
        assert until(lambda: parent.links() == {}, 5.0)
        assert parent.monitor._groups["g"].neighbours[1].over
        parent.process.send_signal(signal.SIGKILL)
        parent.thread.join(5)
        assert not parent.thread.is_alive()


@exhaustive
def test_monitors_wake_up_seldom(pair: tuple[Watching, Watching, Wire]) -> None:
    """Also one that looks for another one in vain: a beat is 0.8 s."""
    parent, child, wire = pair
    wakes = dict.fromkeys((parent, child), 0)
    for each in (parent, child):

        def work(now_s: float, each: Watching = each, before: Callable[[float], None] = each.monitor._work) -> None:
            wakes[each] += 1
            before(now_s)

        each.monitor._work = work  # type: ignore[method-assign]
    time.sleep(4.0)
    assert all(1 <= count <= 20 for count in wakes.values()), wakes
    parent.command(do="neighbour", group="g", rank=1, addresses=["127.0.0.1"], port=wire.port, token="", host="here")
    wire.is_closed = True
    wire.reset()
    wakes.update(dict.fromkeys(wakes, 0))
    time.sleep(6.0)
    assert all(count <= 60 for count in wakes.values()), wakes


@given(st.integers(0, 2**32))
def test_all_messages_of_a_session_arrive_once_and_in_order(seed: int) -> None:
    """Over connections that end at any moment, with what is under way in them, in both directions."""
    draw = random.Random(seed)
    ends, said, heard = (Session(), Session()), ([], []), ([], [])  # type: ignore[var-annotated]
    wires: tuple[list[dict[str, int]], list[dict[str, int]]] = ([], [])
    for step in range(draw.randint(1, 120)):
        side = draw.randrange(2)
        action = draw.random()
        if action < 0.5:
            said[side].append(step)
            wires[side].append(ends[side].say({"step": step}))
        elif action < 0.9 and wires[side]:
            message = wires[side].pop(0)
            if ends[1 - side].take(message):
                heard[1 - side].append(message["step"])
        elif action >= 0.9:
            for one in (0, 1):
                wires[one][:], is_all = ends[one].resume(ends[1 - one].received)
                assert is_all
    for one in (0, 1):
        wires[one][:], _ = ends[one].resume(ends[1 - one].received)
        heard[1 - one].extend(message["step"] for message in wires[one] if ends[1 - one].take(message))
    assert heard == (said[1], said[0])


def test_a_session_keeps_a_bounded_number_and_says_when_some_are_lost() -> None:
    one = Session()
    for number in range(5000):
        one.say({"n": number})
    kept, is_all = one.resume(10)
    assert len(kept) == 4096
    assert not is_all
    assert one.resume(4999)[1]
    assert one.resume(5000) == ([], True)
    with pytest.raises(ValueError, match="session"):
        one.take({"report": {}})


def test_one_whose_patience_is_of_years_watches() -> None:
    with watching(2, liveness_s=1e300) as (parent, child):
        child.meets(parent)
        parent.meets(child)
        assert until(lambda: 0 in child.links() and 1 in parent.links())
        child.process.kill()
        assert until(lambda: parent.faults() == [(1, "died", False)])


def test_only_where_a_monitor_was_does_a_refusal_show_its_end() -> None:
    refused = ConnectionRefusedError()
    other = Neighbour(1, is_child=True)
    other.is_at(["10.0.0.1", "172.17.0.1"], 1234, "token", is_here=False, now_s=0.0)
    assert not other.shows_end("10.0.0.1", refused)  # perhaps a firewall
    other.came_from("::ffff:10.0.0.1")
    other.met = True
    assert other.shows_end("10.0.0.1", refused)
    assert not other.shows_end("10.0.0.1", TimeoutError())
    assert not other.shows_end("172.17.0.1", refused)  # perhaps a bridge of this machine
    here = Neighbour(1, is_child=True)
    here.is_at([], 1234, "token", is_here=True, now_s=0.0)
    assert here.where() == "127.0.0.1:1234"
    assert here.shows_end("127.0.0.1", refused)


def test_what_is_said_last_is_read_by_one_that_gets_no_processor() -> None:
    """The other monitor writes and does not read, as where a machine is busy, until this one has said goodbye."""
    with contextlib.ExitStack() as stack:
        dying, listening = Watching(1, 2), socket.create_server(("127.0.0.1", 0))
        stack.callback(dying.end)
        stack.enter_context(listening)
        address, port = ["127.0.0.1"], listening.getsockname()[1]
        dying.command(do="neighbour", group="g", rank=0, addresses=address, port=port, token="t", host="here")
        other, _ = listening.accept()
        stack.enter_context(other)
        other.sendall(framed({"host": "here", "liveness_s": 60.0, "received": 0}))
        assert until(lambda: dying.links() != {})
        dying.process.kill()
        dying.process.wait()
        links = dying.monitor._groups["g"].neighbours
        numbers, said = itertools.count(1), b""
        with contextlib.suppress(ConnectionError):
            while links[0].link is not None:  # something has always arrived that it has not read
                other.sendall(framed({"busy": [], "number": next(numbers), "received": 0}))
        with contextlib.suppress(ConnectionError):
            while found := other.recv(2**16):
                said += found
        assert b'"died"' in said and b'"bye"' in said, said
        assert dying.thread.is_alive()  # it waits for this end to be closed
        other.close()
        assert until(lambda: not dying.thread.is_alive())


class OneChild:
    """A monitor's connections, to one child that is there and has a socket of its own.

    Args:
        full: whether nothing more can be sent at first.
    """

    def __init__(self, full: bool = False) -> None:
        self.selector = selectors.DefaultSelector()
        self.connections = Connections(self.selector, 10.0, False, "here")
        self.group = self.connections.groups["g"] = WatchedGroup(Node(0, 2, "here", 10.0, 0.0))
        own, self.other = socket.socketpair()
        own.setblocking(False)
        if full:
            with contextlib.suppress(BlockingIOError):
                while True:
                    own.send(bytes(2**16))
        child = self.group.neighbours[1]
        child.link, child.met = MonitorLink(own), True
        self.selector.register(own, selectors.EVENT_READ, lambda: self.connections._read(self.group, child, child.link))

    def __enter__(self) -> OneChild:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()
        self.other.close()

    def answer(self) -> None:
        """Do what the selector asks for."""
        for key, _ in self.selector.select(0):
            key.data()


def test_a_connection_that_has_ended_is_read_to_its_end() -> None:
    """This monitor writes first, and cannot: what the other one said before it ended counts all the same."""
    with OneChild() as parent:
        parent.group.node.connected(1, "here", 0.0)
        report = {"report": Fault(1, "died", "preparing call 1").as_json(), "number": 1, "received": 0}
        parent.other.sendall(framed(report) + framed({"bye": True}))
        parent.other.close()
        parent.connections.work("g", parent.group, 1.0)  # it greets
        parent.connections.work("g", parent.group, 2.0)
        parent.answer()
        assert [(fault.reason, fault.text) for fault in parent.group.node.story] == [("died", "preparing call 1")]


@pytest.mark.parametrize("full", [False, True])
def test_one_that_neither_reads_nor_closes_is_given_up(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a monitor ends; and of a group that the rank has left, while the rank lives on."""
    monkeypatch.setattr(liveness_connections, "_PARTS_S", 0.3)
    with OneChild(full) as parent:
        parent.connections.say_goodbye(parent.group)
        begun_s = time.monotonic()
        parent.connections.close_when_read()
        assert 0.2 < time.monotonic() - begun_s < 5
    with OneChild(full) as parent:
        parent.connections.say_goodbye(parent.group)
        begun_s = time.monotonic()
        parent.connections.drop_late(begun_s)
        assert len(parent.selector.get_map()) == 2  # it listens, and waits
        parent.connections.drop_late(begun_s + 1)
        assert len(parent.selector.get_map()) == 1


def test_what_does_not_fit_is_said_when_there_is_room() -> None:
    with OneChild(full=True) as parent:
        said = b""
        parent.connections.say_goodbye(parent.group)
        parent.other.setblocking(False)
        for _ in range(1000):
            parent.answer()
            with contextlib.suppress(BlockingIOError):
                if not (found := parent.other.recv(2**16)):
                    break
                said = (said + found)[-100:]
        assert b'"bye"' in said
        parent.other.close()
        parent.connections.close_when_read()
