"""What a monitor tells its rank fits, whatever is in it, and names who is gone, why, and in which call."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import fdp
from fdp.distributed.liveness.fault import Fault
from fdp.distributed.liveness.news import TEXT_BYTES, encoded, shortened
from fdp.distributed.liveness.status import ROOM_BYTES
from fdp.distributed.liveness.watched import text_of

LONG = "\N{GRINNING FACE}" * 2000


@given(st.text(max_size=60), st.integers(0, 80))
def test_a_text_is_cut_between_characters_to_what_json_takes(text: str, most_bytes: int) -> None:
    cut = shortened(text, most_bytes)
    assert len(json.dumps(cut)) - 2 <= most_bytes
    if len(json.dumps(text)) - 2 <= most_bytes:
        assert cut == text
    else:
        assert text.startswith(cut.removesuffix("..."))


def news_of(groups: int, faults: int, text: str) -> dict[str, Any]:
    told = [Fault(rank, "raised", text, call=7).as_json() for rank in range(faults)]
    extra = {"busy": [[rank, text, 1.5] for rank in range(16)], "unreached": [[1, text, text]]}
    return {f"group {each}": {"story": told, **extra} for each in range(groups)}


@pytest.mark.parametrize(("groups", "text"), [(1, "short"), (1, LONG), (8, LONG), (64, LONG), (100, "\ud800" * 9)])
def test_who_is_gone_is_told_however_long_the_texts_are(groups: int, text: str) -> None:
    told = encoded(news_of(groups, 16, text), ROOM_BYTES)
    assert len(told) <= ROOM_BYTES
    for group in json.loads(told).values():
        found = [Fault.from_json(each) for each in group["story"]]
        assert [(fault.rank, fault.reason, fault.call) for fault in found] == [(r, "raised", 7) for r in range(16)]
        assert groups > 1 or text[:5] == found[0].text[:5]


def test_of_thousands_of_groups_the_first_faults_are_told() -> None:
    told = json.loads(encoded(news_of(1000, 16, LONG), ROOM_BYTES))
    assert len(told) == 1000
    assert all(group["story"][0]["rank"] == 0 for group in told.values())
    assert encoded(news_of(10, 1, ""), 100) == b"{}"


def test_the_text_of_an_error_is_short_in_bytes() -> None:
    text = text_of(ValueError(LONG))
    assert text.startswith("ValueError: \N{GRINNING FACE}")
    assert len(json.dumps(text)) <= TEXT_BYTES + 2


def ends_by_a_long_error() -> tuple[Any, ...]:
    """Rank 1 is a member of eight groups, and its program ends by an error whose text takes much of the memory."""
    groups = [dist.new_group() for _ in range(8)]
    for group in groups:
        fdp.data_parallel(lambda w, b: w + fdp.pmean(b.sum()), group=group)(torch.ones(2), torch.ones(2))
    if dist.get_rank() == 1:
        error = ValueError(LONG)
        sys.excepthook(ValueError, error, None)  # as Python calls it at the end of the program
        return ()
    step = fdp.data_parallel(lambda w, b: w + fdp.pmean(b.sum()), group=groups[3])
    with pytest.raises(fdp.PeerError) as caught:
        step(torch.ones(2), torch.ones(2))
    return caught.value.ranks, caught.value.reason, "ValueError: \N{GRINNING FACE}" in str(caught.value)


def test_an_error_with_a_long_text_is_named_in_each_of_many_groups() -> None:
    outcomes = ranks.run_fresh(2, ends_by_a_long_error, env={"FDP_LIVENESS_S": "3"}, deadline_s=60)
    assert outcomes[0].value == ((1,), "raised", True), outcomes[0].describe()
