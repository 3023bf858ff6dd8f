"""The plane of average and fairness: every algorithm under every setting of a sweep, and the Pareto front."""

from typing import NotRequired, TypedDict

import altair as alt

from fairwind.report.charts import legend
from fairwind.report.html import chart_html, escaped
from fairwind.report.panel import Shown
from fairwind.report.record import Record
from fairwind.report.table import count, display_name
from fairwind.report.theme import colour


class Point(TypedDict):
    """An algorithm under one setting, a mean over seeds."""

    algorithm: str
    name: str
    average: float
    spread: float
    front: NotRequired[bool]


def planes(shown: list[Shown]) -> dict[str, list[Shown]]:
    """The panels with finished runs by setup: those of one setup share a plane."""
    found: dict[str, list[Shown]] = {}
    for each in shown:
        if each.record is not None:
            found.setdefault(each.panel.setup, []).append(each)
    return {setup: panels for setup, panels in found.items() if len(plane_points(panels)) > 1}


def plane_points(panels: list[Shown]) -> list[Point]:
    """The mean over seeds of each algorithm in each panel, and whether it is on the front."""
    points: list[Point] = []
    sign = 1
    for shown in panels:
        assert shown.record is not None
        sign = shown.record.judged.sign
        setting = shown.panel.title.removeprefix(shown.panel.setup).removeprefix(", ")
        for row in shown.record.results["summary"]:
            average, spread = row["avg"]["mean"], row["std"]["mean"]
            if average is not None and spread is not None:
                name = display_name(row["algorithm"])
                told = f"{name}, {setting}" if setting and len(panels) > 1 else name
                points.append({"algorithm": name, "name": told, "average": average, "spread": spread})
    for point in points:
        point["front"] = not any(_beats(other, point, sign) for other in points)
    return points


def _beats(one: Point, other: Point, sign: int) -> bool:
    """Whether one is at least as good in both, and better in one of them."""
    better = sign * (one["average"] - other["average"]), other["spread"] - one["spread"]
    return bool(min(better) >= 0 and max(better) > 0)


def plane(panels: list[Shown]) -> alt.LayerChart:
    """Average against spread, better to the right and up; the front is a line through the points on it."""
    points = plane_points(panels)
    record = panels[0].record
    assert record is not None
    line = sorted((p for p in points if p["front"]), key=lambda p: (p["average"], p["spread"]))
    lower = record.judged.sign < 0
    x = alt.X(
        "average:Q",
        title=f"average over clients: {record.judged.axis}",
        scale=alt.Scale(zero=False, reverse=lower, padding=24),
        axis=alt.Axis(tickCount=6),
    )
    y = alt.Y(
        "spread:Q",
        title="STD over clients",
        scale=alt.Scale(zero=False, reverse=True, padding=24),
        axis=alt.Axis(tickCount=6),
    )
    tooltip = [
        "name:N",
        alt.Tooltip("average:Q", title=f"average {record.judged.axis}", format=".4~g"),
        alt.Tooltip("spread:Q", title="STD over clients", format=".4~g"),
    ]
    front = alt.Chart(alt.InlineData(line)).encode(x=x, y=y)
    stairs = front.mark_line(strokeWidth=1.5, strokeDash=[4, 3], interpolate="linear").encode(
        order=alt.Order("average:Q"), color=alt.value("#7a8594")
    )
    dots = (
        alt.Chart(alt.InlineData(points))
        .mark_point(filled=True, size=90, opacity=1)
        .encode(x=x, y=y, color=colour(record, legend(_labels(panels))), tooltip=tooltip)
    )
    names = front.mark_text(align="left", dx=9, dy=-7, fontSize=12).encode(text="name:N")
    return alt.LayerChart(
        layer=[stairs, dots, names],
        width="container",
        height=400,
        description=f"Average {record.judged.name} against its standard deviation over clients; Pareto front",
    )


def plane_section(setup: str, name: str, panels: list[Shown]) -> str:
    """The chart by its name, and the front in words."""
    points = plane_points(panels)
    on = [point["name"] for point in points if point["front"]]
    words = (
        "Each dot is an algorithm under one setting, a mean over seeds. Better is to the right (average) and "
        f"up (fairer: a smaller spread over clients). {count(len(on), 'point')} of {len(points)} "
        f"{'is' if len(on) == 1 else 'are'} on the Pareto front, the dashed line, as no other is at least as "
        f"good in both: {', '.join(on)}."
    )
    return (
        f"<section><h2>{escaped(f'Average against fairness on {setup}')}</h2><p>{escaped(words)}</p>"
        f'<div class="charts">{chart_html(name)}</div></section>'
    )


def _labels(panels: list[Shown]) -> list[str]:
    records: list[Record] = [each.record for each in panels if each.record is not None]
    return list(dict.fromkeys(label for record in records for label in record.labels))
