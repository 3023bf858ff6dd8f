"""How scores are spread over the clients, as Altair charts: in order, and client by client."""

import json
from collections.abc import Mapping

import altair as alt
import numpy as np
from numpy.typing import NDArray

from fairwind.errors import printable
from fairwind.report.charts import Row, legend
from fairwind.report.record import Record, thin
from fairwind.report.table import display_name
from fairwind.report.theme import DASHES, colour, styles

MAX_CLIENTS = 300  # columns of the per-client figure
MAX_PLACES = 200  # of a line of sorted scores


def distribution(record: Record) -> alt.LayerChart:
    """The clients' scores in order, worst-off on the left: a line for each algorithm."""
    rows = [row for label in record.labels for row in sorted_scores(record, label)]
    names = [display_name(label) for label in record.domain]
    x = alt.X(
        "share:Q",
        title="share of clients, worst-off on the left, %",
        scale=alt.Scale(domain=[0, 100], nice=False),
        axis=alt.Axis(grid=False, tickCount=6),
    )
    y = alt.Y(
        "score:Q",
        title=f"{record.judged.axis}, of the client at that place",
        scale=alt.Scale(domain=list(_range(record)), clamp=True, nice=False),
        axis=alt.Axis(tickCount=6),
    )
    line = (
        alt.Chart(alt.InlineData(rows))
        .mark_line(strokeWidth=2.25, strokeJoin="round")
        .encode(
            x=x,
            y=y,
            color=colour(record, legend(record.labels)),
            strokeDash=alt.StrokeDash(
                "algorithm:N",
                scale=alt.Scale(domain=names, range=[DASHES[dash] for _, dash in styles(record.domain)]),
                legend=legend(record.labels),
            ),
            tooltip=[
                alt.Tooltip("algorithm:N"),
                alt.Tooltip("share:Q", title="share of clients, %", format=".3~g"),
                alt.Tooltip("score:Q", title=record.judged.axis, format=".4~g"),
            ],
        )
    )
    third = alt.Chart(alt.InlineData([{"share": 0, "end": 30}]))
    shade = third.mark_rect(opacity=0.06).encode(x=alt.X("share:Q"), x2=alt.X2("end:Q"))
    return alt.LayerChart(
        layer=[shade, line],
        width="container",
        height=320,
        description=f"Clients' {record.judged.name}, from the worst-off to the best-off, by algorithm",
    )


def sorted_scores(record: Record, label: str) -> list[Row]:
    """An algorithm's scores from the worst-off client to the best-off, place by place a mean over seeds."""
    scores = record.score_of(label).astype(np.float64)
    scores = scores[:, np.isfinite(scores).all(axis=0)]
    if not scores.size:
        return []
    sign = record.judged.sign
    places = sign * np.sort(sign * scores, axis=1)
    mean, clients = places.mean(axis=0), places.shape[1]
    if clients == 1:
        mean, clients = np.repeat(mean, 2), 2
    return [
        {
            "algorithm": display_name(label),
            "share": float(f"{100 * k / (clients - 1):.4g}"),
            "score": float(f"{mean[k]:.4g}"),
        }
        for k in thin(np.arange(clients), MAX_PLACES).tolist()
    ]


def _range(record: Record) -> tuple[float, float]:
    """The ends of an axis of scores: 0 and 100 %, or where the scores lie, but for a few far out."""
    values = record.score[np.isfinite(record.score)]
    if record.judged.kind == "accuracy" or not values.size:
        return 0.0, 100.0
    low, high = (float(v) for v in np.percentile(values, (0.5, 99.5)))
    return low, high if high > low else low + max(1e-6, abs(low))


def clients(record: Record) -> alt.Chart:
    """Each client a column, worst-off on the left; its score under each algorithm is a colour."""
    score, order = client_means(record), shown_clients(record)
    names = [display_name(label) for label in record.labels]
    columns: list[Row] = [
        {
            "client": printable(record.names[k]),
            "k": int(k),
            "place": place,
            "end": place + 1.1,  # under the next column, or a hairline shows between them
            "train": int(record.train_size[k]),
            "test": int(record.test_size[k]),
            **{f"a{i}": _number(score[i, k]) for i in range(len(names))},
        }
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
        alt.Tooltip("test:Q", title=f"{record.part} samples", format=",d"),
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
                sort=names,
                scale=alt.Scale(paddingInner=0.12),
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


def name_axis(names: Mapping[str, str] | Mapping[int, str]) -> alt.Axis:
    """An axis that writes the name of each value, with its parameters, if any, on lines below it."""
    lines = {
        value: name.replace(" (", "\n(").replace(", ", ",\n").split("\n") for value, name in names.items()
    }
    found = f"{json.dumps(lines)}[datum.value]"
    centred = {"condition": {"test": "true", "expr": f"-7 * (length({found}) - 1)"}, "value": 0}
    return alt.Axis(labelExpr=found, labelOffset=centred, labelLimit=150)


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None
