"""The site that `make site` builds, as far as it can be judged without its generator.

All pages are in the navigation, all public names are in the reference with whole docstrings, and the notebook is the
page that it is made of.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import re
from typing import Any

import pytest
from docstring_gaps import gaps_of, gaps_of_public_names, public_names
from documents import Block, check_output, run_on_ranks
from torchrun import ROOT

DOCS = ROOT / "docs"
SECTIONS = ("tutorial", "how-to", "reference", "explanation")


def in_navigation(page: pathlib.Path) -> list[pathlib.Path]:
    """The pages that a page has below it in the navigation."""
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    names = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    return [page.parent / f"{name}.md" for name in names]


def test_the_four_sections_are_those_of_diataxis() -> None:
    assert in_navigation(DOCS / "index.md") == [DOCS / section / "index.md" for section in SECTIONS]
    assert list(DOCS.glob("*.md")) == [DOCS / "index.md"]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_page_of_a_section_is_once_in_the_navigation_and_linked_from_its_first_page(section: str) -> None:
    first = DOCS / section / "index.md"
    assert sorted([first, *in_navigation(first)]) == sorted((DOCS / section).glob("*.md"))
    links = set(re.findall(r"\]\(([\w-]+\.md)\)", first.read_text()))
    assert links == {page.name for page in in_navigation(first)}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*/*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_says_first_what_it_is_for(page: pathlib.Path) -> None:
    title, first = page.read_text().split("\n\n")[:2]
    assert title.startswith("# ")
    assert re.match(r"This (page|section) ", first)


def test_pages_that_were_not_run_say_so_first() -> None:
    for name in ("slurm", "kubernetes", "ray", "accelerate", "several-hosts"):
        assert re.search(r"\bnot run\b|\bwas run\b|\bwere run\b", (DOCS / "how-to" / f"{name}.md").read_text()[:600])


def test_every_public_name_is_once_in_the_reference() -> None:
    pages = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    found = re.findall(r"^\.\. auto(?:function|class|exception):: (\S+)$", pages, re.MULTILINE)
    assert sorted(found) == sorted(public_names())


def test_no_public_docstring_has_a_gap() -> None:
    assert gaps_of_public_names() == []


def test_environment_variables_are_in_the_reference() -> None:
    read = {
        name for file in (ROOT / "fdp").rglob("*.py") for name in re.findall(r'environ.*?"(FDP_\w+)"', file.read_text())
    }
    listed = set(re.findall(r"^\| `(FDP_\w+)`", (DOCS / "reference" / "environment.md").read_text(), re.MULTILINE))
    assert read == listed


def test_a_gap_in_a_class_is_seen() -> None:
    class Bad:
        """A promise."""

        def method(self, x: int) -> int:
            """A promise."""
            return x

        @property
        def size(self) -> int:
            return 1

    assert gaps_of("Bad", Bad) == ["Bad.method: Args: x", "Bad.method: Returns", "Bad.size: a docstring"]


# The notebook


def notebook_module() -> Any:
    spec = importlib.util.spec_from_file_location("notebook", DOCS / "_extensions" / "notebook.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notebook_is_made_of_the_page() -> None:
    made = notebook_module()
    assert made.NOTEBOOK.read_text() == made.text_of(made.notebook_of(made.PAGE.read_text())), (
        "python docs/_extensions/notebook.py writes it anew"
    )


def test_the_notebook_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell, as a person runs it; the cells that write and launch a program as what their first line says."""
    monkeypatch.chdir(tmp_path)
    made = notebook_module()
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(made.NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    launched = 0
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        stated = "".join("".join(output["text"]) for output in cell["outputs"]) or None
        if source.startswith("%%writefile "):
            file, _, text = source.removeprefix("%%writefile ").partition("\n")
            pathlib.Path(file).write_text(text)
        elif source.startswith("!"):
            assert source.startswith(made.LAUNCH)
            file = source.split()[-1]
            run_on_ranks(Block(number, (f"file={file}",), pathlib.Path(file).read_text(), stated), tmp_path)
            launched += 1
        else:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                # In a notebook a cell is a file, with a name that nobody chose: the page names it.
                exec(compile(source, "first.py", "exec"), names)
            check_output(Block(number, (), source, stated), printed.getvalue())
    assert launched == 1 and len(cells) > 8
    assert os.listdir(tmp_path) == ["two.py"]
