"""The trade-off between accuracy and fairness that α controls: charts of the α study."""

from typing import Literal, TypedDict

import altair as alt
import numpy as np

from fairwind.report.charts import curve_of
from fairwind.report.record import Record
from fairwind.report.table import algorithm_of, display_name


class Point(TypedDict):
    """An algorithm, a mean over seeds."""

    label: str
    name: str
    kind: Literal["AdaFedAdam", "baseline"]
    alpha: float | None
    error: float  # average over clients, percent
    rsd: float  # relative standard deviation of the error


def alpha_of(label: str) -> float:
    """AdaFedAdam's α in a label; 1 where it is not given."""
    given = dict(item.partition("=")[::2] for item in label.partition(":")[2].split(",") if item)
    return float(given.get("alpha", 1))


def points(record: Record) -> list[Point]:
    """Every algorithm's average error in percent and relative standard deviation of the error, over seeds."""
    points: list[Point] = []
    for row in record.results["summary"]:
        average, rsd = row["avg"]["mean"], row["rsd_error"]["mean"]
        if average is None or rsd is None:
            continue
        label = row["algorithm"]
        ours = algorithm_of(label) == "adafedadam"
        points.append(
            {
                "label": label,
                "name": f"α = {alpha_of(label):g}" if ours else display_name(label),
                "kind": "AdaFedAdam" if ours else "baseline",
                "alpha": alpha_of(label) if ours else None,
                "error": 100 - average,
                "rsd": rsd,
            }
        )
    return points


def front(found: list[Point]) -> list[Point]:
    """AdaFedAdam's points that no other of its points beats in both, by growing error."""
    ours = [p for p in found if p["kind"] == "AdaFedAdam"]
    kept = {(p["error"], p["rsd"]): p for p in ours if not any(_beats(q, p) for q in ours)}
    return [kept[place] for place in sorted(kept)]


def dominated(found: list[Point]) -> list[Point]:
    """Baselines that some α beats in both error and spread."""
    ours = [p for p in found if p["kind"] == "AdaFedAdam"]
    return [p for p in found if p["kind"] == "baseline" and any(_beats(q, p) for q in ours)]


def knee(found: list[Point]) -> Point | None:
    """The front's point farthest from the line between its ends, both axes scaled to their range."""
    line = front(found)
    if len(line) < 3:
        return None
    xy = np.array([[p["error"], p["rsd"]] for p in line])
    xy = (xy - xy.min(0)) / (xy.max(0) - xy.min(0))  # a front of several points spans both axes
    (x0, y0), (x1, y1) = xy[0], xy[-1]
    away = (x1 - x0) * (y0 - xy[:, 1]) - (x0 - xy[:, 0]) * (y1 - y0)
    return line[int(away.argmax())] if away.max() > 0 else None


def _beats(q: Point, p: Point) -> bool:
    one, other = (q["error"], q["rsd"]), (p["error"], p["rsd"])
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def pareto(record: Record) -> alt.LayerChart:
    """Average error against its relative spread: the front, what it dominates, the baselines, the knee."""
    found = points(record)
    line = front(found)
    right = max(p["error"] for p in found) * 1.03
    top = max(p["rsd"] for p in found) * 1.05
    # All that is to the right of a point of the front and above it: a staircase.
    steps = [*((p["error"], p["rsd"]) for p in line), (right, line[-1]["rsd"])]
    area = [{"error": x, "rsd": y, "high": top} for x, y in steps]
    low = min(p["error"] for p in found)
    x = alt.X(
        "error:Q", title="average error of clients, %", scale=alt.Scale(zero=False, domainMin=low * 0.97)
    )
    y = alt.Y("rsd:Q", title="relative standard deviation of error", scale=alt.Scale(zero=False))
    stairs = alt.Chart(alt.InlineData(area)).encode(x=x, y=y)
    layers: list[alt.Chart] = [
        stairs.mark_area(opacity=0.12, interpolate="step-after").encode(y2=alt.Y2("high:Q")),
        stairs.mark_line(strokeWidth=1.5, interpolate="step-after"),
    ]
    base = alt.Chart(alt.InlineData(found)).encode(x=x, y=y)
    tooltip = ["name:N", alt.Tooltip("error:Q", format=".2f"), alt.Tooltip("rsd:Q", format=".3f")]
    shapes = alt.Scale(domain=["AdaFedAdam", "baseline"], range=["circle", "square"])
    layers.append(
        base.mark_point(filled=True, size=80, opacity=1).encode(
            shape=alt.Shape("kind:N", scale=shapes, legend=alt.Legend(orient="top", title=None)),
            tooltip=tooltip,
        )
    )
    layers.append(base.mark_text(align="left", dx=9, dy=-6, fontSize=12).encode(text="name:N"))
    best = knee(found)
    if best is not None:
        layers.append(alt.Chart(alt.InlineData([best])).mark_point(size=320, strokeWidth=2).encode(x=x, y=y))
    return alt.LayerChart(
        layer=layers,
        width="container",
        height=420,
        title="Pareto front of α, and what it dominates",
        description="Pareto front of average error and its relative standard deviation over clients",
    )


def alpha_curves(record: Record, key: str, title: str) -> alt.LayerChart:
    """A measure over the rounds for every α, from dark (0) to light."""
    rows = [
        row | {"alpha": alpha_of(label)}
        for label in record.labels
        if algorithm_of(label) == "adafedadam"
        for row in curve_of(record, label, key)
    ]
    base = alt.Chart(alt.InlineData(rows)).encode(
        x=alt.X(
            "round:Q", title="round", axis=alt.Axis(grid=False, tickCount=6), scale=alt.Scale(nice=False)
        ),
        color=alt.Color(
            "alpha:O", scale=alt.Scale(scheme="viridis"), legend=alt.Legend(orient="top", title="α")
        ),
    )
    line = base.mark_line(strokeWidth=2).encode(
        y=alt.Y("mean:Q", title=None, scale=alt.Scale(zero=False)),
        tooltip=["alpha:O", alt.Tooltip("round:Q", format=",d"), alt.Tooltip("mean:Q", format=".3f")],
    )
    return alt.LayerChart(layer=[line], width="container", height=300, title=title, description=title)
