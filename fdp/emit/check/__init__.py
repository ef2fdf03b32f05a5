"""Is what was made for a step what the step computes? Compared before a signature first runs, and now and then later.

copies, leaves, held, other ranks -> side_by_side; replay, lockstep, rounding: why results differ;
of_program, again; lies: of steps that are not compared
"""

from fdp.emit.check.again import Again
from fdp.emit.check.copies import copy_of, give_back_memory
from fdp.emit.check.held import closed_over_unchanged, undisturbed
from fdp.emit.check.lies import check_lies
from fdp.emit.check.memory import if_memory_allows
from fdp.emit.check.of_program import check_emitted, check_graph
from fdp.emit.check.rounding import Excuses
from fdp.emit.check.side_by_side import Case, NotRunnable, On, SideBySide, positions_of

__all__ = [
    "Again",
    "Case",
    "Excuses",
    "NotRunnable",
    "On",
    "SideBySide",
    "check_emitted",
    "check_graph",
    "check_lies",
    "closed_over_unchanged",
    "copy_of",
    "give_back_memory",
    "if_memory_allows",
    "positions_of",
    "undisturbed",
]
