"""The page of a search: all settings in the plane of average and worst 30 %, and the choice."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import altair as alt

from fairwind.report import joining
from fairwind.report.html import chart_html, escaped, frame, measures_table, plain_spec, section, table_html
from fairwind.report.newcomers import new_clients_section
from fairwind.report.record import read_record
from fairwind.report.table import FIRST, algorithm_of, display_name, measures
from fairwind.report.theme import SPACE, theme
from fairwind.runs.files import write_atomic
from fairwind.runs.schema import Findings

MOST_ROWS = 12  # of settings in the table


class Point(NamedTuple):
    """A setting that was tried, on the validation samples."""

    spec: str
    lr: float
    rounds: int
    average: float | None
    worst30: float | None
    kind: int
    value: float
    second: float


class Page(NamedTuple):
    """What the page of a search shows."""

    task: str
    choice: str
    chosen: int  # the choice's place among the points
    aim: str
    points: Sequence[Point]
    runs: float  # whole runs that the search cost as many rounds as
    sample_gradients: float
    results: Findings  # of the choice and the defaults, on the test samples
    ahead: dict[str, str]
    facts: dict[str, str]


def plane(page: Page) -> alt.LayerChart:
    """Average against worst 30 %, better to the right and up; settings that left early are small."""
    most = max(point.rounds for point in page.points)
    labels = list(dict.fromkeys(algorithm_of(point.spec) for point in page.points))
    names = [display_name(label) for label in labels]
    wide = 40 + 7 * max(map(len, names))
    columns = alt.ExprRef(f"max(1, floor({SPACE} / {wide}))")
    key = alt.Legend(orient="top", title=None, columns=columns)
    drawn = {i: point for i, point in enumerate(page.points) if None not in (point.average, point.worst30)}
    rows = {
        i: {
            "algorithm": display_name(algorithm_of(point.spec)),
            "setting": display_name(point.spec),
            "local rate": point.lr,
            "rounds": point.rounds,
            "share": point.rounds / most,
            "average": point.average,
            "worst30": point.worst30,
        }
        for i, point in drawn.items()
    }
    scale = alt.Scale(zero=False, nice=False, padding=24)
    x = alt.X("average:Q", title="average over clients, validation samples", scale=scale)
    y = alt.Y("worst30:Q", title="worst 30 % of clients, validation samples", scale=scale)
    tooltip = [alt.Tooltip(name, format=".4~g") for name in ("average:Q", "worst30:Q")]
    dots = (
        alt.Chart(alt.InlineData(list(rows.values())))
        .mark_point(filled=True, opacity=0.85)
        .encode(
            x=x,
            y=y,
            color=alt.Color("algorithm:N", scale=alt.Scale(domain=names), legend=key),
            size=alt.Size("share:Q", scale=alt.Scale(domain=[0, 1], range=[16, 140]), legend=None),
            tooltip=["setting:N", "local rate:Q", "rounds:Q", *tooltip],
        )
    )
    ring = (
        alt.Chart(alt.InlineData([rows[page.chosen]])).mark_point(size=420, strokeWidth=2.5).encode(x=x, y=y)
    )
    return alt.LayerChart(
        layer=[dots, ring],
        width="container",
        height=400,
        description="Average and worst 30 % of every setting that was tried, on the validation samples",
    )


def write_search(folder: Path, page: Page) -> Path:
    """Writes index.html into the search's folder."""
    spec = plain_spec(plane(page))
    labels = list(dict.fromkeys(algorithm_of(point.spec) for point in page.points))
    most = max(point.rounds for point in page.points)
    whole = sum(point.rounds == most for point in page.points)
    best = sorted(page.points, key=lambda point: (point.kind, point.value, point.second), reverse=True)[
        :MOST_ROWS
    ]
    rows = [
        [
            display_name(point.spec),
            f"{point.lr:g}",
            f"{point.rounds:,}",
            _text(point.average),
            _text(point.worst30),
        ]
        for point in best
    ]
    searched = (
        f"{len(page.points)} settings were tried on the validation samples; {whole} of them were trained for "
        f"all {most:,} rounds, the others left earlier and are drawn smaller. The search took as many rounds "
        f"as {page.runs:.1f} whole runs, and {page.sample_gradients:,.0f} gradients of samples. "
        f"The ring is the choice: {page.aim}."
    )
    tested = (
        "The choice and every default, under seeds that the search did not see, on test samples that it did "
        "not see either. Bold: ahead of all others beyond noise."
    )
    tried = table_html(["setting", "local rate", "rounds", "average", "worst 30 %"], rows)
    final = measures_table(page.results, measures(page.results)[: len(FIRST)], ahead=page.ahead)
    record = read_record(folder / "test")
    gains, beside = joining.gains(record), ""
    if gains:
        table = joining.table(record, gains)
        beside = section("Who gains from joining?", joining.words(record), [], table)
    body = (
        f"<section><h2>What was tried</h2><p>{escaped(searched)}</p>"
        f'<div class="charts">{chart_html("plane")}</div>{tried}</section>'
        f"<section><h2>The choice on the test samples</h2><p>{escaped(tested)}</p>{final}"
        '<p><a href="test/report.html">The report of this comparison</a></p></section>'
        f"{beside}{new_clients_section(record)}"
    )
    html = frame(
        kind="Search",
        title=page.task,
        finding=f"{display_name(page.choice)} is chosen: {page.aim}.",
        facts=page.facts,
        notes=[],
        body=body,
        specs={"plane": spec},
        themes={"light": theme(labels, "light"), "dark": theme(labels, "dark")},
    )
    return write_atomic(folder / "index.html", html.encode())


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
