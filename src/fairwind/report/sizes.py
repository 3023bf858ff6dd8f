"""Scores against client size: a dot for each client, as large as its test set, and trends."""

import json

import altair as alt
import numpy as np
from numpy.typing import NDArray

from fairwind.errors import printable
from fairwind.report.charts import Row, legend
from fairwind.report.record import Record, thin
from fairwind.report.spread import client_means
from fairwind.report.table import display_name
from fairwind.report.theme import DASHES, colour, styles

MAX_DOTS = 3000  # over all algorithms
FEW = 150  # dots, which may be solid
BINS = 8  # points of a trend, each of as many clients


def sizes(record: Record) -> alt.LayerChart | None:
    """None where no two clients differ in size."""
    means, shown = client_means(record), shown_by_size(record)
    if not len(shown) or len(np.unique(record.train_size[shown])) < 2:
        return None
    names = [display_name(label) for label in record.labels]
    dots: list[Row] = [
        {
            "client": printable(record.names[k]),
            "k": int(k),
            "train": int(record.train_size[k]),
            "test": int(record.test_size[k]),
            **{f"a{i}": _number(means[i, k]) for i in range(len(names))},
        }
        for k in shown.tolist()
    ]
    x = alt.X(
        "train:Q",
        title="training samples of the client",
        scale=alt.Scale(type="log", nice=False, padding=8),
        axis=alt.Axis(grid=False, values=_ticks(record.train_size[shown]), format="~s"),
    )
    y = alt.Y(
        "score:Q",
        title=f"{record.judged.axis}",
        scale=alt.Scale(zero=False, padding=6),
        axis=alt.Axis(tickCount=6),
    )
    cloud = (
        alt.Chart(alt.InlineData(dots))
        .transform_fold([f"a{i}" for i in range(len(names))], as_=["column", "score"])
        .transform_calculate(algorithm=f"{json.dumps(names)}[toNumber(slice(datum.column, 1))]")
        .transform_filter("isValid(datum.score)")
        .mark_point(filled=True, opacity=0.3 if len(dots) * len(names) > FEW else 0.7, clip=True)
        .encode(
            x=x,
            y=y,
            color=colour(record, None),
            size=alt.Size(
                "test:Q",
                scale=alt.Scale(range=[9, 260]),
                legend=alt.Legend(
                    orient="top", title=f"{record.part} samples", tickCount=4, symbolOpacity=0.5
                ),
            ),
            tooltip=[
                "client:N",
                "algorithm:N",
                alt.Tooltip("score:Q", title=record.judged.axis, format=".4~g"),
                alt.Tooltip("train:Q", title="training samples", format=",d"),
                alt.Tooltip("test:Q", title=f"{record.part} samples", format=",d"),
            ],
        )
    )
    dashes = [DASHES[dash] for _, dash in styles(record.domain)]
    domain = [display_name(label) for label in record.domain]
    line = (
        alt.Chart(alt.InlineData(trends(record, means)))
        .mark_line(strokeWidth=2.5, strokeJoin="round")
        .encode(
            x=x,
            y=y,
            color=colour(record, legend(record.labels)),
            strokeDash=alt.StrokeDash(
                "algorithm:N", scale=alt.Scale(domain=domain, range=dashes), legend=legend(record.labels)
            ),
        )
    )
    return alt.LayerChart(
        layer=[cloud, line],
        width="container",
        height=340,
        description=f"{record.judged.name} of each client against its training samples, by algorithm",
    )


def trends(record: Record, means: NDArray[np.float64]) -> list[Row]:
    """The mean score of clients of similar size, up to BINS points for each algorithm."""
    rows: list[Row] = []
    for i, label in enumerate(record.labels):
        if not _bins(int(np.isfinite(means[i]).sum())):
            continue
        tested = np.flatnonzero(np.isfinite(means[i]))
        order = tested[np.argsort(record.train_size[tested], kind="stable")]
        for part in np.array_split(order, _bins(len(order))):
            if len(part):
                middle = float(np.exp(np.log(record.train_size[part]).mean()))
                score = _number(means[i, part].mean())
                rows.append({"algorithm": display_name(label), "train": round(middle, 1), "score": score})
    return rows


def _ticks(values: NDArray[np.int64]) -> list[int]:
    """1, 2 and 5 times the powers of ten that are among the values; of many, the powers alone."""
    low, high = int(values.min()), int(values.max())
    powers = [10**e for e in range(19) if 10**e <= high]
    ticks = [m * p for p in powers for m in (1, 2, 5) if low <= m * p <= high]
    return ticks if len(ticks) < 9 else [p for p in powers if p >= low]


def _bins(clients: int) -> int:
    """Points of a trend, none of fewer than three clients; a trend of one point is none."""
    bins = min(BINS, clients // 3)
    return bins if bins > 1 else 0


def trend_words(record: Record) -> str:
    """What the lines are, where there are any."""
    tested = int(np.isfinite(record.score).any(axis=0).sum())
    bins = _bins(tested)
    return f"Lines are means of about {round(tested / bins)} clients of similar size. " if bins else ""


def shown_by_size(record: Record) -> NDArray[np.int64]:
    """The tested clients by size; of many some, evenly spaced."""
    tested = np.flatnonzero(np.isfinite(record.score).any(axis=0) & (record.train_size > 0))
    order = tested[np.argsort(record.train_size[tested], kind="stable")]
    return thin(order, max(60, MAX_DOTS // len(record.labels)))


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None
