"""The report of a run directory: one self-contained page, and its figures as PDF and PNG files."""

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import altair as alt

from fairwind.files import write_atomic
from fairwind.report import charts, groups, spread
from fairwind.report.finding import finding
from fairwind.report.html import (
    Spec,
    escaped,
    frame,
    measures_table,
    pairs_html,
    plain_spec,
    section,
    write_figure,
)
from fairwind.report.record import Record, read_record
from fairwind.report.table import Results, count, display_name, judged, measures, notes, reading, seed_count
from fairwind.report.theme import theme


def write_report(directory: Path) -> list[Path]:
    """Write report.html and figures/ into a run directory; return the paths written."""
    record = read_record(directory)
    specs = figures(record)
    (directory / "figures").mkdir(exist_ok=True)
    written = [write_atomic(directory / "report.html", page(record, specs).encode())]
    paper = theme(record.labels, "light")
    for name, spec in specs.items():
        written += write_figure(directory / "figures" / name, spec, paper)
    return written


def figures(record: Record) -> dict[str, Spec]:
    """The Vega-Lite specs of the report by name, without colours (see `theme`)."""
    drawn: dict[str, alt.Chart | alt.LayerChart | None] = {
        "average": charts.curves(record, "avg", f"Average over clients: {record.judged.axis}"),
        "worst30": charts.curves(record, "worst30", f"The worst-off 30 % of clients: {record.judged.axis}"),
        "distribution": spread.distribution(record),
        "groups": groups.averages(record),
        "certainty": charts.certainty(record),
        "clients": spread.clients(record),
    }
    return {name: plain_spec(chart) for name, chart in drawn.items() if chart is not None}


def page(record: Record, specs: dict[str, Spec]) -> str:
    """The whole page as HTML."""
    results = record.results
    themes = {mode: theme(record.labels, mode) for mode in ("light", "dark")}
    names = [display_name(label) for label in record.labels]
    subject = names[0] if len(names) == 1 else f"{len(names)} algorithms"
    how = (
        "<section><h2>How this was run</h2><p>Enough to run it again.</p>"
        '<div class="columns">'
        f"<div><h3>Settings</h3>{pairs_html(_flat(results['config']))}</div>"
        f"<div><h3>Environment</h3>{pairs_html(results['environment'].items())}</div>"
        f"<div><h3>Time</h3>{pairs_html(_timing(results['timing']))}</div>"
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


def _facts(results: Results) -> dict[str, str]:
    federation, seeds = results["federation"], seed_count(results)
    return {
        "federation": federation["name"],
        "clients": f"{federation['clients']:,}",
        "samples": f"{federation['train_samples']:,} to train, {federation['test_samples']:,} to test",
        "training samples of a client": (
            f"{federation['smallest']:,} to {federation['largest']:,}, median {federation['median']:,g}"
        ),
        **({"groups": f"{len(federation['groups']):,}"} if "groups" in federation else {}),
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
    untested = record.score.shape[1] - len(spread.tested_clients(record))
    pooled = f"the clients of all {record.seeds} seeds together" if record.seeds > 1 else "all clients"
    yield section(
        "How clients are spread",
        f"Where the scores of clients lie after the last round, {pooled}, smoothed with a kernel "
        f"{spread.smoothing(record):.3g} wide. The further {side} the better, and the narrower the fairer."
        + (f" {count(untested, 'client')} without test samples left out." if untested else ""),
        ["distribution"],
    )
    if "groups" in specs:
        yield section("Groups", groups.words(record), ["groups"], groups.tables(record))
    if "certainty" in specs:
        yield section(
            "Certainty",
            "AdaFedAdam’s C is 1 plus the logarithm of how far local training went, in gradient steps. "
            f"The server’s step and memory scale with it; at C = 1 a round is one step of Adam. {band}",
            ["certainty"],
        )
    shown, tested = len(spread.shown_clients(record)), len(spread.tested_clients(record))
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
