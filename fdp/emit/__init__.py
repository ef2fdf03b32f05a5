"""`Plan` -> callable: write the program, place its results, agree with the other ranks, run.

accesses, views, donation, constants, forms -> places; bindings, layout, lines -> program; arena, agreement and
signature -> emitted;
check; compiled, in place of places and program, for a step that is compiled
"""

from fdp.emit.check import Again, check_emitted, check_lies, if_memory_allows
from fdp.emit.compiled import resolve_options, unwrap_compiled
from fdp.emit.compiled.check import check_again, check_compiled
from fdp.emit.compiled.together import compile_together
from fdp.emit.emitted import BREAK_REASON, Emitted, emit_plan

__all__ = [
    "BREAK_REASON",
    "Again",
    "Emitted",
    "check_again",
    "check_compiled",
    "check_emitted",
    "check_lies",
    "compile_together",
    "emit_plan",
    "if_memory_allows",
    "resolve_options",
    "unwrap_compiled",
]
