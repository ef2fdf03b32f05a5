"""What the documents show is what happens: their Python blocks run, and print what they are said to print.

`documents` says which blocks run where.
"""

from __future__ import annotations

import pathlib
import re
import textwrap

import pytest
from documents import DOCUMENTS, Block, blocks_of, name_of, run_here, run_on_ranks
from samples import exhaustive
from torchrun import ROOT

# They compile steps, which takes as long as the programs of all other documents; tests/emit/compiled has such steps.
COMPILED = ("docs/how-to/compile.md", "docs/explanation/compiled.md")


def marks_of(path: pathlib.Path) -> tuple[pytest.MarkDecorator, ...]:
    return (exhaustive,) if name_of(path) in COMPILED else ()


PROGRAMS = [
    pytest.param(block, id=f"{name_of(path)}:{block.line}", marks=marks_of(path))
    for path in DOCUMENTS
    for block in blocks_of(path.read_text(), name_of(path))
    if "torchrun" in block.words
]


@pytest.mark.parametrize("path", [pytest.param(path, id=name_of(path), marks=marks_of(path)) for path in DOCUMENTS])
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
