"""`Plan` -> callable: write the program, place its results, agree with the other ranks, run.

accesses, views, donation, constants, forms -> places; bindings, layout, lines -> program; arena, agreement -> emitted;
check
"""

from fdp.emit.agreement import announce_failure
from fdp.emit.check import check_emitted
from fdp.emit.emitted import Emitted, emit_plan

__all__ = ["Emitted", "announce_failure", "check_emitted", "emit_plan"]
