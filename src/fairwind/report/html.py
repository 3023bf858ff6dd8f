"""Self-contained pages: their frame, tables, pairs and charts; charts as PDF and PNG files too."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import altair as alt

from fairwind.report import vega
from fairwind.report.table import Measure, display_name, mean_and_spread, seed_count
from fairwind.runs import cache as code_cache
from fairwind.runs.files import write_atomic
from fairwind.runs.schema import Findings, OverSeeds

Spec = dict[str, Any]  # of Vega-Lite

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.split(".")[:2])
EMBED = "window.vegaEmbed = vegaEmbed;"  # what the page's script needs of the libraries
WORST = '<span class="worst" role="img" aria-label="worst group">▾</span>'
FILE_WIDTH = 640  # points, of a figure saved as a file


def frame(
    *,
    kind: str,
    title: str,
    finding: str,
    facts: dict[str, str],
    notes: list[str],
    body: str,
    specs: dict[str, Spec],
    themes: dict[str, Spec],
    legend: str = "",
    banner: str = "",
    data: Mapping[str, object] | None = None,
    live: str = "",
) -> str:
    """A self-contained page: `body` is HTML, in which an element named like a spec shows its chart.

    `legend` is the HTML of the key to all charts, `data` what the page's script needs besides. A page that
    follows a run has a name for what it shows, `live`, and asks its server for the newest one.
    """
    pairs = "".join(
        f"<div><dt>{escaped(key)}</dt><dd>{escaped(value)}</dd></div>" for key, value in facts.items()
    )
    folder = Path(__file__).parent
    style, script, page = (
        (folder / f"page.{ending}").read_text(encoding="utf-8") for ending in ("css", "js", "html")
    )
    asking = 'page.newest = async () => (await fetch("state")).text();' if live else ""
    return Template(page).substitute(
        kind=escaped(kind),
        title=escape(title),
        banner=f'<p class="banner">{escaped(banner)}</p>' if banner else "",
        finding=escaped(finding),
        facts=pairs,
        notes=f'<p class="note">{"<br>".join(map(escaped, notes))}</p>' if notes else "",
        legend=legend,
        body=body,
        style=style,
        bundle=_bundle(),
        data=_script({"names": [], **(data or {}), "specs": specs, "themes": themes, "live": live}),
        live=asking,
        connect="; connect-src 'self'" if live else "",
        script=script,
    )


def section(heading: str, words: str, names: list[str], table: str = "") -> str:
    """A heading, a paragraph and charts by their names; `table` is HTML between them."""
    plots = "".join(chart_html(name) for name in names)
    head = f"<h2>{escaped(heading)}</h2><p>{escaped(words)}</p>"
    return f'<section>{head}{table}<div class="charts">{plots}</div></section>'


def chart_html(name: str) -> str:
    """Where the page's script draws a chart."""
    return f'<div class="plot"><div class="chart" id="{name}"></div></div>'


class Column(NamedTuple):
    """A measure of each algorithm in a table."""

    key: str
    measure: Measure
    values: list[OverSeeds | None]


def columns_of(results: Findings, measures: Sequence[Measure]) -> list[Column]:
    """The columns of a summary."""
    return [Column(m.key, m, [row.get(m.key) for row in results["summary"]]) for m in measures]


def measures_table(
    results: Findings,
    measures: Sequence[Measure],
    label: str = "Summary",
    ahead: Mapping[str, str] | None = None,
) -> str:
    """A row for each algorithm, and a column for each measure, as `columns_table` has them."""
    return columns_table(results, columns_of(results, measures), label, ahead=ahead)


def columns_table(
    results: Findings,
    columns: Sequence[Column],
    label: str,
    worst: Mapping[str, str] | None = None,
    ahead: Mapping[str, str] | None = None,
) -> str:
    """A row for each algorithm; `worst` names, by algorithm, the column that is marked in its row.

    `ahead` names, by column, the algorithm that is shown to be the best, which is bold.
    """
    head = "".join(
        f'<th scope="col" title="{escaped(c.measure.meaning)}">{escaped(c.measure.name)}</th>'
        for c in columns
    )
    body = ""
    for i, row in enumerate(results["summary"]):
        cells = ""
        for column in columns:
            mean, spread = mean_and_spread(column.values[i], column.measure, seed_count(results))
            value = f"<b>{mean}</b>" if (ahead or {}).get(column.key) == row["algorithm"] else mean
            mark = WORST if (worst or {}).get(row["algorithm"]) == column.key else ""
            cells += f"<td>{mark}{value}{f' <small>±{spread}</small>' if spread else ''}</td>"
        body += f'<tr><th scope="row">{escaped(display_name(row["algorithm"]))}</th>{cells}</tr>'
    return scroll(f"<thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody>", label)


def table_html(
    head: list[str], rows: list[list[str]], above: list[tuple[str, int]] | None = None, attributes: str = ""
) -> str:
    """A table of texts, the first of each row naming it; `above` are headings over several columns."""
    names = "".join(f'<th scope="col">{escaped(name)}</th>' if name else "<td></td>" for name in head)
    wide = "".join(
        f'<th scope="colgroup" colspan="{n}">{escaped(name)}</th>' if name else "<td></td>"
        for name, n in above or []
    )
    body = "".join(
        f'<tr><th scope="row">{escaped(first)}</th>'
        + "".join(f"<td>{escaped(c)}</td>" for c in rest)
        + "</tr>"
        for first, *rest in rows
    )
    tops = (f"<tr>{wide}</tr>" if wide else "") + f"<tr>{names}</tr>"
    return scroll(f"<thead>{tops}</thead><tbody>{body}</tbody>", head[0] or "Table", attributes)


def scroll(table: str, label: str, attributes: str = "") -> str:
    """A table that scrolls sideways, by keyboard too."""
    region = f'class="scroll" tabindex="0" role="region" aria-label="{escaped(label)}"'
    return f"<div {region}><table{f' {attributes}' if attributes else ''}>{table}</table></div>"


def pairs_html(pairs: Iterable[tuple[str, object]]) -> str:
    rows = "".join(
        f"<dt>{escaped(key.replace('_', ' '))}</dt><dd>{escaped(_plain(value))}</dd>" for key, value in pairs
    )
    return f'<dl class="pairs">{rows}</dl>'


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def escaped(text: str) -> str:
    """Escaped for HTML, with the number held to its percent sign."""
    return escape(text).replace(" %", "\u00a0%")


def plain_spec(chart: alt.Chart | alt.LayerChart) -> Spec:
    """A chart's spec without the colours that Altair puts in."""
    return {k: v for k, v in chart.to_dict().items() if k != "config"}


def write_figure(path: Path, spec: Spec, paper: Spec) -> list[Path]:
    """A chart as path.pdf and path.png."""
    sized = spec | {"width": FILE_WIDTH, "config": paper | {"background": "white", "padding": 12}}
    pdf = vega.call("vegalite_to_pdf", sized, vl_version=VEGA_LITE)
    png = vega.call("vegalite_to_png", sized, vl_version=VEGA_LITE, scale=2)
    return [write_atomic(path.with_suffix(".pdf"), pdf), write_atomic(path.with_suffix(".png"), png)]


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script, 0.9 MB; a second's work, hence kept."""
    made_of = repr((EMBED, VEGA_LITE, version("vl-convert-python")))
    name = f"{hashlib.sha256(made_of.encode()).hexdigest()[:24]}.js"
    if (kept := code_cache.read(name)) is not None:
        return kept.decode()
    made = vega.call("javascript_bundle", EMBED, vl_version=VEGA_LITE)
    code_cache.write(name, made)
    return made.decode()


def _script(value: object) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
