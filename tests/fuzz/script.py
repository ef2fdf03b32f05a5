"""A program that fails, as a script that needs fdp and torch alone."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from fuzz.compare import divides_exactly, rounds_by_itself
from fuzz.program import Program

_HERE = pathlib.Path(__file__).resolve().parent


def script(programs: Sequence[Program], why: str) -> str:
    """The text of a script that runs programs as one step, and prints what it expected and got."""
    heading = "\n".join(["# " + line for line in why.splitlines()[:30]])
    defines = "\n\n".join(
        program.text.replace("def define(", f"def define{n}(", 1) for n, program in enumerate(programs)
    )
    program = programs[0]
    o = program.options
    known = ", ".join(
        f"{name}={value!r}"
        for name, value in {
            "world": program.world, "calls": o.calls, "exact": [p.exact for p in programs], "wire": o.wire_dtype,
            "own": [p.owned for p in programs], "between": any(p.between for p in programs), "donate": o.donate,
            "shard": o.shard,
            "rounds": rounds_by_itself(programs) or not divides_exactly(programs[0].world),
        }.items()
    )  # fmt: skip
    listed = ", ".join(f"define{n}" for n in range(len(programs)))
    return "\n".join(
        [
            '"""Found by the fuzzer of fdp. Exits with 1 if the step is not what plain PyTorch computes."""',
            heading,
            "",
            "from __future__ import annotations",
            "",
            "import torch",
            "",
            "import fdp",
            "",
            "",
            defines,
            "",
            "def make_step(step):",
            f"    two_levels(always={program.seed % 2 == 1})",
            f"    made = fdp.data_parallel(step, group=mesh(), {program.settings})",
            f"    return {f'with_sharded_state(made, {program.seed % 3})' if o.shard else 'made'}",
            "",
            "",
            "# What follows is the same in all such scripts: fdp's functions in plain PyTorch, and a comparison.",
            "",
            _part("layout.py"),
            _part("exchanges.py"),
            _part("numbers.py"),
            _part("plain.py"),
            _part("placed.py"),
            _part("standalone.py"),
            'if __name__ == "__main__":',
            f"    raise SystemExit(main([{listed}], make_step, {known}))",
            "",
        ]
    )


def _part(name: str) -> str:
    """A file without what stands once in a script."""
    lines = (_HERE / name).read_text().splitlines()
    return "\n".join(
        line for line in lines if line != "from __future__ import annotations" and not line.startswith("from fuzz.")
    )
