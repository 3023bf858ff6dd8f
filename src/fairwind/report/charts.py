"""Curves over the rounds, as Altair charts. They have no colours of their own: see `theme`."""

from typing import TypedDict

import altair as alt
import numpy as np

from fairwind.report.record import Record, thin
from fairwind.report.table import display_name
from fairwind.report.theme import DASHES, SPACE, colour, styles
from fairwind.runs.schema import HistoryLine

Cell = str | int | float | bool | None
Row = dict[str, Cell]  # of a chart's data


class Point(TypedDict):
    """A curve at a round: over the seeds, the mean, the lowest and the highest."""

    algorithm: str
    round: int
    mean: float
    low: float
    high: float


MAX_POINTS = 400  # per curve
LONG_TITLE = 45  # letters, with which a title takes two lines: a phone has no room for one


def curves(record: Record, key: str, title: str) -> alt.LayerChart:
    """A measure over the rounds: the mean over seeds as a line, the lowest to the highest seed as a band."""
    series = {label: rows for label in record.labels if (rows := curve_of(record, label, key))}
    shown = list(series)
    by_round: dict[int, Row] = {}  # the tooltip wants one row per round, with a column per algorithm
    for i, rows in enumerate(series.values()):
        for row in rows:
            by_round.setdefault(row["round"], {"round": row["round"]})[f"a{i}"] = row["mean"]
    columns = [alt.Tooltip(f"a{i}:Q", title=display_name(s), format=".2f") for i, s in enumerate(shown)]

    dashes = [DASHES[dash] for _, dash in styles(record.domain)]
    dash = alt.StrokeDash(
        "algorithm:N",
        scale=alt.Scale(domain=[display_name(s) for s in record.domain], range=dashes),
        legend=legend(shown),
    )
    x = alt.X(
        "round:Q",
        title="round",
        axis=alt.Axis(grid=False, tickCount=6, tickMinStep=1),
        scale=alt.Scale(nice=False),
    )
    y = alt.Y("mean:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=6))
    hovered = alt.selection_point(
        fields=["round"], nearest=True, on="pointerover", clear="pointerout", empty=False
    )

    base = alt.Chart(alt.InlineData([row for rows in series.values() for row in rows])).encode(
        x=x, color=colour(record, legend(shown))
    )
    alone = all(len(rows) == 1 for rows in series.values())  # a line of one point shows nothing
    line = base.mark_line(strokeWidth=2.25, strokeJoin="round", point=alone).encode(y=y, strokeDash=dash)
    dots = base.mark_point(filled=True, size=45).encode(
        y=y, opacity=alt.when(hovered).then(alt.value(1)).otherwise(alt.value(0))
    )
    rule = (
        alt.Chart(alt.InlineData(list(by_round.values())))
        .mark_rule(strokeDash=[3, 3])
        .encode(
            x=x,
            opacity=alt.when(hovered).then(alt.value(0.6)).otherwise(alt.value(0)),
            tooltip=[alt.Tooltip("round:Q", format=",d"), *columns],
        )
    )
    layers: list[alt.Chart] = [line, dots, rule.add_params(hovered)]
    if record.seeds > 1:
        band = base.mark_area(opacity=0.16).encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q"))
        layers.insert(0, band)
    return alt.LayerChart(
        layer=layers,
        width="container",
        height=300,
        title=title.split(": ", 1) if len(title) > LONG_TITLE else title,
        description=f"{title}, by round",
    )


def certainty(record: Record) -> alt.LayerChart | None:
    """AdaFedAdam's certainty C over the rounds, or nothing where no run has it."""
    if not any(number(line, "certainty") is not None for line in record.history):
        return None
    return curves(record, "certainty", "Certainty C")


def curve_of(record: Record, label: str, key: str) -> list[Point]:
    """The curve of one algorithm, at the rounds where every seed has a value."""
    values: dict[int, list[float | None]] = {}
    for row in record.history:
        if row["algorithm"] == label:
            values.setdefault(row["round"], []).append(number(row, key))
    most = max(map(len, values.values()), default=0)  # seeds trained apart may be evaluated at other rounds
    complete = {
        t: [v for v in seeds if v is not None]
        for t, seeds in values.items()
        if None not in seeds and len(seeds) == most
    }
    rounds = thin(np.array(sorted(complete), dtype=np.int64), MAX_POINTS)
    return [
        {
            "algorithm": display_name(label),
            "round": int(t),
            "mean": round(float(np.mean(complete[t])), 4),
            "low": round(min(complete[t]), 4),
            "high": round(max(complete[t]), 4),
        }
        for t in rounds.tolist()
    ]


def number(line: HistoryLine, key: str) -> float | None:
    """A metric of a line, or a scalar of the algorithm's state; None where it has none."""
    value = line.get(key)
    return value if isinstance(value, int | float) else None


def legend(shown: list[str]) -> alt.Legend | None:
    """The key of a chart saved as a file; a page has one for all charts."""
    if len(shown) < 2:
        return None
    names = [display_name(label) for label in shown]
    widest = 50 + 7 * max(len(name) for name in names)
    return alt.Legend(
        orient="top",
        title=None,
        values=names,
        symbolType="stroke",
        symbolOpacity=1,
        symbolSize=220,
        columns=alt.ExprRef(f"max(1, floor({SPACE} / {widest}))"),
    )
