"""The arithmetic of messages: against programs that send every piece, and by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from links import occupancy_s
from samples import examples

import fdp
from fdp.distributed.collective import COLLECTIVES


def ring_by_rounds(size: int, size_bytes: float, latency_s: float, rate: float, rounds: int) -> float:
    """All ranks send one piece to the next, again and again: a ring, a round at a time."""
    return sum(latency_s + size_bytes / size / rate for _ in range(rounds))


@examples(50)
@given(st.integers(2, 40), st.floats(0, 1e-3), st.floats(1e6, 1e11), st.integers(0, 10**9))
def test_a_ring_is_its_rounds(size: int, latency_s: float, rate: float, size_bytes: int) -> None:
    network = fdp.Network(latency_s, rate)
    for op in ("mean", "sum", "max", "min"):
        expected = ring_by_rounds(size, size_bytes, latency_s, rate, 2 * (size - 1))
        assert network.message_s(op, size_bytes, size) == pytest.approx(expected)
    # An all-gather sends whole contributions, one less than there are ranks.
    expected = ring_by_rounds(1, size_bytes, latency_s, rate, size - 1)
    assert network.message_s("all_gather", size_bytes, size) == pytest.approx(expected)


def test_by_hand() -> None:
    """One byte a second between hosts, ten within; a second, and a tenth, of latency."""
    shared: dict[str, Any] = {"ranks_per_host": 4, "inner_latency_s": 0.1, "inner_bandwidth_bytes_per_s": 10.0}
    hierarchical = fdp.Network(1.0, 1.0, "hierarchical", **shared)
    # 12 ranks, 3 hosts, 40 bytes. Within: 3 rounds of 10 bytes, twice; between: 4 rounds, 4/3 of 40 bytes.
    assert hierarchical.message_s("sum", 40, 12) == pytest.approx(2 * 3 * (0.1 + 1) + 4 + 4 / 3 * 40)
    # Reduce-scatter: within 3 rounds of 10 bytes, between hosts 2 rounds of a third of 4 ranks' 10 bytes.
    assert hierarchical.message_s("sum_scatter", 40, 12) == pytest.approx(3 * (0.1 + 1) + 2 * (1 + 40 / 3))
    # To each other rank itself: the four of a host share the link that leaves it, for the rows of eight ranks.
    assert hierarchical.message_s("all_to_all", 12, 12) == pytest.approx(8 + 3 * 0.1 + 4 * 8)
    # All-gather: between hosts 2 rounds of 4 ranks' 40 bytes, within 3 rounds of 3 hosts' 40 bytes.
    assert hierarchical.message_s("all_gather", 40, 12) == pytest.approx(2 * (1 + 160) + 3 * 0.1 + 3 * 3 * 4)
    assert hierarchical.message_s("broadcast", 40, 12) == pytest.approx(2 + 40 + 3 * 0.1 + 4)
    # A ring over the same ranks goes at the pace of the links between hosts.
    ring = fdp.Network(1.0, 1.0, "ring", **shared)
    assert ring.message_s("sum", 40, 12) == pytest.approx(22 + 22 / 12 * 40)
    assert ring.message_s("broadcast", 40, 12) == pytest.approx(11 + 40)
    tree = fdp.Network(1.0, 1.0, "tree", **shared)
    assert tree.message_s("sum", 40, 12) == pytest.approx(2 * (2 + 3 * 0.1) + 80)
    assert tree.message_s("broadcast", 40, 12) == pytest.approx(2 + 3 * 0.1 + 40)
    # A tree gathers as a ring does.
    assert tree.message_s("all_gather", 40, 12) == ring.message_s("all_gather", 40, 12)
    # Within one host nothing goes over the link between hosts.
    for network in (ring, hierarchical):
        assert network.message_s("sum", 40, 4) == pytest.approx(2 * 3 * (0.1 + 1))
    # A host that is not full counts as a host: 5 ranks on 2 hosts.
    assert tree.message_s("sum", 40, 5) == pytest.approx(2 * (1 + 3 * 0.1) + 40)
    two = fdp.Network(1.0, 1.0, "tree")
    assert two.message_s("sum", 40, 2) == fdp.Network(1.0, 1.0).message_s("sum", 40, 2) == 2 + 40


def networks() -> st.SearchStrategy[fdp.Network]:
    """Draw a network."""

    def build(latency_s: float, rate: float, algorithm: str, ranks: int, faster: float, flight: int) -> fdp.Network:
        inner: dict[str, Any] = {}
        if ranks > 1:
            inner = {"inner_latency_s": latency_s / faster, "inner_bandwidth_bytes_per_s": rate * faster}
        return fdp.Network(latency_s, rate, algorithm, ranks, in_flight=flight, **inner)

    return st.builds(
        build, st.floats(0, 1e-3), st.floats(1e6, 1e11), st.sampled_from(["ring", "tree", "hierarchical"]),
        st.integers(1, 8), st.floats(1, 50), st.integers(1, 5),
    )  # fmt: skip


@examples(50)
@given(st.integers(2, 40), st.floats(0, 1e-3), st.floats(1e6, 1e11), st.integers(0, 10**9))
def test_what_is_split_is_half_of_an_all_reduce(size: int, latency_s: float, rate: float, size_bytes: int) -> None:
    network = fdp.Network(latency_s, rate)
    for op in ("sum_scatter", "mean_scatter", "all_to_all"):
        expected = ring_by_rounds(size, size_bytes, latency_s, rate, size - 1)
        assert network.message_s(op, size_bytes, size) == pytest.approx(expected)
    assert network.message_s("permute", size_bytes, size) == pytest.approx(latency_s + size_bytes / rate)


def test_what_is_split_between_ranks_that_share_hosts() -> None:
    network = fdp.Network(1.0, 1.0, ranks_per_host=4, inner_latency_s=0.1, inner_bandwidth_bytes_per_s=10.0)
    # To the eight ranks of other hosts, and to the three of this one; four ranks share the link that leaves it.
    assert network.message_s("sum_scatter", 12, 12) == pytest.approx(8 + 3 * 0.1 + 4 * 8)
    assert network.message_s("permute", 12, 12) == pytest.approx(1 + 12)


@examples(200)
@given(networks(), st.sampled_from(list(COLLECTIVES)), st.integers(1, 64), st.integers(0, 10**8), st.integers(0, 10**8))
def test_what_holds_on_every_network(network: fdp.Network, op: str, size: int, small: int, more: int) -> None:
    whole, part = network.message_s(op, small + more, size), network.message_s(op, small, size)
    # More bytes never take less, and two messages in turn never take less than one.
    assert 0 <= part <= whole
    assert whole <= (part + network.message_s(op, more, size)) * (1 + 1e-12)
    busy = occupancy_s(network, op, small, size)
    latency_s, s_per_byte = network.parts(op, size)
    assert part == latency_s + s_per_byte * small
    assert s_per_byte * small <= busy <= part
    if network.in_flight == 1:
        assert busy == part
    if size == 1:
        assert whole == 0
    # So many messages at once take no less than their latencies in turns of `in_flight`, nor than their bytes.
    assert busy * network.in_flight >= part * (1 - 1e-12)
    # More ranks on no more hosts than before take no less time to reduce.
    if COLLECTIVES[op].reduces and network.ranks_per_host == 1:
        assert network.message_s(op, small, size + 1) >= part * (1 - 1e-12)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"latency_s": -1}, "latency_s=-1: seconds, 0 to 1e6"),
        ({"latency_s": math.nan}, "latency_s=nan: seconds, 0 to 1e6"),
        ({"latency_s": math.inf}, "latency_s=inf"),
        ({"latency_s": "1"}, "latency_s='1'"),
        ({"latency_s": 10**400}, "latency_s=1000"),
        ({"bandwidth_bytes_per_s": 1e-300}, "bandwidth_bytes_per_s=1e-300"),
        ({"in_flight": 10**400}, "in_flight=1000"),
        ({"bandwidth_bytes_per_s": 0}, "bandwidth_bytes_per_s=0: bytes a second, 0.001 or more"),
        ({"bandwidth_bytes_per_s": math.nan}, "bandwidth_bytes_per_s=nan"),
        ({"algorithm": "star"}, "algorithm='star': one of 'ring', 'tree', 'hierarchical'"),
        ({"ranks_per_host": 0}, "ranks_per_host=0: a whole number, 1 to 2**31"),
        ({"ranks_per_host": True}, "ranks_per_host=True"),
        ({"ranks_per_host": 2}, "inner_latency_s=None: seconds, 0 to 1e6, as ranks share hosts"),
        ({"ranks_per_host": 2, "inner_latency_s": 0}, "inner_bandwidth_bytes_per_s=None: bytes a second"),
        ({"inner_latency_s": 1e-6}, "inner_latency_s=1e-06: None, as ranks_per_host is 1"),
        ({"inner_bandwidth_bytes_per_s": 1e6}, "inner_bandwidth_bytes_per_s=1000000.0: None"),
        ({"in_flight": 0}, "in_flight=0: a whole number, 1 to 2**31"),
        ({"in_flight": 1.5}, "in_flight=1.5"),
        ({"compute_slowdown": 1.0}, "compute_slowdown=1.0: a share, 0 up to but not including 1"),
        ({"compute_slowdown": -0.1}, "compute_slowdown=-0.1"),
    ],
)
def test_numbers_without_meaning_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(fdp.FdpError) as caught:
        fdp.Network(**{"latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9, **arguments})
    assert f"  {said}" in str(caught.value)
    assert str(caught.value).splitlines()[-1].startswith("Remedy: ")


def test_all_wrong_numbers_are_listed() -> None:
    with pytest.raises(fdp.FdpError) as caught:
        fdp.Network(-1, -1, "star", in_flight=0)
    assert [line.split("=")[0].strip() for line in str(caught.value).splitlines()[1:-1]] == [
        "latency_s", "bandwidth_bytes_per_s", "algorithm", "in_flight",
    ]  # fmt: skip


def test_messages_without_meaning_are_refused() -> None:
    with pytest.raises(fdp.ArgumentError, match=r"a message 'min_max'\.\nRemedy: the operation is one of 'mean'"):
        fdp.Network(1e-5, 1e9).message_s("min_max", 1, 2)


@pytest.mark.parametrize("size", [0, 2.0, True, None, "2", 10**400])
def test_what_is_no_number_of_ranks_is_refused(size: Any) -> None:
    with pytest.raises(fdp.ArgumentError, match=r"world_size=.* is no number of ranks"):
        fdp.Network(1e-5, 1e9).message_s("sum", 1, size)


def test_a_number_of_ranks_may_be_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    network = fdp.Network(1e-5, 1e9)
    assert network.message_s("sum", 100, numpy.int64(4)) == network.message_s("sum", 100, 4)
