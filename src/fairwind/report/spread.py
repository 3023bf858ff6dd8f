"""How scores are spread over the clients, as Altair charts: their distribution, and client by client."""

import json
from collections.abc import Mapping
from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from fairwind.errors import printable
from fairwind.report.charts import Row, thin
from fairwind.report.record import Record
from fairwind.report.table import display_name
from fairwind.report.theme import SPACE, colour

MAX_CLIENTS = 300  # columns of the per-client figure
MEANS = ("mean of all clients", "mean of the worst-off 30 %")
SMOOTHING = 2.5  # percent of the axis: the width of the kernel that draws the distributions


def distribution(record: Record) -> alt.LayerChart:
    """How the clients of all seeds are spread over their scores: a ridge per algorithm, with two means."""
    low, high = _range(record)
    grid = np.linspace(low, high, 201)
    names = [display_name(label) for label in record.labels]
    ridges = [density_of(record.score_of(label), grid) for label in record.labels]
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
    y_axis = name_axis(dict(enumerate(names)))
    y_axis["values"], y_axis["labelBaseline"] = list(range(len(names))), "bottom"
    y_scale = alt.Scale(domain=[len(names) - 1, -1], nice=False)
    area = (
        alt.Chart(alt.InlineData(rows))
        .mark_area(opacity=0.45, line={"strokeWidth": 1.75, "opacity": 1})
        .encode(
            x=x,
            y=alt.Y("top:Q", title=None, axis=y_axis, scale=y_scale),
            y2=alt.Y2("base:Q"),
            color=colour(record, legend=None),
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


def smoothing(record: Record) -> float:
    """The width of the kernel that draws the distributions."""
    low, high = _range(record)
    return SMOOTHING * (high - low) / 100


def _range(record: Record) -> tuple[float, float]:
    """The ends of an axis of scores: 0 and 100 %, or where the scores lie, but for a few far out."""
    values = record.score[np.isfinite(record.score)]
    if record.judged.kind == "accuracy" or not values.size:
        return 0.0, 100.0
    low, high = (float(v) for v in np.percentile(values, (0.5, 99.5)))
    return low, high if high > low else low + max(1e-6, abs(low))


def density_of(score: NDArray[np.float32], grid: NDArray[np.float64]) -> NDArray[np.float64]:
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
                axis=name_axis({name: name for name in names}),
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


def name_axis(names: Mapping[Any, str]) -> alt.Axis:
    """An axis that writes the name of each value, with its parameters, if any, on lines below it."""
    lines = {
        value: name.replace(" (", "\n(").replace(", ", ",\n").split("\n") for value, name in names.items()
    }
    found = f"{json.dumps(lines)}[datum.value]"
    centred = {"condition": {"test": "true", "expr": f"-7 * (length({found}) - 1)"}, "value": 0}
    return alt.Axis(labelExpr=found, labelOffset=centred, labelLimit=150)


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None
