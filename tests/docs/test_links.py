"""Links between the files of the project lead somewhere, and files that a document names are there."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(path: pathlib.Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_of_python_that_a_document_names_are_there(path: pathlib.Path) -> None:
    # By their path from the root of the project, from the package, or from the tests.
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", path.read_text())
    assert [name for name in named if not any((ROOT / top / name).is_file() for top in ("", "fdp", "tests"))] == []
