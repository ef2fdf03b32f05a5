"""The report of a monitor to its rank, which has to fit into their shared memory: texts are shortened, facts are
not."""

from __future__ import annotations

import json
from typing import Any

TEXT_BYTES = 1000
"""Of a text that monitors pass on, at most, as JSON writes it."""

_SHORTER_BYTES = (TEXT_BYTES, 300, 100, 30, 0)

_FEWER = (16, 8, 4, 2, 1, 0)
"""So many faults of each group, where even those without a text are too many: with hundreds of groups."""

_CUT = "..."

GroupNews = dict[str, dict[str, Any]]
"""The report on each group: its "story" of faults, a "mismatch" of places, who is "busy", and who is "unreached"."""


def shortened(text: str, most_bytes: int) -> str:
    """The beginning of a text, of at most so many bytes in JSON, where a character may take twelve.

    Example:
        >>> shortened("a text", 10), shortened("a longer text", 10), shortened("é" * 10, 16), shortened("abc", 2)
        ('a text', 'a longe...', 'éé...', '')
    """
    beginning = text[: most_bytes + 1]  # a character takes a byte at least, and the whole text may be huge
    if _bytes_of(beginning) <= most_bytes:
        return beginning
    room, end = most_bytes - len(_CUT), 0
    for character in beginning:
        room -= _bytes_of(character)
        if room < 0:
            break
        end += 1
    return beginning[:end] + _CUT if most_bytes >= len(_CUT) else ""


def encoded(news: GroupNews, most_bytes: int) -> bytes:
    """News as JSON in so many bytes at most.

    Rank, reason and call are always kept. Texts are shortened first. Then entries that only help to understand are left
    out.
    """
    for text_bytes in _SHORTER_BYTES:
        made = _dumped({key: _with_texts(group, text_bytes) for key, group in news.items()})
        if len(made) <= most_bytes:
            return made
    for count in _FEWER:
        made = _dumped({key: _with_texts(_fewer(group, count), 0) for key, group in news.items()})
        if len(made) <= most_bytes:
            return made
    return _dumped({})


def _dumped(news: object) -> bytes:
    return json.dumps(news).encode()


def _bytes_of(text: str) -> int:
    return len(json.dumps(text)) - 2  # without its quotes


def _fewer(group: dict[str, Any], count: int) -> dict[str, Any]:
    """The first faults of a group, and what is told in any case."""
    return {"story": group["story"][:count], "mismatch": group.get("mismatch", ())}


def _with_texts(group: dict[str, Any], most_bytes: int) -> dict[str, Any]:
    """The report of a group, with shorter texts."""
    return {
        "story": [{**fault, "text": shortened(fault["text"], most_bytes)} for fault in group["story"]],
        "mismatch": [{**place, "text": shortened(place["text"], most_bytes)} for place in group.get("mismatch", ())],
        "busy": [[rank, shortened(text, most_bytes), age_s] for rank, text, age_s in group.get("busy", ())],
        "unreached": [
            [rank, shortened(where, most_bytes), shortened(why, most_bytes)]
            for rank, where, why in group.get("unreached", ())
        ],
    }
