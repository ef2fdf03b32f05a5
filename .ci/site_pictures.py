"""Looks at the web site in a browser: is a page wider than its window? And takes pictures, for people to look at.

    make site-pictures [ARGS="--out build/site-pictures"]

It opens every page of build/site as wide as a phone and as a desk, and prints each page that is wider than its window,
which makes it exit with 1, and how far tables go beyond the box in which they scroll. The theme lets an article scroll
where something in it is too wide; that counts as well. Code and tables have boxes of their own. The pictures show the
first page of each section, and one that is long, on both, light and dark. The browser is Chromium, as Qt brings it,
without a display.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")  # which needs rights that containers do not give
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--disable-gpu --hide-scrollbars")

from PyQt6.QtCore import QEventLoop, QTimer, QUrl
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

ROOT = pathlib.Path(__file__).resolve().parents[1]
WIDTHS = {"phone": 390, "desk": 1280}
PICTURED = (
    "index", "tutorial/index", "tutorial/first-hour", "how-to/index", "how-to/port-from-ddp", "reference/index",
    "reference/steps", "explanation/index", "explanation/benchmarks",
)  # fmt: skip
_LIMIT_MS = 60_000
_SETTLES_MS = 400
"""Fonts and pictures come after the page; what it takes until nothing moves."""

_LOOK = """JSON.stringify({
    wider: Math.max(...[document.documentElement, document.querySelector(".bd-article-container")].map(
        box => box.scrollWidth - box.clientWidth)),
    tables: [...document.querySelectorAll("table")].map(table => {
        let box = table;
        while (box && !["auto", "scroll"].includes(getComputedStyle(box).overflowX)) box = box.parentElement;
        return box ? Math.round(table.getBoundingClientRect().width - box.clientWidth) : 0;
    }).filter(beyond => beyond > 1),
})"""


def _wait_for(begin: Callable[[Callable[..., None]], Any]) -> list[Any]:
    """Begin something that calls back when it is done, and wait for that."""
    loop, found = QEventLoop(), list[Any]()

    def done(*results: Any) -> None:
        found.extend(results)
        loop.quit()

    begin(done)
    QTimer.singleShot(_LIMIT_MS, loop.quit)
    loop.exec()
    return found


class Browser:
    """A window that shows pages."""

    def __init__(self) -> None:
        self._application = QApplication(sys.argv[:1])  # which has to live as long
        self._view = QWebEngineView()
        self._view.show()

    def open(self, page: pathlib.Path, width: int, height: int = 900) -> None:
        """Show a page, in a window of a size in pixels."""
        self._view.resize(width, height)
        loaded = _wait_for(lambda done: (self._view.loadFinished.connect(done), self._view.load(QUrl(page.as_uri()))))
        self._view.loadFinished.disconnect()
        if loaded != [True]:
            raise RuntimeError(f"{page}: the browser could not load it")
        self._settle()

    def run(self, script: str) -> Any:
        """What a script returns on the page."""
        found = _wait_for(lambda done: self._view.page().runJavaScript(script, done))
        return found[0] if found else None

    def picture(self, theme: str, path: pathlib.Path) -> None:
        """Write what the window shows, in the light or the dark theme."""
        self.run(f"document.documentElement.dataset.theme = '{theme}'")
        self._settle()
        self._view.grab().save(str(path))

    def _settle(self) -> None:
        _wait_for(lambda done: QTimer.singleShot(_SETTLES_MS, done))


def main() -> int:
    """Look at every page, and take the pictures; 1 if a page is wider than its window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=pathlib.Path, default=ROOT / "build" / "site", help="default: build/site")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "site-pictures", help="for the pictures")
    args = parser.parse_args()
    site = args.site.resolve()
    pages = [page for page in sorted(site.rglob("*.html")) if "_static" not in page.relative_to(site).parts]
    if not pages:
        parser.error(f"{args.site} has no pages: run make site first")
    args.out.mkdir(parents=True, exist_ok=True)
    browser, too_wide = Browser(), 0
    for page in pages:
        name = str(page.relative_to(site).with_suffix(""))
        for place, width in WIDTHS.items():
            browser.open(page, width)
            seen = json.loads(browser.run(_LOOK))
            if seen["wider"] > 0:
                too_wide += 1
                print(f"{name}, {place}: {seen['wider']} pixels wider than its window")
            if seen["tables"]:
                print(f"{name}, {place}: tables scroll, by {', '.join(map(str, seen['tables']))} pixels")
            for theme in ("light", "dark") if name in PICTURED else ():
                browser.picture(theme, args.out / f"{name.replace('/', '-')}-{place}-{theme}.png")
    print(f"{len(pages)} pages at {len(WIDTHS)} widths, {too_wide} wider than their window; pictures in {args.out}")
    return int(too_wide > 0)


if __name__ == "__main__":
    sys.exit(main())
