"""What the documents show is what happens: their Python blocks run, and print what they are said to print.

A block fenced as `python` runs in a world of one; the blocks of one document share their names, in order.
Words behind `python` change that:

- `file=NAME`: the file name that messages and plans show; lines count from the first of the block.
- `torchrun`: the block is a program of its own and runs on two ranks under torchrun (written
  `no-run torchrun`, since programs that read documents in one process must leave it alone).
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
import textwrap
import types
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from programs import end_ranks, start_ranks
from torchrun import RANKS, torchrun

ROOT = pathlib.Path(__file__).resolve().parents[2]
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
    """Run a block as a program on two ranks; only their standard output is compared.

    The ranks get the variables that torchrun sets, and come from a process that has torch imported already: torchrun
    and its ranks would each import it anew, which takes most of the time.
    """
    program = folder / block.file
    program.write_text(block.source)
    run = _by_torchrun if by_torchrun else _by_processes
    failed, printed, errors = run(program)
    if failed:
        raise AssertionError(f"the block at line {block.line} failed:\n{printed}\n{errors[-4000:]}")
    check_output(block, printed)


def _by_torchrun(program: pathlib.Path) -> tuple[bool, str, str]:
    done = torchrun(program)
    return bool(done.returncode), done.stdout, done.stderr


def _by_processes(program: pathlib.Path) -> tuple[bool, str, str]:
    # Held here, as torchrun's agent holds it: it outlives a rank that ends.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": str(store.port)}
    started = start_ranks(program, (), RANKS, forked=range(RANKS), **agent)
    end_ranks(started, DEADLINE_S)
    printed, errors = zip(*(process.communicate() for process in started), strict=True)
    return any(process.returncode != 0 for process in started), "".join(printed), "".join(errors)


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


PROGRAMS = [
    pytest.param(block, id=f"{name_of(path)}:{block.line}")
    for path in DOCUMENTS
    for block in blocks_of(path.read_text(), name_of(path))
    if "torchrun" in block.words
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_blocks_print_what_the_document_says(
    path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_here(path.read_text())


@pytest.mark.parametrize("block", PROGRAMS)
def test_program_on_two_ranks_prints_what_the_document_says(block: Block, tmp_path: pathlib.Path) -> None:
    # The first one as a reader would launch it.
    run_on_ranks(block, tmp_path, by_torchrun=block is PROGRAMS[0].values[0])


def test_the_readme_shows_a_whole_step_on_its_first_screen() -> None:
    first = blocks_of((ROOT / "README.md").read_text())[0]
    assert first.runs and first.output is not None
    assert "@fdp.data_parallel" in first.source
    assert len(first.source.splitlines()) <= 20
    assert first.line <= 15


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for path in DOCUMENTS for target in re.findall(r"`make ([\w-]+)`", path.read_text())}
    assert named and named <= targets


# The rules above are worth something only if they can fail.

PRINTS_FOUR = "```python\nprint(2 + 2)\n```\n"


@pytest.mark.parametrize(
    "text",
    [
        PRINTS_FOUR + "```output\n5\n```\n",
        PRINTS_FOUR + "```output\n4\n5\n```\n",
        PRINTS_FOUR + "\n\n```output\n\n```\n",
        "```python\nx = 1\n```\n```output\n1\n```\n",
        "```python\nundefined\n```\n",
        "```python\nimport warnings; warnings.warn('w')\n```\n",
        "```python\nx = 1\n```\n```python\nprint(x)\n```\n```output\n2\n```\n",
        PRINTS_FOUR + "Words between.\n\n```output\n4\n```\n",
        "```output\n4\n```\n",
    ],
)
def test_a_wrong_document_is_seen(text: str) -> None:
    with pytest.raises(AssertionError, match="line"):
        run_here(text)


def test_a_right_document_passes() -> None:
    run_here(
        PRINTS_FOUR + "\n```output\n4\n```\n```python no-run\nundefined\n```\n"
        "```python file=here.py\nprint((lambda: 0).__code__.co_filename, 'and more')\n```\n"
        "```output\nhere.py ...\n```\n"
    )


def test_a_wrong_program_on_two_ranks_is_seen(tmp_path: pathlib.Path) -> None:
    source = textwrap.dedent(
        """
        import os
        if os.environ["RANK"] == "0":
            print("ranks:", os.environ["WORLD_SIZE"])
        """
    )
    with pytest.raises(AssertionError, match=r"does not print(.|\n)*ranks: 3\n--- printed\nranks: 2\n"):
        run_on_ranks(Block(1, ("torchrun",), source, "ranks: 3\n"), tmp_path)
