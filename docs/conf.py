"""Sphinx configuration: `sphinx-build -W --keep-going -b html docs docs/_build/html`.

Why Sphinx: MkDocs 1 and its Material theme get no more fixes (Material's ended in November 2026),
and their successor is before its first stable release. Sphinx, MyST, sphinx-click and Furo are kept
up, read the Markdown that a forge shows too, and make pages that load nothing from elsewhere.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tuner  # noqa: E402 - found by the line above
from tuner.app.calculator import calculator_html  # noqa: E402
from tuner.predict.shipped import shipped  # noqa: E402

project = "tuner"
author = "the authors of tuner"
version = release = tuner.__version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

# Markdown: anchors of headings as a forge makes them, so that links work in both places.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

smartquotes = False  # `--option` has two hyphens, and quotes in examples can be typed

# Docstrings are prose in which single backticks are names.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "tuner"
html_static_path = ["_static"]
html_css_files = ["tuner.css"]
html_copy_source = False
html_show_sourcelink = False
# Furo's styles for both colour schemes; nothing of it is fetched from elsewhere.
pygments_style = "default"
pygments_dark_style = "github-dark"
html_theme_options = {"navigation_with_keys": True}


def setup(app: Sphinx) -> None:
    """Links to the repository's files, which lie outside this folder; a forge shows them too."""
    app.add_lexer("mermaid", TextLexer)  # forges draw it; here it is text
    app.connect("doctree-read", name_folders)
    app.connect("build-finished", write_calculator)
    app.connect("autodoc-process-docstring", show_code)
    app.connect("sphinx-click-process-epilog", show_examples)


def show_code(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Indented parts of a docstring are code."""
    shown: list[str] = []
    for number, line in enumerate(lines):
        begins = line.startswith("    ") and number and not lines[number - 1].strip()
        if begins and not next((s for s in reversed(shown) if s.strip()), "").startswith("    "):
            shown += [".. code-block:: python", ""]
        shown.append(line)
    lines[:] = shown


def show_examples(app: Sphinx, context: object, lines: list[str]) -> None:
    """The command lines below a command's help are code too."""
    text = [line.lstrip("| ") for line in lines]
    commands = [line for line in text if line.startswith("tuner ")]
    if commands:
        lines[:] = ["Examples:", "", ".. code-block:: sh", "", *(f"   {c}" for c in commands), ""]


def name_folders(app: Sphinx, doctree: nodes.document) -> None:
    """A link to a folder of the repository is its name here: a site has no page for it."""
    page = Path(app.env.doc2path(app.env.docname))
    for link in list(doctree.findall(addnodes.pending_xref)):
        folder = Path(os.path.normpath(page.parent / link["reftarget"]))
        if link["reftype"] == "myst" and folder.is_dir() and ROOT in folder.parents:
            link.replace_self(link.children)


def write_calculator(app: Sphinx, error: Exception | None) -> None:
    """The calculator, made anew, beside the pages."""
    if error is None and app.builder.format == "html":
        page = calculator_html(shipped())
        (Path(app.outdir) / "calculator.html").write_text(page, "utf-8")
