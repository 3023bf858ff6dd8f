"""The documentation site: `make docs` builds it into site/, and a warning is an error.

Pages are plain Markdown where possible, so that they read well in the repository, too. Links are resolved
here: pages at the repository's root are pages of the site, and files outside docs/ become downloads.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from myst_parser.sphinx_ import Parser
from sphinx.application import Sphinx

import fairwind

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))

from generated import with_generated  # noqa: E402

project = "Fairwind"
author = "The Fairwind authors"
release = version = fairwind.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "formulas"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
exclude_patterns = ["**.ipynb_checkpoints"]

html_theme = "furo"
html_title = "Fairwind"
html_static_path = ["_static"]
html_css_files = ["fairwind.css"]
html_copy_source = html_show_sphinx = html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e99", "color-brand-content": "#0b6e99"},
    "dark_css_variables": {"color-brand-primary": "#5bb8dd", "color-brand-content": "#5bb8dd"},
}
pygments_style, pygments_dark_style = "tango", "monokai"
highlight_language = "none"

myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = False  # "$5 and $6" are sums of money
myst_update_mathjax = False
html_math_renderer = "mathml"  # formulas.py

default_role = "literal"  # of docstrings, where `x` is code
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 80

PROJECT = ("README", "DESIGN", "CONTRIBUTING", "CHANGELOG")  # docs/project/NAME.md shows the root's NAME.md
LINK = re.compile(r"\[([^\[\]]*)\]\((?!https?:|#|\w+:)([^()#\s]+)(#[^()\s]*)?\)")


def read_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """A page's text with links that the site can follow; a folder is named only."""
    to, base = (DOCS / docname).parent, (DOCS / docname).parent
    if docname.startswith("project/"):
        base = ROOT
        source[0] = (ROOT / f"{docname.removeprefix('project/').upper()}.md").read_text()

    def resolved(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        place = (base / target).resolve()
        if place.parent == ROOT and place.stem in PROJECT:
            place = DOCS / "project" / place.name.lower()
        if place.is_dir():
            return str(text)
        if not place.exists():
            return link[0]
        scheme = "" if place.is_relative_to(DOCS) else "path:"
        return f"[{text}]({scheme}{os.path.relpath(place, to)}{anchor or ''})"

    source[0] = LINK.sub(resolved, with_generated(source[0]))


class Notebook(Parser):  # type: ignore[misc]
    """A Jupyter notebook as a page: its cells, and their outputs as they were saved."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        cells = json.loads(inputstring)["cells"]
        super().parse("\n\n".join(text for cell in cells for text in markdown(cell)), document)


def markdown(cell: dict[str, Any]) -> list[str]:
    """A cell of a notebook, and then its outputs."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    found = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {"text/plain": output.get("text", "")})
        if "image/png" in data:
            picture = "".join(data["image/png"]).replace("\n", "")
            found.append(f"![{cell['metadata'].get('alt', 'chart')}](data:image/png;base64,{picture})")
        elif text := "".join(data["text/plain"]).strip("\n"):
            found.append(f"```output\n{text}\n```")
    return found


def shorten(app: Sphinx, what: str, name: str, *signature: Any) -> tuple[str | None, str | None]:
    """A signature in which the union of all types of algorithm is called by its name."""
    union = r"~?fairwind\.contract\.Algorithm\[.*?GramAlgorithm\[[^]]*\]"
    given, back = (part and re.sub(union, "AnyAlgorithm", part) for part in signature[-2:])
    return given, back


def drop_aliases(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Says nothing of fields of named tuples that have nothing said about them."""
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", drop_aliases)
    app.connect("autodoc-process-signature", shorten)
    app.add_source_parser(Notebook)
    app.connect("source-read", read_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
