"""A fault for the fuzzer to find: what was emitted takes the minimum where the step takes the maximum.

`python -m fuzz.fault SCRIPT` runs a script that stands alone with this fault in fdp.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fdp.emit import proved
from fdp.emit.codegen import bindings


@contextmanager
def emitter_takes_the_minimum() -> Iterator[None]:
    """Bind `maximum` to the wrong operator, as the emitter does it: the trace, and the step by itself, are right.

    The validator would refuse such a program before it runs; it is left out.
    """
    search, known = bindings._search, dict(bindings._known)
    verify = proved.verify_program

    def wrong(operator: Any, args: Any, kwargs: Any) -> Any:
        if operator._schema.name == "aten::maximum":
            return getattr(torch.ops.aten.minimum, operator._overloadname)._op
        return search(operator, args, kwargs)

    proved.verify_program = lambda *args: None
    bindings._search = wrong
    bindings._known.clear()
    try:
        yield
    finally:
        proved.verify_program = verify
        bindings._search = search
        bindings._known.clear()
        bindings._known.update(known)


if __name__ == "__main__":
    with emitter_takes_the_minimum():
        runpy.run_path(sys.argv[1], run_name="__main__")
