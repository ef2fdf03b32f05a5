"""How Sphinx builds the documents into a site: `make site`. Every warning is an error there."""

from __future__ import annotations

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
# fdp itself, whose docstrings are the reference; what checks them, for the tests as well; and Sphinx's extension.
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "oracles"), str(ROOT / "docs" / "_extensions")]

import fdp  # noqa: E402

project = "fdp"
author = "fdp contributors"
project_copyright = "fdp contributors, BSD-3-Clause"
version = release = fdp.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "public_names",
]
exclude_patterns = ["_extensions"]

# The headings of GitHub, so that a link to a section works there and here.
myst_heading_anchors = 4
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Dashes become typographic; quotation marks stay as they are typed, since many are part of code.
smartquotes_action = "D"
# A single backtick is code in a docstring, as in Markdown.
default_role = "code"
highlight_language = "text"
pygments_style = "default"

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_preprocess_types = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "fdp"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_sidebars = {"index": []}
html_theme_options = {
    "logo": {"text": "fdp"},
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "navigation_depth": 2,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
