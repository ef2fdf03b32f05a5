"""`Plan` -> program: where values lie (memory/), what is called (codegen/), or one compiled graph (compiled/).

memory -> codegen -> proved -> compiled
"""

from fdp.emit.codegen.program import Program, write_program
from fdp.emit.compiled import compile_program, resolve_options, unwrap_compiled

__all__ = ["Program", "compile_program", "resolve_options", "unwrap_compiled", "write_program"]
