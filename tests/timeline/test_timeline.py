"""A timeline as a table, as a picture and as a trace for Perfetto; no process group and no device."""

from __future__ import annotations

import itertools
import json
import pathlib
import random
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from printed import table_rows
from samples import examples

import fdp
from fdp.timeline.rows import Bar, bars_of, hidden_s, parts_without, rows, shared_s, waits
from fdp.timeline.style import BUCKET_COLOURS, ink_on
from fdp.timeline.timeline import Interval, Timeline

MS = 1e-3


def made(name: str = "train_step", origin: str = "simulated") -> Timeline:
    """Bucket 0 is hidden, bucket 1 is waited for from 7 to 9 ms."""
    return Timeline(
        name,
        4,
        origin,
        (
            Interval("compute", "forward", "mm", 0 * MS, 2 * MS),
            Interval("compute", "backward", "mm", 2 * MS, 4 * MS),
            Interval("compute", "pack", "bucket 0", 4 * MS, 4.5 * MS, 0),
            Interval("communication", "message", "w and b", 4.5 * MS, 5.5 * MS, 0, 2**20),
            Interval("compute", "backward", "mm", 4.5 * MS, 5.5 * MS),
            Interval("compute", "pack", "bucket 1", 5.5 * MS, 6 * MS, 1),
            Interval("communication", "message", "u", 6 * MS, 9 * MS, 1, 3 * 2**20),
            Interval("compute", "optimizer", "adam", 6 * MS, 7 * MS, 0),
            Interval("compute", "optimizer", "adam", 9 * MS, 10 * MS, 1),
        ),
        10 * MS,
    )


def timelines() -> st.SearchStrategy[Timeline]:
    """Draw a timeline: any number of buckets, on a serial link or with messages in flight together."""
    return st.builds(_draw_timeline, st.integers(0, 2**32), st.integers(0, 12))


def _draw_timeline(seed: int, buckets: int) -> Timeline:
    rng = random.Random(seed)
    serial, quick, now, free = rng.random() < 0.5, rng.random() < 0.3, 0.0, 0.0
    found: list[Interval] = []

    def compute(kind: str, bucket: int | None = None) -> None:
        nonlocal now
        seconds = rng.choice([0.0, 1e-6, 1e-3, rng.random()])
        found.append(Interval("compute", kind, f"op {len(found)}", now, now + seconds, bucket))
        now += seconds

    for _ in range(rng.randint(0, 4)):
        compute("forward")
    done = []
    for bucket in range(buckets):
        for _ in range(rng.randint(0, 3)):
            compute("backward")
        compute("pack", bucket)
        start = max(now, free) if serial else now
        free = start + rng.choice([1e-6, 1e-3, rng.random()]) * (1e-6 if quick else 1)
        found.append(
            Interval("communication", "message", f"bucket {bucket}", start, free, bucket, rng.randint(1, 2**20))
        )
        done.append(free)
    for bucket, end in enumerate(done):
        now = max(now, end)
        if rng.random() < 0.8:
            compute("optimizer", bucket)
    return Timeline("step", 8, "simulated", tuple(sorted(found, key=lambda i: i.start_s)), now)


@given(timeline=timelines())
@examples(200)
def test_waits_are_all_that_the_compute_lane_does_not_work(timeline: Timeline) -> None:
    idle = waits(timeline)
    working = sum(i.end_s - i.start_s for i in timeline.compute)
    assert working + sum(w.seconds for w in idle) == pytest.approx(timeline.step_s)
    messages = {m.bucket: m for m in timeline.messages}
    for wait in idle:
        assert wait.seconds > 0
        # Whoever is waited for is done when the wait is over.
        assert messages[wait.bucket].end_s == pytest.approx(wait.end_s)
    for message in messages.values():
        assert -1e-12 <= hidden_s(message, idle) <= message.end_s - message.start_s + 1e-12


@given(timeline=timelines(), finest_s=st.sampled_from([0.0, 1e-4, 1.0]), by_bucket=st.booleans())
@examples(100)
def test_blocks_cover_what_they_join(timeline: Timeline, finest_s: float, by_bucket: bool) -> None:
    own = timeline.compute
    joined = bars_of(own, finest_s, by_bucket)
    for interval in own:
        homes = [b for b in joined if b.start_s <= interval.start_s and interval.end_s <= b.end_s]
        assert any(b.kind == interval.kind and b.bucket in (interval.bucket, None) for b in homes)
    for one, two in itertools.pairwise(joined):
        apart = two.start_s - one.end_s > finest_s
        assert apart or (one.kind, one.bucket) != (two.kind, two.bucket)


@given(timeline=timelines())
@examples(100)
def test_messages_of_one_row_do_not_overlap(timeline: Timeline) -> None:
    messages = timeline.messages
    rows_of = rows(messages, 100)
    for index, (one, row) in enumerate(zip(messages, rows_of, strict=True)):
        for other, its in zip(messages[:index], rows_of[:index], strict=True):
            assert its != row or other.end_s <= one.start_s + 1e-8
    assert max(rows(messages, 2), default=0) <= 1


# --- print -----------------------------------------------------------------------------------------------------------


def test_the_table_tells_totals_buckets_and_critical_path() -> None:
    head, messages, path = str(made()).split("\n\n")
    assert head.splitlines() == [
        "Timeline of train_step, 4 ranks, simulated: 10.000 ms a step, efficiency 70.0%",
        "compute lane: 7.000 ms of computing, 1.000 ms of packing buckets, 2.000 ms of waiting",
        "communication lane: 4.000 ms in 2 messages, 2.000 ms hidden (50%), 2.000 ms exposed",
    ]
    assert table_rows(messages) == [
        ["0", "1.0 MiB", "4.500", "5.500", "6.000", "", "100%"],
        ["1", "3.0 MiB", "6.000", "9.000", "9.000", "2.000", "33%"],
    ]
    assert table_rows(path) == [
        ["0.000", "2.000", "forward"],
        ["2.000", "6.000", "backward"],
        ["6.000", "9.000", "message of bucket 1"],
        ["9.000", "10.000", "optimizer"],
    ]


def test_a_step_without_messages_and_a_step_of_nothing_print() -> None:
    alone = Timeline("f", 1, "simulated", (Interval("compute", "forward", "mm", 0.0, MS),), MS)
    assert "efficiency 100.0%" in str(alone) and "messages\n" not in str(alone)
    assert "0.000 ms a step" in str(Timeline("f", 1, "simulated", (), 0.0))


def test_a_long_path_is_cut_to_its_longest_stretches() -> None:
    parts = [Interval("compute", ("forward", "backward")[k % 2], "mm", k * MS, (k + 1) * MS) for k in range(40)]
    assert "shorter stretches: 26" in str(Timeline("f", 1, "simulated", tuple(parts), 40 * MS))


# --- pictures --------------------------------------------------------------------------------------------------------


def texts(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in [*axes.texts, axes.title, axes._left_title]]


@pytest.mark.parametrize("suffix, begins", [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_picture_is_written_by_its_suffix(suffix: str, begins: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / f"picture{suffix}"
    made().draw(path)
    first = path.read_bytes()
    assert first.startswith(begins)
    made().draw(str(path), beside=None)
    assert path.read_bytes() == first  # the same bytes, so that a committed picture changes only with what it shows


def test_a_picture_names_what_it_shows() -> None:
    shown = texts(made().draw())
    assert "train_step on 4 ranks, simulated: 10.0 ms a step, 2.00 ms of it exposed (20%)" in shown
    assert {"forward 2.00 ms", "backward 3.00 ms", "optimizer 2.00 ms", "exposed 2.00 ms", "end\n10.0 ms"} <= set(shown)
    assert {"bucket 0", "bucket 1, 3.0 MiB", "bucket 1"} <= set(shown)


def test_a_bucket_has_one_colour_on_both_lanes() -> None:
    from matplotlib.colors import to_rgba

    (axes,) = made().draw().axes
    lanes: dict[Any, set[bool]] = {}
    for collection in axes.collections:
        for path, colour in zip(collection.get_paths(), collection.get_facecolors(), strict=True):
            if path.get_extents().height > 0.9:  # no mark of a bucket that is full
                lanes.setdefault(tuple(colour), set()).add(path.get_extents().y0 >= 1)
    for bucket in (0, 1):
        assert lanes[to_rgba(BUCKET_COLOURS[bucket])] == {False, True}


def test_exposed_time_is_hatched() -> None:
    (axes,) = made().draw().axes
    (hatched,) = [c for c in axes.collections if c.get_hatch()]
    (path,) = hatched.get_paths()
    assert (path.get_extents().x0, path.get_extents().x1) == pytest.approx((7, 9))


def test_each_wait_says_how_long_it_is_however_narrow() -> None:
    waits_s = (0.05, 0.005, 0.0005)
    found, now = [], 0.0
    for bucket, wait_s in enumerate(waits_s):
        found.append(Interval("compute", "optimizer", "adam", now, now + 0.05, bucket))
        now += 0.05 + wait_s
    found.append(Interval("compute", "optimizer", "adam", now, now + 0.05, 3))
    figure = Timeline("f", 2, "measured", tuple(found), now + 0.05).draw()
    shown = {text.replace("\n", " ").removeprefix("exposed ") for text in texts(figure)}
    assert {"50.0 ms", "5.00 ms", "0.500 ms"} <= shown, shown


def test_no_bracket_of_a_phase_is_over_a_wait() -> None:
    (axes,) = made().draw().axes
    top = max(line.get_ydata()[0] for line in axes.lines if line.get_ydata()[0] > 1)
    spans = [tuple(line.get_xdata()) for line in axes.lines if list(line.get_ydata()) == [top, top]]
    assert len(spans) == 4 and all(end <= 7 or begin >= 9 for begin, end in spans), spans


@given(timeline=timelines())
@examples(50)
def test_what_is_left_of_a_bar_is_all_of_it_but_the_waits(timeline: Timeline) -> None:
    idle, all_of_it = waits(timeline), Bar("step", None, 0.0, timeline.step_s)
    left = parts_without(all_of_it, idle)
    assert all(part.seconds > 0 for part in left) and all(shared_s(part, idle) == 0 for part in left)
    assert sum(part.seconds for part in (*left, *idle)) == pytest.approx(timeline.step_s)


def test_two_timelines_share_the_axis_of_time() -> None:
    late = Interval("compute", "optimizer", "adam", 10 * MS, 20 * MS, 1)
    longer = Timeline("other", 4, "measured", (*made().intervals, late), 20 * MS)
    figure = made().draw(beside=longer)
    assert [axes.get_xlim() for axes in figure.axes] == [pytest.approx((0, 20.1))] * 2
    assert "other on 4 ranks, measured: 20.0 ms a step, 2.00 ms of it exposed (10%)" in texts(figure)


@given(timeline=timelines())
@examples(10)
def test_any_timeline_draws(timeline: Timeline) -> None:
    figure = timeline.draw()
    figure.canvas.draw()


def test_thousands_of_operators_are_few_shapes() -> None:
    parts = [Interval("compute", "backward", f"mm {k}", k * 1e-5, (k + 1) * 1e-5) for k in range(20_000)]
    figure = Timeline("f", 1, "simulated", tuple(parts), 0.2).draw()
    assert sum(len(collection.get_paths()) for axes in figure.axes for collection in axes.collections) == 1


def test_text_on_every_colour_can_be_read() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in BUCKET_COLOURS:
        ink = ink_on(colour)
        one, two = sorted([luminance(colour), luminance("#FFFFFF" if ink == "white" else ink)])
        assert (two + 0.05) / (one + 0.05) > 3.5, colour  # WCAG asks 3 of large text


def test_an_unknown_suffix_is_refused_before_anything_is_drawn(tmp_path: pathlib.Path) -> None:
    with pytest.raises(fdp.ArgumentError, match=r"(?s)'t\.bmp'.*Remedy: .*\.png, \.svg"):
        made().draw("t.bmp")


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(fdp.ArgumentError, match=r"(?s)matplotlib is not installed.*pip install matplotlib"):
        made().draw()


# --- traces ----------------------------------------------------------------------------------------------------------


def loaded(timeline: Timeline, folder: pathlib.Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    timeline.save_trace(folder / "trace.json")
    document = json.loads((folder / "trace.json").read_text())
    return document, document["traceEvents"]


@given(timeline=timelines())
@examples(50)
def test_a_trace_holds_every_interval(timeline: Timeline, tmp_path_factory: pytest.TempPathFactory) -> None:
    document, events = loaded(timeline, tmp_path_factory.mktemp("trace"))
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    back = [
        Interval(
            "compute" if names[e["tid"]] == "compute" else "communication",
            e["cat"],
            e["name"],
            e["ts"] * 1e-6,
            (e["ts"] + e["dur"]) * 1e-6,
            e["args"].get("bucket"),
            e["args"].get("size_bytes"),
        )
        for e in events
        if e["ph"] == "X" and e["cat"] != "wait"
    ]
    for own in ("compute", "communication"):
        was, now = getattr(timeline, "compute" if own == "compute" else "messages"), [i for i in back if i.lane == own]
        assert len(was) == len(now)
        for one, two in zip(was, now, strict=True):
            assert (one.kind, one.name, one.bucket, one.size_bytes) == (two.kind, two.name, two.bucket, two.size_bytes)
            assert (two.start_s, two.end_s) == pytest.approx((one.start_s, one.end_s), abs=1e-12)
    assert document["otherData"]["world_size"] == timeline.world_size


@given(timeline=timelines())
@examples(50)
def test_slices_of_a_thread_lie_apart_and_arrows_point_on(
    timeline: Timeline, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, events = loaded(timeline, tmp_path_factory.mktemp("trace"))
    slices = [e for e in events if e["ph"] == "X"]
    for thread in {e["tid"] for e in slices}:
        own = sorted((e for e in slices if e["tid"] == thread), key=lambda e: (e["ts"], e["dur"]))
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in itertools.pairwise(own))
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    waited = {wait.bucket for wait in waits(timeline)}
    assert starts.keys() == ends.keys() >= waited
    for bucket, arrow in ends.items():
        start = starts[bucket]
        assert start["ts"] <= arrow["ts"]
        assert any(
            e["tid"] == start["tid"] and e["ts"] == start["ts"] and e["args"]["bucket"] == bucket for e in slices
        )
        onto = [e for e in slices if not e["tid"] and e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"] + 1e-6]
        assert any(e["cat"] in ("wait", "optimizer") for e in onto)


def test_an_arrow_does_not_point_back_to_a_wait_that_began_before_its_message(tmp_path: pathlib.Path) -> None:
    # Nothing reads bucket 0, so that one wait from 1 to 5 ms is for both; message 1 begins at 3 ms.
    parts = (
        Interval("compute", "backward", "mm", 0.0, 1 * MS),
        Interval("communication", "message", "v", 1 * MS, 3 * MS, 0, 8),
        Interval("communication", "message", "w", 3 * MS, 5 * MS, 1, 8),
        Interval("compute", "optimizer", "adam", 5 * MS, 6 * MS, 1),
    )
    _, events = loaded(Timeline("f", 2, "simulated", parts, 6 * MS), tmp_path)
    assert [e["ts"] for e in events if e["ph"] in "sf"] == pytest.approx([3000, 3000])
