"""The first hour as a notebook: `python docs/_extensions/notebook.py` writes it anew from the page.

Text becomes cells of Markdown. A block that runs becomes a cell with what it prints. A program for two ranks becomes a
cell that writes its file, and a cell that launches it.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

TUTORIAL = pathlib.Path(__file__).resolve().parents[1] / "tutorial"
PAGE, NOTEBOOK = TUTORIAL / "first-hour.md", TUTORIAL / "first-hour.ipynb"
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
LAUNCH = "!torchrun --standalone --nproc-per-node 2"
"""How the notebook runs a program on two ranks."""


def notebook_of(text: str) -> dict[str, Any]:
    """Turn a page into a notebook.

    Args:
        text: the page, in Markdown.

    Returns:
        The notebook, as its JSON has it.
    """
    cells: list[dict[str, Any]] = []
    end = 0
    for fence in FENCE.finditer(text):
        _add_text(cells, text[end : fence.start()])
        end = fence.end()
        language, words, body = fence[1], fence[2].split(), fence[3].rstrip("\n")
        if language == "output":
            cells[-1]["outputs"] = [{"name": "stdout", "output_type": "stream", "text": _lines(body + "\n")}]
        elif language != "python":
            _add_text(cells, fence[0])
        elif "torchrun" in words:
            file = next(word.removeprefix("file=") for word in words if word.startswith("file="))
            _add_code(cells, f"%%writefile {file}\n{body}")
            _add_code(cells, f"{LAUNCH} {file}")
        else:
            _add_code(cells, body)
    _add_text(cells, text[end:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _add_text(cells: list[dict[str, Any]], text: str) -> None:
    if text.strip():
        cells.append({"cell_type": "markdown", "metadata": {}, "source": _lines(text.strip())})


def _add_code(cells: list[dict[str, Any]], source: str) -> None:
    cells.append(
        {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": _lines(source)}
    )


def text_of(notebook: dict[str, Any]) -> str:
    """A notebook as its file has it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(text_of(notebook_of(PAGE.read_text())))
