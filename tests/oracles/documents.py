"""The blocks of a document: how they are read off, run, and compared with what the document says they print.

A block fenced as `python` runs in a world of one; the blocks of one document share their names, in order.
Words behind `python` change that:

- `file=NAME`: the file name that messages and plans show; lines count from the first of the block.
- `torchrun`: the block is a program of its own and runs on two ranks under torchrun (written
  `no-run torchrun`, since programs that read documents in one process must leave it alone).
- `ranks=NUMBER`: it runs on so many ranks instead.
- `no-run` alone: the block is only to be read.

A block fenced as `output` right behind one that runs is all that it prints; `...` stands for any text.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import pathlib
import re
import sys
import types
import warnings
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from programs import end_ranks, start_ranks
from torchrun import RANKS, ROOT, torchrun

DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEADLINE_S = 150


@dataclass(frozen=True)
class Block:
    """A Python block of a document, and what it is said to print (None: nothing is said)."""

    line: int
    words: tuple[str, ...]
    source: str
    output: str | None

    @property
    def file(self) -> str:
        return next((word.removeprefix("file=") for word in self.words if word.startswith("file=")), "example.py")

    @property
    def runs(self) -> bool:
        return "no-run" not in self.words


def blocks_of(text: str, document: str = "text") -> list[Block]:
    """Read off the Python blocks of a document, each with the output block right behind it."""
    found: list[Block] = []
    end_of_last = None
    for fence in FENCE.finditer(text):
        language, words, body = fence[1], tuple(fence[2].split()), fence[3]
        line = text.count("\n", 0, fence.start()) + 1
        if language == "output":
            if end_of_last is None or text[end_of_last : fence.start()].strip():
                raise AssertionError(f"{document}, line {line}: an output block with no python block right before it")
            last = found.pop()
            found.append(Block(last.line, last.words, last.source, body))
        elif language == "python":
            found.append(Block(line, words, body, None))
        end_of_last = fence.end() if language == "python" else None
    return found


def check_output(block: Block, printed: str) -> None:
    """Compare what a block printed with what the document says."""
    checker, want = doctest.OutputChecker(), block.output
    if want is not None and not checker.check_output(want, printed, doctest.ELLIPSIS):
        raise AssertionError(
            f"the block at line {block.line} does not print what the document says.\n"
            f"--- the document\n{want}--- printed\n{printed}"
        )


def run_here(text: str) -> None:
    """Run the blocks of a document that run in one process, in order, as one program."""
    # As a module that can be found: a dataclass looks up the one that it was written in.
    module = sys.modules["__document__"] = types.ModuleType("__document__")
    names: dict[str, Any] = vars(module)
    for block in blocks_of(text):
        if not block.runs:
            continue
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), warnings.catch_warnings():
                warnings.simplefilter("error")
                exec(compile(block.source, block.file, "exec"), names)
        except Exception as error:
            raise AssertionError(f"the block at line {block.line} raised {error!r}") from error
        check_output(block, printed.getvalue())


def run_on_ranks(block: Block, folder: pathlib.Path, by_torchrun: bool = False) -> None:
    """Run a block as a program on two ranks, or as many as it says; only their standard output is compared.

    The ranks get the variables that torchrun sets, and come from a process that has torch imported already: torchrun
    and its ranks would each import it anew, which takes most of the time.
    """
    program = folder / block.file
    program.write_text(block.source)
    run = _by_torchrun if by_torchrun else _by_processes
    ranks = next((int(word.removeprefix("ranks=")) for word in block.words if word.startswith("ranks=")), RANKS)
    failed, printed, errors = run(program, ranks)
    if failed:
        raise AssertionError(f"the block at line {block.line} failed:\n{printed}\n{errors[-4000:]}")
    check_output(block, printed)


def _by_torchrun(program: pathlib.Path, ranks: int) -> tuple[bool, str, str]:
    done = torchrun(program, ranks=ranks)
    return bool(done.returncode), done.stdout, done.stderr


def _by_processes(program: pathlib.Path, ranks: int) -> tuple[bool, str, str]:
    # Held here, as torchrun's agent holds it: it outlives a rank that ends.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": str(store.port)}
    started = start_ranks(program, (), ranks, forked=range(ranks), **agent)
    end_ranks(started, DEADLINE_S)
    printed, errors = zip(*(process.communicate() for process in started), strict=True)
    return any(process.returncode != 0 for process in started), "".join(printed), "".join(errors)


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))
