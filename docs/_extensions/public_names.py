"""Sphinx's view of fdp's public names: each has to be on a page with a whole docstring, and code that names one links.

A name that no page has, and what a docstring lacks (an argument, a result, an error, an example), are warnings, and so
fail `make site`. The tests ask the same questions without Sphinx, with the same functions.
"""

from __future__ import annotations

import re
from typing import Any

from docstring_gaps import gaps_of_public_names, public_names
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

LOGGER = logging.getLogger(__name__)
NAME = re.compile(r"(fdp\.[\w.]+|[A-Z]\w+(?:\.\w+)?)(?:\(.*\))?", re.DOTALL)


class LinkPublicNames(SphinxPostTransform):  # type: ignore[misc]
    """Make inline code such as `fdp.pmean(loss)` or `Plan.emit` a link to the reference."""

    default_priority = 200

    def run(self, **kwargs: Any) -> None:
        """Look at all inline code of the page."""
        known = self.env.domains["py"].objects
        for literal in list(self.document.findall(nodes.literal)):
            if _is_part_of(literal, (nodes.reference, nodes.title, nodes.term)):
                continue
            match = NAME.fullmatch(literal.astext())
            name = match and next((n for n in (match[1], f"fdp.{match[1]}") if n in known), None)
            if not name:
                continue
            entry = known[name]
            link = make_refnode(
                self.app.builder, self.env.docname, entry.docname, entry.node_id, literal.deepcopy(), name
            )
            literal.replace_self(link)


def _is_part_of(node: nodes.Node, kinds: tuple[type, ...]) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, kinds):
            return True
    return False


MADE_BY_FDP = {"fdp.Step", "fdp.Trace", "fdp.Plan", "fdp.Timeline", "fdp.Scaling"}
"""Classes whose objects functions return. Nobody calls them, so the page leaves out what they would be called with."""


def leave_out_constructor(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, None] | None:
    """Show no signature of a class that is not called; None leaves it to Sphinx."""
    return ("", None) if what == "class" and name in MADE_BY_FDP else None


def check(app: Sphinx, env: Any) -> None:
    """Warn of each public name that no page has, and of each gap in a docstring."""
    known = env.domains["py"].objects
    for name in public_names():
        if name not in known:
            LOGGER.warning("%s is public, and on no page of the reference", name)
    for gap in gaps_of_public_names():
        LOGGER.warning("%s is not documented", gap)


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx of all of it."""
    app.add_post_transform(LinkPublicNames)
    app.connect("autodoc-process-signature", leave_out_constructor)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
