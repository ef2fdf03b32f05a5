"""Links between the files of the project lead somewhere, and to a section; files that a document names are there."""

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


def sections(document: pathlib.Path) -> set[str]:
    """The anchors of its headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_sections_lead_to_one(path: pathlib.Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]*\.md)?#([^)\s]+)\)", path.read_text())
    targets = [((path.parent / page if page else path), anchor) for page, anchor in links]
    assert [f"{page.name}#{anchor}" for page, anchor in targets if anchor not in sections(page)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_of_python_that_a_document_names_are_there(path: pathlib.Path) -> None:
    # By their path from the root of the project, from the package, or from the tests.
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", path.read_text())
    assert [name for name in named if not any((ROOT / top / name).is_file() for top in ("", "fdp", "tests"))] == []
