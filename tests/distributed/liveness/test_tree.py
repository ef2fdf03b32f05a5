"""What monitors tell each other, simulated: thousands of ranks, no socket, and a clock of the test's own."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import exhaustive

from fdp.distributed.liveness.fault import Fault
from fdp.distributed.liveness.machines import packed, unpacked
from fdp.distributed.liveness.places import PlaceOfWait
from fdp.distributed.liveness.tree import FANOUT, Node, parent_of

LIVENESS_S = 10.0
HOP_S = 0.001


class Network:
    """Monitors of some ranks, `per_host` on each machine, whose messages take a millisecond."""

    def __init__(self, size: int, per_host: int = 8) -> None:
        self.now_s = 0.0
        self.nodes = {r: Node(r, size, f"host{r // per_host}", LIVENESS_S, 0.0) for r in range(size)}
        self.gone: set[int] = set()
        self.cut: set[frozenset[str]] = set()
        self.per_host = per_host
        self.read_bytes: Counter[int] = Counter()
        self.under_way: list[tuple[int, int, str]] = []
        for rank in range(1, size):
            self.connect(rank)

    def connect(self, rank: int) -> None:
        parent = parent_of(rank)
        assert parent is not None
        self.nodes[parent].connected(rank, f"host{rank // self.per_host}", self.now_s)
        self.nodes[rank].connected(parent, f"host{parent // self.per_host}", self.now_s)

    def reaches(self, one: int, two: int) -> bool:
        return frozenset((one // self.per_host, two // self.per_host)) not in self.cut

    def run(self, seconds: float, step_s: float = 0.05) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            for rank, node in self.nodes.items():
                if rank not in self.gone and self.now_s >= node.wakes_at():
                    node.tick(self.now_s)
            self.deliver()

    def deliver(self) -> None:
        while True:
            sent = []
            for rank, node in self.nodes.items():
                outbox, node.outbox = node.outbox, []
                sent += [(rank, peer, json.dumps(message)) for peer, message in outbox]
            if not sent:
                return
            for rank, peer, text in sent:
                if rank not in self.gone and peer not in self.gone and self.reaches(rank, peer):
                    self.read_bytes[peer] += len(text)
                    self.nodes[peer].received(rank, json.loads(text), self.now_s)

    def kill(self, rank: int) -> None:
        """Its monitor and its rank at once: the connections are closed, and nothing was said."""
        self.gone.add(rank)
        node = self.nodes[rank]
        for peer in (node.parent, *range(rank * FANOUT + 1, rank * FANOUT + FANOUT + 1)):
            if peer in self.nodes and peer not in self.gone:
                self.nodes[peer].closed(rank, self.now_s)

    def stories(self) -> set[tuple[tuple[int, str, bool], ...]]:
        return {
            tuple((fault.rank, fault.reason, fault.suspected) for fault in node.story)
            for rank, node in self.nodes.items()
            if rank not in self.gone
        }


@exhaustive
def test_four_thousand_ranks_hear_of_a_fault_and_each_reads_little() -> None:
    """In one story, within a second; and of all ranks the one that reads most reads what it does among 512."""
    most = {}
    for size in (512, 4096):
        network = Network(size)
        for rank, node in network.nodes.items():
            node.doing([[rank, "in its own code, after call 123 of step 'train'", 12.0]])
        network.run(20.0, step_s=2.0)  # who is there, and where, has been said
        network.read_bytes.clear()
        network.run(10.0, step_s=2.0)
        most[size] = max(network.read_bytes.values()) / 10
    assert all(len(node.busy) == 16 for node in network.nodes.values())  # of ranks far away, too
    assert most[4096] < 1.5 * most[512]
    assert most[4096] < 10_000
    network.nodes[4001].report(Fault(4001, "died", "in call 7"), network.now_s)
    network.run(1.0, step_s=0.2)
    assert network.stories() == {((4001, "died", False),)}


def test_all_name_those_of_a_machine_that_is_cut_off_and_these_name_the_others() -> None:
    network = Network(24, per_host=4)
    network.run(6.0)
    network.cut = {frozenset((host, 2)) for host in (0, 1, 3, 4, 5)}
    network.run(13.0)
    inside = {8, 9, 10, 11}
    for rank, node in network.nodes.items():
        named = {fault.rank for fault in node.story}
        assert {fault.reason for fault in node.story} == {"unreachable"}
        assert all(fault.suspected for fault in node.story)
        if rank in inside:
            assert named >= {0, 1, 2, 3} if parent_of(rank) == 0 else named == {4, 5, 6, 7} or named >= {0, 1, 2, 3}
            assert not named & inside
        else:
            assert named >= inside


def test_a_beat_is_often_enough_for_the_least_patient_neighbour() -> None:
    node = Node(1, 12, "a", 60.0, 0.0)
    assert node.beat_s == 12.0
    node.tick(0.0)
    node.connected(0, "a", 1.0, 3.0)
    assert (node.beat_s, node.wakes_at()) == (0.6, 1.6)
    node.connected(9, "a", 1.0, 1e-9)
    assert node.beat_s == 0.05
    node.closed(9, 2.0)
    assert node.beat_s == 0.6


def test_who_is_heard_of_again_is_no_longer_suspected() -> None:
    network = Network(8, per_host=2)
    network.run(6.0)
    network.cut = {frozenset((0, 2))}
    network.run(13.0)
    assert {fault.rank for fault in network.nodes[0].story} == {4, 5}
    network.cut = set()
    network.run(6.0)
    assert network.stories() == {()}


def test_a_frozen_rank_that_goes_on_is_taken_back() -> None:
    network = Network(20)
    network.run(5.0)
    network.nodes[17].report(Fault(17, "frozen"), network.now_s)
    network.run(1.0)
    assert network.stories() == {((17, "frozen", False),)}
    network.nodes[17].clear("frozen", network.now_s)
    network.run(1.0)
    assert network.stories() == {()}


def test_those_below_a_lost_monitor_hear_of_it_and_of_each_other() -> None:
    network = Network(90)
    network.run(5.0)
    network.kill(1)  # the parent of 9 to 16, each of which leads those below it from now on
    network.run(1.0)
    assert network.stories() == {((1, "died", True),)}
    network.nodes[81].report(Fault(81, "raised", "ValueError"), network.now_s)  # below 10
    network.run(1.0)
    assert [fault.rank for fault in network.nodes[10].story] == [1, 81]
    assert [fault.rank for fault in network.nodes[82].story] == [1, 81]


def test_what_is_certain_takes_the_place_of_what_was_suspected() -> None:
    node = Node(0, 3, "here", LIVENESS_S, 0.0)
    node.connected(1, "here", 0.0)
    node.closed(1, 1.0)
    assert node.story == [Fault(1, "died", "its monitor has ended", suspected=True)]
    node.connected(1, "here", 2.0)
    assert node.story == []
    node.received(1, {"report": Fault(1, "died", "in call 3").as_json()}, 3.0)
    node.closed(1, 4.0)
    assert node.story == [Fault(1, "died", "in call 3")]


def test_a_suspicion_that_is_taken_back_takes_no_death_with_it() -> None:
    node = Node(0, 4, "here", LIVENESS_S, 0.0)
    for child in (1, 2):
        node.connected(child, "there", 0.0)
    node.tick(LIVENESS_S + 1)  # both are silent, and so suspected
    assert {fault.rank for fault in node.story} == {1, 2}
    node._hear(Fault(2, "died", "in call 3"), LIVENESS_S + 2)
    node.received(1, {"busy": []}, LIVENESS_S + 3)  # and 1 is heard of again
    assert [(fault.rank, fault.suspected) for fault in node.story] == [(2, False)]
    node.received(1, {"clear": [2, "raised"]}, LIVENESS_S + 4)
    node.received(1, {"clear": [2, "frozen"]}, LIVENESS_S + 4)
    assert [fault.rank for fault in node.story] == [2]


def test_what_is_final_finds_room_in_a_story_that_is_full() -> None:
    node = Node(0, 40, "here", LIVENESS_S, 0.0)
    node.connected(1, "here", 0.0)
    for rank in range(2, 30):
        node.received(1, {"report": Fault(rank, "raised", "ValueError", call=7).as_json()}, 1.0)
    assert len(node.story) == 16
    node.received(1, {"report": Fault(35, "died").as_json()}, 2.0)
    assert len(node.story) == 16
    for rank in range(2, 30):
        node.received(1, {"clear": [rank, "raised"]}, 3.0)
    assert [(fault.rank, fault.reason) for fault in node.story] == [(35, "died")]


def test_a_parent_whose_monitor_has_ended_is_suspected_until_it_is_there() -> None:
    node = Node(1, 3, "here", LIVENESS_S, 0.0)
    node.closed(0, 20.0)  # it was never heard of
    assert [(fault.rank, fault.reason, fault.suspected) for fault in node.story] == [(0, "died", True)]
    node.connected(0, "there", 21.0)
    node.received(0, {"story": []}, 21.0)
    assert node.story == []


def test_what_was_sent_to_a_parent_that_had_gone_already_is_not_lost() -> None:
    network = Network(90, per_host=1)
    network.run(5.0)
    network.gone.add(1)  # its machine has lost its power: no connection is closed
    network.run(0.1)
    network.nodes[81].report(Fault(81, "died"), network.now_s)  # below 10, which is below 1
    network.nodes[82].report(Fault(82, "raised", call=3), network.now_s)
    network.nodes[82].clear("raised", network.now_s)
    network.run(LIVENESS_S + 4)
    for rank in (10, 81, 82):
        assert {fault.rank: fault.reason for fault in network.nodes[rank].story} == {81: "died", 1: "unreachable"}


def test_what_was_decided_without_the_parent_is_told_to_it_and_nothing_else() -> None:
    network = Network(90, per_host=1)
    network.run(6.0)
    for rank in (81, 40):
        network.nodes[rank].report(Fault(rank, "frozen"), network.now_s)
    network.run(1.0)
    network.cut = {frozenset((1, 10))}
    network.run(LIVENESS_S + 4)  # 10 leads those below it
    assert network.nodes[10].leads
    network.nodes[81].clear("frozen", network.now_s)  # below 10
    network.nodes[40].clear("frozen", network.now_s)  # far from it
    network.nodes[82].report(Fault(82, "died"), network.now_s)  # below 10
    network.run(1.0)
    network.cut = set()
    network.run(6.0)
    assert network.stories() == {((82, "died", False),)}


def test_a_report_made_before_the_parent_was_there_reaches_it() -> None:
    network = Network(3)
    late = Node(1, 3, "host0", LIVENESS_S, 0.0)
    late.report(Fault(1, "died"), 0.0)
    assert late.story == [Fault(1, "died")]
    network.nodes[1] = late
    network.connect(1)
    network.run(1.0)
    assert network.stories() == {((1, "died", False),)}


def test_a_job_that_ends_in_order_floods_nothing() -> None:
    network = Network(512)
    network.run(10.0, step_s=1.0)
    network.read_bytes.clear()
    for rank, node in network.nodes.items():
        node.report(Fault(rank, "left", "its program has ended"), network.now_s)
    network.run(2.0)
    assert max(network.read_bytes.values()) < 100_000
    assert all(len(node.story) <= 16 for node in network.nodes.values())


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 60), st.integers(1, 8), st.integers(0, 2**32))
def test_whatever_fails_all_that_can_hear_of_it_name_it(size: int, per_host: int, seed: int) -> None:
    """Random faults, reported or not: every rank that is left names a rank that is gone, and none that is well."""
    draw = random.Random(seed)
    network = Network(size, per_host)
    network.run(6.0, step_s=0.5)
    victims = set(draw.sample(range(size), draw.randint(1, min(4, size - 1))))
    for victim in victims:
        if draw.random() < 0.5:
            network.nodes[victim].report(Fault(victim, "died"), network.now_s)
            network.run(draw.choice((0.0, 0.05, 0.5)))
        network.kill(victim)
    network.run(LIVENESS_S + 4.0, step_s=0.5)
    for rank, node in network.nodes.items():
        if rank in victims:
            continue
        named = {fault.rank for fault in node.story}
        assert named <= victims
        lead = rank
        while (up := parent_of(lead)) is not None and up not in victims:
            lead = up
        # Those that are still connected to each other tell one story.
        assert node.story == network.nodes[lead].story
    assert any(network.nodes[rank].story for rank in set(range(size)) - victims)


@given(st.dictionaries(st.integers(0, 99), st.sampled_from("abc")))
def test_hosts_survive_the_wire(hosts: dict[int, str]) -> None:
    assert unpacked(json.loads(json.dumps(packed(hosts))), 100) == hosts


@pytest.mark.parametrize(
    "message",
    [
        {"report": {"rank": 1}},
        {
            "report": {
                "rank": 1,
                "reason": "bored",
                "text": "",
                "call": None,
                "suspected": False,
                "after_s": 0,
                "calls": 0,
                "because": [],
                "attempt": 1,
            }
        },
        {"hosts": [["a", 5, 10**9]]},
        {"hosts": [["a", 3, 1]]},
    ],
)
def test_what_no_monitor_says_is_refused(message: dict[str, object]) -> None:
    node = Node(0, 10, "here", LIVENESS_S, 0.0)
    node.connected(1, "here", 0.0)
    with pytest.raises(ValueError, match=r"no fault|no ranks"):
        node.received(1, message, 0.1)


@pytest.mark.parametrize("size", [3, 300])
def test_all_hear_of_two_ranks_in_different_places(size: int) -> None:
    """Also who does not wait, and who comes back to a parent that has heard; and it is never taken back."""
    network = Network(size)
    network.run(3.0)
    step, restore = (
        PlaceOfWait("a sum", 6, 21, size - 1, "call 5 of step 'train'"),
        PlaceOfWait("", 7, 20, 1, "restore"),
    )
    for rank in range(2, size):
        network.nodes[rank].waits(PlaceOfWait("a sum", 6, 21, rank, step.text), network.now_s)
    network.run(1.0)
    assert not any(node.mismatch for node in network.nodes.values())
    network.nodes[1].waits(restore, network.now_s)
    network.run(1.0)
    heard = {(one, other.text) for one, other in (node.mismatch for node in network.nodes.values())}
    assert heard == {(restore, step.text)}
    network.nodes[1].waits(None, network.now_s)
    network.nodes[2].mismatch = ()
    network.connect(2)
    network.run(1.0)
    assert all(node.mismatch for node in network.nodes.values())
    assert all(not node.story for node in network.nodes.values())


def test_a_place_that_a_rank_has_left_is_forgotten() -> None:
    network = Network(3)
    network.nodes[1].waits(PlaceOfWait("", 7, 20, 1, "restore"), network.now_s)
    network.run(1.0)
    network.nodes[1].waits(None, network.now_s)
    network.run(1.0)
    network.nodes[2].waits(PlaceOfWait("a sum", 6, 21, 2, "call 5 of step 'train'"), network.now_s)
    network.run(3.0)
    assert not any(node.mismatch for node in network.nodes.values())
