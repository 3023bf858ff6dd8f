"""The figures, as Altair charts. A chart has no colours of its own: `theme` gives them, light or dark."""

import json
from collections.abc import Mapping
from typing import Any, Literal

import altair as alt
import numpy as np
from numpy.typing import NDArray

from fairwind.errors import printable
from fairwind.report.record import Record
from fairwind.report.table import algorithm_of, display_name

Row = dict[str, Any]

MAX_POINTS = 400  # per curve
MAX_CLIENTS = 300  # columns of the per-client figure
MEANS = ("mean of all clients", "mean of the worst-off 30 %")
SMOOTHING = 2.5  # percent of the axis: the width of the kernel that draws the distributions
SPACE = "(containerSize()[0] || width)"  # `width` alone is known too late: a legend that wraps by it overlaps
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"

# As far apart as Okabe and Ito’s under protanopia, deuteranopia and tritanopia; AdaFedAdam is always orange.
PALETTE = {
    "light": {
        "adafedadam": "#D95F02",
        "fedavg": "#0B5CAD",
        "fedadam": "#00926B",
        "fednova": "#CC6FA8",
        "qfedavg": "#4FA9E2",
        "fedyogi": "#D9A400",
        "fedadagrad": "#374151",
    },
    "dark": {
        "adafedadam": "#F0761A",
        "fedavg": "#3D86DB",
        "fedadam": "#17B98A",
        "fednova": "#EE9CCB",
        "qfedavg": "#8ED3FF",
        "fedyogi": "#FFCF4D",
        "fedadagrad": "#E8ECF1",
    },
}
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])  # one for each time the palette is gone through


def styles(labels: list[str]) -> list[tuple[str, int]]:
    """For each label the palette entry and the dash it is drawn with.

    The first label of an algorithm gets the algorithm's own colour, other labels the colours left over;
    when none is left, all are given out again with the next dash.
    """
    chosen: dict[str, tuple[str, int]] = {}
    for label in labels:
        own = (algorithm_of(label), 0)
        if own[0] in PALETTE["light"] and own not in chosen.values():
            chosen[label] = own
    free = [(name, dash) for dash in range(len(DASHES)) for name in PALETTE["light"]]
    free = [style for style in free if style not in chosen.values()]
    rest = [label for label in labels if label not in chosen]
    chosen |= {label: free[i % len(free)] for i, label in enumerate(rest)}
    return [chosen[label] for label in labels]


def theme(labels: list[str], mode: Literal["light", "dark"]) -> dict[str, Any]:
    """The Vega-Lite config under which the charts of these labels are drawn."""
    text, quiet, grid = (
        ("#1b2430", "#5b6675", "#e6e9ee") if mode == "light" else ("#e8ecf1", "#9aa5b4", "#2a323d")
    )
    return {
        "background": "transparent",
        "font": FONT,
        "padding": 2,
        "view": {"stroke": None},
        "title": {"anchor": "start", "color": text, "fontSize": 13, "fontWeight": 600, "offset": 12},
        "axis": {
            "domain": False,
            "ticks": False,
            "gridColor": grid,
            "labelColor": quiet,
            "labelFontSize": 12,
            "labelPadding": 8,
            "titleColor": quiet,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "titlePadding": 10,
        },
        "legend": {
            "labelColor": text,
            "labelFontSize": 12,
            "labelLimit": 240,
            "titleColor": quiet,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "symbolStrokeWidth": 3,
            "rowPadding": 4,
            "columnPadding": 16,
        },
        "rule": {"color": quiet},
        "point": {"color": text},
        "text": {"color": text},
        "range": {
            "category": [PALETTE[mode][name] for name, _ in styles(labels)],
            "heatmap": {"scheme": "viridis"},
        },
    }


def curves(record: Record, key: str, title: str) -> alt.LayerChart:
    """A measure over the rounds: the mean over seeds as a line, the lowest to the highest seed as a band."""
    series = {label: rows for label in record.labels if (rows := curve_of(record, label, key))}
    shown = list(series)
    by_round: dict[int, Row] = {}  # the tooltip wants one row per round, with a column per algorithm
    for i, rows in enumerate(series.values()):
        for row in rows:
            by_round.setdefault(row["round"], {"round": row["round"]})[f"a{i}"] = row["mean"]
    columns = [alt.Tooltip(f"a{i}:Q", title=display_name(s), format=".2f") for i, s in enumerate(shown)]

    colour = _colour(record, _legend(shown))
    dashes = [DASHES[dash] for _, dash in styles(record.domain)]
    dash = alt.StrokeDash(
        "algorithm:N",
        scale=alt.Scale(domain=[display_name(s) for s in record.domain], range=dashes),
        legend=_legend(shown),
    )
    x = alt.X(
        "round:Q",
        title="round",
        axis=alt.Axis(grid=False, tickCount=6, tickMinStep=1),
        scale=alt.Scale(nice=False),
    )
    y = alt.Y("mean:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=6))
    picked = alt.selection_point(fields=["algorithm"], bind="legend")
    hovered = alt.selection_point(
        fields=["round"], nearest=True, on="pointerover", clear="pointerout", empty=False
    )

    base = alt.Chart(alt.InlineData([row for rows in series.values() for row in rows])).encode(
        x=x, color=colour
    )
    alone = all(len(rows) == 1 for rows in series.values())  # a line of one point shows nothing
    line = base.mark_line(strokeWidth=2.25, strokeJoin="round", point=alone).encode(
        y=y, strokeDash=dash, opacity=alt.when(picked).then(alt.value(1)).otherwise(alt.value(0.12))
    )
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
    layers: list[alt.Chart] = [line.add_params(picked), dots, rule.add_params(hovered)]
    if record.seeds > 1:
        band = base.mark_area().encode(
            y=alt.Y("low:Q"),
            y2=alt.Y2("high:Q"),
            opacity=alt.when(picked).then(alt.value(0.16)).otherwise(alt.value(0.02)),
        )
        layers.insert(0, band)
    return alt.LayerChart(
        layer=layers, width="container", height=300, title=title, description=f"{title}, by round"
    )


def certainty(record: Record) -> alt.LayerChart | None:
    """AdaFedAdam's certainty C over the rounds, or nothing where no run has it."""
    if not any(row.get("certainty") is not None for row in record.history):
        return None
    return curves(record, "certainty", "Certainty C")


def distribution(record: Record) -> alt.LayerChart:
    """How the clients of all seeds are spread over their scores: a ridge per algorithm, with two means."""
    low, high = _range(record)
    grid = np.linspace(low, high, 201)
    names = [display_name(label) for label in record.labels]
    ridges = [_density(record.score_of(label), grid) for label in record.labels]
    highest = max((float(ridge.max()) for ridge in ridges), default=0.0) or 1.0
    rows: list[Row] = []
    marks: list[Row] = []
    for i, (name, ridge, summary) in enumerate(zip(names, ridges, record.results["summary"], strict=True)):
        heights = 0.88 * ridge / highest
        rows += [
            {"algorithm": name, "score": float(a), "base": i, "top": round(i - float(h), 4)}
            for a, h in zip(grid, heights, strict=True)
        ]
        for key, kind in zip(("avg", "worst30"), MEANS, strict=True):
            if (mean := summary[key]["mean"]) is not None:
                marks.append({"algorithm": name, "score": mean, "base": i, "mean": kind})

    x = alt.X(
        "score:Q",
        title=f"{record.judged.name} of a client{', %' * (record.judged.kind == 'accuracy')}",
        scale=alt.Scale(domain=[low, high]),
        axis=alt.Axis(tickCount=alt.ExprRef("ceil(width / 80)")),
    )
    y_axis = _name_axis(dict(enumerate(names)))
    y_axis["values"], y_axis["labelBaseline"] = list(range(len(names))), "bottom"
    y_scale = alt.Scale(domain=[len(names) - 1, -1], nice=False)
    area = (
        alt.Chart(alt.InlineData(rows))
        .mark_area(opacity=0.45, line={"strokeWidth": 1.75, "opacity": 1})
        .encode(
            x=x,
            y=alt.Y("top:Q", title=None, axis=y_axis, scale=y_scale),
            y2=alt.Y2("base:Q"),
            color=_colour(record, legend=None),
            detail="algorithm:N",
        )
    )
    means = (
        alt.Chart(alt.InlineData(marks))
        .mark_point(filled=True, size=70, opacity=1)
        .encode(
            x=x,
            y=alt.Y("base:Q"),
            shape=alt.Shape(
                "mean:N",
                scale=alt.Scale(domain=MEANS, range=["circle", "triangle-up"]),
                legend=alt.Legend(orient="top", title=None, columns=alt.ExprRef(f"{SPACE} < 420 ? 1 : 2")),
            ),
            tooltip=[
                alt.Tooltip("algorithm:N"),
                alt.Tooltip("mean:N"),
                alt.Tooltip("score:Q", title=record.judged.axis, format=".4~g"),
            ],
        )
    )
    return alt.LayerChart(
        layer=[area, means],
        width="container",
        height=max(120, 62 * len(names)),
        description=f"Distribution of clients' {record.judged.name}, by algorithm",
    )


def clients(record: Record) -> alt.Chart:
    """Each client a column, worst-off on the left; its score under each algorithm is a colour."""
    score, order = client_means(record), shown_clients(record)
    names = [display_name(label) for label in record.labels]
    columns: list[Row] = [
        {
            "client": printable(record.names[k]),
            "place": place,
            "end": place + 1.1,  # under the next column, or a hairline shows between them
            "train": int(record.train_size[k]),
            "test": int(record.test_size[k]),
        }
        | {f"a{i}": _number(score[i, k]) for i in range(len(names))}
        for place, k in enumerate(order)
    ]
    known = score[:, order][np.isfinite(score[:, order])]
    unit = ", %" * (record.judged.kind == "accuracy")
    lowest, highest = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    if unit:
        lowest, highest = np.floor(lowest / 10) * 10, max(np.ceil(highest / 10) * 10, lowest + 1)
    tooltip = [
        "client:N",
        alt.Tooltip("train:Q", title="training samples", format=",d"),
        alt.Tooltip("test:Q", title="test samples", format=",d"),
        *(alt.Tooltip(f"a{i}:Q", title=f"{name}{unit}", format=".4~g") for i, name in enumerate(names)),
    ]
    chart: alt.Chart = (
        alt.Chart(alt.InlineData(columns), description=f"{record.judged.name} of each client, by algorithm")
        .properties(width="container", height=max(60, 40 * len(names)))
        .transform_fold([f"a{i}" for i in range(len(names))], as_=["column", "score"])
        .transform_calculate(algorithm=f"{json.dumps(names)}[toNumber(slice(datum.column, 1))]")
        .transform_filter("isValid(datum.score)")
        .mark_rect(clip=True)
        .encode(
            x=alt.X(
                "place:Q",
                title="clients, worst-off on the left",
                scale=alt.Scale(domain=[0, max(1, len(order))], nice=False),
                axis=alt.Axis(labels=False, grid=False),
            ),
            x2=alt.X2("end:Q"),
            y=alt.Y(
                "algorithm:N",
                title=None,
                scale=alt.Scale(domain=names, paddingInner=0.12),
                axis=_name_axis({name: name for name in names}),
            ),
            color=alt.Color(
                "score:Q",
                scale=alt.Scale(domain=[lowest, highest], reverse=record.judged.sign < 0),
                legend=alt.Legend(
                    orient="top", title=record.judged.axis, gradientLength=180, gradientThickness=10
                ),
            ),
            tooltip=tooltip,
        )
    )
    return chart


def client_means(record: Record) -> NDArray[np.float64]:
    """Score of each client under each algorithm, mean over seeds, (algorithms, K); NaN where unknown."""
    means = np.full((len(record.labels), record.score.shape[1]), np.nan)
    for i, label in enumerate(record.labels):
        rows = record.score_of(label).astype(np.float64)
        tested = np.isfinite(rows).any(axis=0)
        means[i, tested] = np.nanmean(rows[:, tested], axis=0)
    return means


def tested_clients(record: Record) -> NDArray[np.int64]:
    """The clients with a score, from the worst-off to the best-off on average over the algorithms."""
    means = client_means(record)
    tested = np.flatnonzero(np.isfinite(means).any(axis=0))
    return tested[np.argsort(record.judged.sign * np.nanmean(means[:, tested], axis=0), kind="stable")]


def shown_clients(record: Record) -> NDArray[np.int64]:
    """All tested clients, or MAX_CLIENTS of them evenly spaced from the worst-off to the best-off."""
    return thin(tested_clients(record), MAX_CLIENTS)


def thin(values: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """At most `most` of the values, evenly spaced, the first and the last among them."""
    places = np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(np.int64)
    return np.take(values, places)


def curve_of(record: Record, label: str, key: str) -> list[Row]:
    """The curve of one algorithm, at the rounds where every seed has a value."""
    values: dict[int, list[float | None]] = {}
    for row in record.history:
        if row["algorithm"] == label:
            values.setdefault(row["round"], []).append(row.get(key))
    most = max(map(len, values.values()), default=0)  # seeds trained apart may be evaluated at other rounds
    known = {
        t: [v for v in seeds if v is not None]
        for t, seeds in values.items()
        if None not in seeds and len(seeds) == most
    }
    rounds = thin(np.array(sorted(known), dtype=np.int64), MAX_POINTS)
    return [
        {
            "algorithm": display_name(label),
            "round": int(t),
            "mean": round(float(np.mean(known[t])), 4),
            "low": round(min(known[t]), 4),
            "high": round(max(known[t]), 4),
        }
        for t in rounds.tolist()
    ]


def _range(record: Record) -> tuple[float, float]:
    """The ends of an axis of scores: 0 and 100 %, or where the scores lie, but for a few far out."""
    values = record.score[np.isfinite(record.score)]
    if record.judged.kind == "accuracy" or not values.size:
        return 0.0, 100.0
    low, high = (float(v) for v in np.percentile(values, (0.5, 99.5)))
    return low, high if high > low else low + max(1e-6, abs(low))


def smoothing(record: Record) -> float:
    """The width of the kernel that draws the distributions."""
    low, high = _range(record)
    return SMOOTHING * (high - low) / 100


def _density(score: NDArray[np.float32], grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """A Gaussian kernel density on the grid, reflected at its ends so that no client falls off them."""
    low, high = float(grid[0]), float(grid[-1])
    values = score[np.isfinite(score)].astype(np.float64).clip(low, high)
    counts, edges = np.histogram(values, bins=400, range=(low, high))  # bins far finer than the kernel
    centres = (edges[:-1] + edges[1:]) / 2
    mirrored = np.concatenate([2 * low - centres, centres, 2 * high - centres])
    width = SMOOTHING * (high - low) / 100
    kernel = np.exp(-0.5 * ((grid[:, None] - mirrored) / width) ** 2)
    density: NDArray[np.float64] = kernel @ np.tile(counts, 3) / max(1, counts.sum())
    return density


def _colour(record: Record, legend: alt.Legend | None) -> alt.Color:
    """Colour by algorithm, over all algorithms of the page so that each keeps its colour in every chart."""
    names = [display_name(label) for label in record.domain]
    return alt.Color("algorithm:N", scale=alt.Scale(domain=names), legend=legend)


def _legend(shown: list[str]) -> alt.Legend | None:
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


def _name_axis(names: Mapping[Any, str]) -> alt.Axis:
    """An axis that writes the name of each value, with its parameters, if any, on lines below it."""
    lines = {
        value: name.replace(" (", "\n(").replace(", ", ",\n").split("\n") for value, name in names.items()
    }
    found = f"{json.dumps(lines)}[datum.value]"
    centred = {"condition": {"test": "true", "expr": f"-7 * (length({found}) - 1)"}, "value": 0}
    return alt.Axis(labelExpr=found, labelOffset=centred, labelLimit=150)


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None
