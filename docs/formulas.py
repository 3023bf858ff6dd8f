"""Formulas of the pages, $inline$ or $$displayed$$, as MathML: an extension of Sphinx.

They are converted while the site is built, so pages need neither a script nor a network to show them. A
formula that cannot be converted is a warning, and so an error.
"""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger
from sphinx.writers.html5 import HTML5Translator

PAIRS = (("{", "}"), (r"\left", r"\right"), (r"\lVert", r"\rVert"), (r"\langle", r"\rangle"))
TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.S)
AS_IN_LATEX = (  # where browsers would space or stretch what docutils writes in another way
    (r'<mo class="mathopen">‖</mo>', '<mo form="prefix" stretchy="false">‖</mo>'),
    (r"<mo>([⟨⌈⌊])</mo>", r'<mo form="prefix" stretchy="false">\1</mo>'),
    (r"<mo>([‖⟩⌉⌋])</mo>", r'<mo form="postfix" stretchy="false">\1</mo>'),
    (r'<mo stretchy="false">/</mo>', '<mo lspace="0" rspace="0" stretchy="false">/</mo>'),
    (r"<mo>'</mo>", '<mo lspace="0" rspace="0">′</mo>'),
    (r"(<mo>&ApplyFunction;</mo>)(?!\s*<mo|\s*<mrow>\s*<mo)", r'\1<mspace width="0.1667em"></mspace>'),
)


def mathml(formula: str, displayed: bool = False) -> str:
    """A formula of LaTeX as an element of HTML; a `MathError` if it is not one."""
    if not formula.strip():
        raise MathError("empty")
    tokens = TOKEN.findall(formula)
    for opening, closing in PAIRS:  # docutils closes what is open, and drops what was not opened
        if tokens.count(opening) != tokens.count(closing):
            raise MathError(f"{opening} and {closing} are not in pairs")
    found = str(tex2mathml(formula, as_block=displayed))
    for written, meant in AS_IN_LATEX:
        found = re.sub(written, meant, found)
    return found


def visit(self: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Writes a formula, or warns with the place of it."""
    displayed = isinstance(node, nodes.math_block)
    try:
        found = mathml(node.astext(), displayed)
    except MathError as error:
        getLogger(__name__).warning("formula %r: %s", node.astext(), error, location=node)
    else:
        self.body.append(f'<div class="math">{found}</div>\n' if displayed else found)
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", inline_renderers=(visit, None), block_renderers=(visit, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
