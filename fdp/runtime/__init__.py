"""Running a program: its memory, its messages under way, and what ranks agree on before and at each call.

arena, wide_mean -> buffers -> order -> in_flight -> proofs -> residence; agreement -> consensus; signature,
closed_over, replication -> emitted
"""

from fdp.runtime.emitted import BREAK_REASON, Emitted, emit_plan

__all__ = ["BREAK_REASON", "Emitted", "emit_plan"]


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]
