"""What `make release-check` finds without building anything: one version, wherever it is written."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import pytest

import fdp

FILES = "pyproject.toml", "fdp/__init__.py", "CITATION.cff"


@pytest.fixture
def check() -> Any:
    path = pathlib.Path(__file__).parents[1] / ".ci" / "release_check.py"
    spec = importlib.util.spec_from_file_location("release_check", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_is_the_same_everywhere(check: Any) -> None:
    assert check.version() == fdp.__version__


@pytest.mark.parametrize("file", FILES)
def test_another_version_in_one_file_is_noticed(
    file: str, check: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fdp").mkdir()
    for name in FILES:
        text = (check.ROOT / name).read_text()
        (tmp_path / name).write_text(text.replace(fdp.__version__, "9.9.9") if name == file else text)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="versions differ"):
        check.version()
