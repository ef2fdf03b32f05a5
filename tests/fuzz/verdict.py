"""What all ranks' reports come to."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from fuzz.execute import Report
from fuzz.program import Program
from fuzz.refusals import reason


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a run on all ranks.

    Attributes:
        status: "right", "refused", "failed" or "invalid".
        kind: the reason of a refusal; of a failure what is to stay the same while it shrinks.
        text: a failure at length.
        traces: how many times a step that is right was traced.
    """

    status: str
    kind: str = ""
    text: str = ""
    excused: int = 0
    exact: bool = False
    traces: int = 0


def judge(programs: Sequence[Program], reports: Sequence[Report]) -> Verdict:
    """Put together what the ranks said of one run."""
    if any(r.status == "invalid" for r in reports):
        return Verdict("invalid", reports[0].kind, reports[0].text)
    excused, exact = max(r.excused for r in reports), all(r.exact for r in reports)
    bad = [(rank, r) for rank, r in enumerate(reports) if r.status in ("wrong", "crashed")]
    if bad:
        text = "\n".join(f"rank {rank}: {r.status}, {r.kind}\n{r.text}" for rank, r in bad)
        return Verdict("failed", f"{bad[0][1].status} {bad[0][1].kind}", text, excused, exact)
    refused = [(rank, r) for rank, r in enumerate(reports) if r.status == "refused"]
    if refused:
        rank, first = refused[0]
        if len(refused) < len(reports):
            return Verdict(
                "failed", "refused on some ranks", f"rank {rank}: {first.kind}: {first.text}", excused, exact
            )
        reasons = [found for program in programs if (found := reason(program, first)) is not None]
        if reasons:
            return Verdict("refused", f"{first.kind}: {reasons[0]}", first.text, excused, exact)
        return Verdict("failed", f"refused {first.kind}: {_essence(first.text)}", first.text, excused, exact)
    for call, (mine, *others) in enumerate(zip(*(r.bits for r in reports), strict=False)):
        for rank, other in enumerate(others, 1):
            paths = [path for (path, x), (_, y) in zip(mine, other, strict=False) if x != y]
            if paths:
                text = (
                    f"call {call}: ranks 0 and {rank} hold different bits in {', '.join(paths)}, which are called equal"
                )
                return Verdict("failed", "different bits", text, excused, exact)
    return Verdict("right", "", "", excused, exact, max(r.traces for r in reports))


def _essence(text: str) -> str:
    """The first line of an error, without numbers and names of its own."""
    return re.sub(r"\d+|'[^']*'", "_", text.splitlines()[0])[:120] if text else ""
