"""`Plan` -> one compiled program: forward, backward, messages and updates as a single graph, in the order of the plan.

options; barriers, draws -> graph -> passes -> inductor -> recording -> compiler
"""

from fdp.emit.compiled.compiler import compile_program
from fdp.emit.compiled.options import Options, resolve_options, unwrap_compiled
from fdp.emit.compiled.recording import why_not_recorded

__all__ = ["Options", "compile_program", "resolve_options", "unwrap_compiled", "why_not_recorded"]


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]
