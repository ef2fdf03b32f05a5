"""Whatever becomes of a rank that talks by NCCL, every other rank raises within seconds, and names it.

NCCL does not block the thread that starts a message: what waits is the card. So a rank notices in its next call, and a
thread aborts the group some seconds after a rank is known to be gone, which ends what waits for the card.
"""

from __future__ import annotations

import signal

import cards
import pytest
from cards import needs_a_card
from faulty_ranks import is_remedied, train

pytestmark = needs_a_card
LIVENESS_S = 3
ABORTS_S = 8
"""A thread that looks once a second aborts the group five seconds after a rank is known to be gone."""


@pytest.mark.parametrize(
    ("kind", "reason", "limit_s"),
    [
        ("killed between steps", "died", 10 + ABORTS_S),
        ("killed in the first call", "died", 15),
        ("frozen", "frozen", 5 + LIVENESS_S + ABORTS_S),
        ("raised in a step", "raised", 10 + ABORTS_S),
        ("raised in a loader", "raised", 10 + ABORTS_S),
        ("destroyed its group", "left", 10 + ABORTS_S),
    ],
)
def test_the_other_rank_names_it(kind: str, reason: str, limit_s: float) -> None:
    one, other = cards.run_fresh(
        2, train, kind, 1, calls=40, device="cuda", env={"FDP_LIVENESS_S": str(LIVENESS_S)}, deadline_s=60, grace_s=40
    )
    assert other.ok or other.exitcode == -signal.SIGKILL, other.describe()
    assert one.ok, one.describe()
    said = one.value
    assert (said["error"], said["ranks"], said["reason"]) == ("PeerError", (1,), reason), said
    assert said["after_s"] < limit_s, said
    assert is_remedied(said["text"]), said


def test_a_rank_that_is_slow_is_waited_for() -> None:
    for outcome in cards.run_fresh(
        2, train, "asleep", 1, 6.0, device="cuda", env={"FDP_LIVENESS_S": str(LIVENESS_S)}, deadline_s=60
    ):
        assert outcome.ok and not outcome.value["error"], outcome.describe()
