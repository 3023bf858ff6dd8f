"""The report of a run directory: one self-contained page, and its figures as PDF and PNG files."""

import json
import math
from collections.abc import Iterable
from datetime import timedelta
from functools import cache
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import altair as alt
import vl_convert

from fairwind.files import write_atomic
from fairwind.report import charts
from fairwind.report.record import Record, read_record
from fairwind.report.table import (
    Measure,
    Results,
    best_rows,
    count,
    display_name,
    judged,
    mean_and_spread,
    measures,
    notes,
    reading,
    seed_count,
)

Spec = dict[str, Any]

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.split(".")[:2])
FILE_WIDTH = 640  # points, of a figure saved as a file


def write_report(directory: Path) -> list[Path]:
    """Write report.html and figures/ into a run directory; return the paths written."""
    record = read_record(directory)
    specs = figures(record)
    (directory / "figures").mkdir(exist_ok=True)
    written = [write_atomic(directory / "report.html", page(record, specs).encode())]
    paper = charts.theme(record.labels, "light")
    for name, spec in specs.items():
        written += write_figure(directory / "figures" / name, spec, paper)
    return written


def write_figure(path: Path, spec: Spec, paper: Spec) -> list[Path]:
    """A chart as path.pdf and path.png."""
    sized = spec | {"width": FILE_WIDTH, "config": paper | {"background": "white", "padding": 12}}
    pdf = vl_convert.vegalite_to_pdf(sized, vl_version=VEGA_LITE)
    png = vl_convert.vegalite_to_png(sized, vl_version=VEGA_LITE, scale=2)
    return [write_atomic(path.with_suffix(".pdf"), pdf), write_atomic(path.with_suffix(".png"), png)]


def figures(record: Record) -> dict[str, Spec]:
    """The Vega-Lite specs of the report by name, without colours (see `charts.theme`)."""
    drawn: dict[str, alt.Chart | alt.LayerChart | None] = {
        "average": charts.curves(record, "avg", f"Average over clients: {record.judged.axis}"),
        "worst30": charts.curves(record, "worst30", f"The worst-off 30 % of clients: {record.judged.axis}"),
        "distribution": charts.distribution(record),
        "certainty": charts.certainty(record),
        "clients": charts.clients(record),
    }
    return {name: plain_spec(chart) for name, chart in drawn.items() if chart is not None}


def plain_spec(chart: alt.Chart | alt.LayerChart) -> Spec:
    """A chart's spec without the colours that Altair puts in."""
    return {k: v for k, v in chart.to_dict().items() if k != "config"}


def page(record: Record, specs: dict[str, Spec]) -> str:
    """The whole page as HTML."""
    results = record.results
    themes = {mode: charts.theme(record.labels, mode) for mode in ("light", "dark")}
    names = [display_name(label) for label in record.labels]
    subject = names[0] if len(names) == 1 else f"{len(names)} algorithms"
    how = (
        "<section><h2>How this was run</h2><p>Enough to run it again.</p>"
        '<div class="columns">'
        f"<div><h3>Settings</h3>{_pairs(_flat(results['config']))}</div>"
        f"<div><h3>Environment</h3>{_pairs(results['environment'].items())}</div>"
        f"<div><h3>Time</h3>{_pairs(_timing(results['timing']))}</div>"
        "</div></section>"
    )
    summary = f"<section><h2>Summary</h2>{_summary(results)}</section>"
    return frame(
        kind="Fairwind report",
        title=f"{subject} on {results['setup']}",
        finding=finding(results),
        facts=_facts(results),
        notes=notes(results),
        body="\n".join([summary, *_sections(record, specs), how]),
        specs=specs,
        themes=themes,
    )


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
) -> str:
    """A self-contained page: `body` is HTML, in which an element named like a spec shows its chart."""
    pairs = "".join(
        f"<div><dt>{escaped(key)}</dt><dd>{escaped(value)}</dd></div>" for key, value in facts.items()
    )
    return Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8")).substitute(
        kind=escaped(kind),
        title=escape(title),
        finding=escaped(finding),
        facts=pairs,
        notes=f'<p class="note">{"<br>".join(map(escaped, notes))}</p>' if notes else "",
        body=body,
        specs=_script(specs),
        themes=_script(themes),
        bundle=_bundle(),
    )


def finding(results: Results) -> str:
    """One sentence: who serves the worst-off 30 % best, by how much, and what that does to the average."""
    score = judged(results)
    worst = {
        row["algorithm"]: row["worst30"] for row in results["summary"] if row["worst30"]["mean"] is not None
    }
    average = {
        row["algorithm"]: row["avg"]["mean"] for row in results["summary"] if row["avg"]["mean"] is not None
    }
    ranked = sorted(worst, key=lambda label: -score.sign * worst[label]["mean"])
    if not ranked or ranked[0] not in average:
        return f"No run ended with a defined {score.name}."
    first, name = ranked[0], display_name(ranked[0])
    reached = f"{score.name} of {score.text(worst[first]['mean'])}"
    if len(ranked) == 1:
        return (
            f"Under {name} clients reach {score.name} of {score.text(average[first])} on average, "
            f"the worst-off 30 % of them {score.text(worst[first]['mean'])}."
        )
    second = ranked[1]
    gap = abs(worst[first]["mean"] - worst[second]["mean"])
    same = 0.05 if score.kind == "accuracy" else 5e-4 * abs(worst[first]["mean"])
    top = max(average, key=lambda label: score.sign * average[label])
    if gap < same:
        tied = [display_name(x) for x in ranked if abs(worst[first]["mean"] - worst[x]["mean"]) < same]
        return (
            f"{_listed(tied)} serve the worst-off 30 % of clients equally well: {reached}; "
            f"the best average over all clients, {score.text(average[top])}, is {display_name(top)}’s."
        )
    if seed_count(results) == 1:
        doubt = " (one seed)"
    elif gap > math.hypot(worst[first]["std"] or 0, worst[second]["std"] or 0):
        doubt = ""
    else:
        doubt = ", which is within the spread of seeds"
    behind = abs(average[top] - average[first])
    if behind < same:
        verdict = "is the best too"
    else:
        verdict = f"is {score.gap(behind)} behind the best, {display_name(top)}’s"
    return (
        f"{name} serves the worst-off 30 % of clients best: {reached}, "
        f"{score.gap(gap)} ahead of {display_name(second)}, the next best{doubt}; "
        f"its average over all clients, {score.text(average[first])}, {verdict}."
    )


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _facts(results: Results) -> dict[str, str]:
    federation, seeds = results["federation"], seed_count(results)
    return {
        "federation": federation["name"],
        "clients": f"{federation['clients']:,}",
        "samples": f"{federation['train_samples']:,} to train, {federation['test_samples']:,} to test",
        "training samples of a client": (
            f"{federation['smallest']:,} to {federation['largest']:,}, median {federation['median']:,g}"
        ),
        "runs": f"{count(len(results['summary']), 'algorithm')} × {count(seeds, 'seed')}",
        "rounds": f"{max(run['rounds'] for run in results['runs']):,}",
    }


def _summary(results: Results) -> str:
    """The table of scores, and the other measures folded away below it."""
    shown = measures(results)
    meanings = "".join(f"<dt>{escaped(m.name)}</dt><dd>{escaped(m.meaning)}</dd>" for m in shown)
    score = judged(results)
    unit = ", in percent" if score.kind == "accuracy" else ", lower is better" if score.sign < 0 else ""
    return (
        f"<p>{escaped(score.title)} on the clients’ own test data after the last "
        f"round{unit}. {reading(results)}</p>"
        f"{measures_table(results, shown[:7])}{_further(results)}"
        "<details><summary>Other measures of fairness, and the losses</summary>"
        f"{measures_table(results, shown[7:])}</details>"
        f'<details><summary>What the columns mean</summary><dl class="pairs">{meanings}</dl></details>'
    )


def _further(results: Results) -> str:
    """A table for each score beside the main one."""
    tables = ""
    for score in (results.get("scores") or [])[1:]:
        rows = [{"algorithm": r["algorithm"], **r["scores"][score["name"]]} for r in results["summary"]]
        other = {**results, "scores": [score], "summary": rows}
        lower = ", lower is better" if score["kind"] == "lower" else ""
        table = measures_table(other, measures(other)[:5])
        tables += f"<h3>{escaped(judged(other).title)}{lower}</h3>{table}"
    return tables


def measures_table(results: Results, measures: tuple[Measure, ...]) -> str:
    best = {measure.key: best_rows(results, measure) for measure in measures}
    head = "".join(f'<th scope="col" title="{escaped(m.meaning)}">{escaped(m.name)}</th>' for m in measures)
    body = ""
    for row in results["summary"]:
        cells = ""
        for measure in measures:
            mean, spread = mean_and_spread(row, measure, seed_count(results))
            value = f"<b>{mean}</b>" if row["algorithm"] in best[measure.key] else mean
            cells += f"<td>{value}{f' <small>±{spread}</small>' if spread else ''}</td>"
        body += f'<tr><th scope="row">{escaped(display_name(row["algorithm"]))}</th>{cells}</tr>'
    return _scroll(f"<thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody>", "Summary")


def table_html(head: list[str], rows: list[list[str]], above: list[tuple[str, int]] | None = None) -> str:
    """A table of texts, the first of each row naming it; `above` are headings over several columns."""
    names = "".join(f'<th scope="col">{escaped(name)}</th>' for name in head)
    wide = "".join(f'<th scope="colgroup" colspan="{n}">{escaped(name)}</th>' for name, n in above or [])
    body = "".join(
        f'<tr><th scope="row">{escaped(first)}</th>'
        + "".join(f"<td>{escaped(c)}</td>" for c in rest)
        + "</tr>"
        for first, *rest in rows
    )
    tops = (f"<tr>{wide}</tr>" if wide else "") + f"<tr>{names}</tr>"
    return _scroll(f"<thead>{tops}</thead><tbody>{body}</tbody>", head[0] or "Table")


def _scroll(table: str, label: str) -> str:
    region = f'class="scroll" tabindex="0" role="region" aria-label="{escaped(label)}"'
    return f"<div {region}><table>{table}</table></div>"


def _sections(record: Record, specs: dict[str, Spec]) -> Iterable[str]:
    several = len(record.labels) > 1
    band = (
        f"Lines are means over {record.seeds} seeds; bands reach from the lowest seed to the highest."
        if record.seeds > 1
        else "One seed, so there is no band."
    )
    evaluated = len({row["round"] for row in record.history})
    if evaluated > charts.MAX_POINTS:
        band += f" Of {evaluated:,} evaluated rounds {charts.MAX_POINTS} are drawn, evenly spaced."
    hint = " Point at a round for its values; click a name to single it out." if several else ""
    yield section("Over the rounds", band + hint, ["average", "worst30"])

    side = "right" if record.judged.sign > 0 else "left"
    untested = record.score.shape[1] - len(charts.tested_clients(record))
    pooled = f"the clients of all {record.seeds} seeds together" if record.seeds > 1 else "all clients"
    yield section(
        "How clients are spread",
        f"Where the scores of clients lie after the last round, {pooled}, smoothed with a kernel "
        f"{charts.smoothing(record):.3g} wide. The further {side} the better, and the narrower the fairer."
        + (f" {count(untested, 'client')} without test samples left out." if untested else ""),
        ["distribution"],
    )
    if "certainty" in specs:
        yield section(
            "Certainty",
            "AdaFedAdam’s C is 1 plus the logarithm of how far local training went, in gradient steps. "
            f"The server’s step and memory scale with it; at C = 1 a round is one step of Adam. {band}",
            ["certainty"],
        )
    shown, tested = len(charts.shown_clients(record)), len(charts.tested_clients(record))
    sampled = (
        f" Of {tested:,} clients {shown} are shown, evenly spaced from the worst-off to the best-off."
        if shown < tested
        else ""
    )
    yield section(
        "Client by client",
        f"Each column is a client, in the order of its {record.judged.name}"
        + (" averaged over the algorithms" if several else "")
        + ("; colours are means over seeds." if record.seeds > 1 else ".")
        + f" Point at one for its sizes and its scores.{sampled}",
        ["clients"],
    )


def section(heading: str, words: str, names: list[str]) -> str:
    plots = "".join(f'<div class="chart" id="{name}"></div>' for name in names)
    head = f"<h2>{escaped(heading)}</h2><p>{escaped(words)}</p>"
    return f'<section>{head}<div class="charts">{plots}</div></section>'


def _timing(timing: dict[str, float | None]) -> Iterable[tuple[str, str]]:
    for key, value in timing.items():
        if value is None:
            yield key, "–"
        elif key == "seconds" and value >= 60:
            yield key, f"{value:,.0f} ({timedelta(seconds=round(value))})"
        else:
            yield key, f"{value:,.0f}" if value >= 1000 else f"{value:,.4g}"


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested settings as pairs: {"solver": {"lr": 0.1}} gives ("solver.lr", 0.1)."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _pairs(pairs: Iterable[tuple[str, Any]]) -> str:
    rows = "".join(
        f"<dt>{escaped(key.replace('_', ' '))}</dt><dd>{escaped(_plain(value))}</dd>" for key, value in pairs
    )
    return f'<dl class="pairs">{rows}</dl>'


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def escaped(text: str) -> str:
    """Escaped for HTML, with the number held to its percent sign."""
    return escape(text).replace(" %", "\u00a0%")


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script, 0.9 MB; a second's work, hence kept."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)


def _script(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
