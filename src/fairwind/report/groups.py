"""How groups of clients fare: a table of their averages, and the gap between them as a chart."""

import math
from typing import TypedDict

import altair as alt

from fairwind.errors import printable
from fairwind.report.html import Column, columns_of, columns_table, escaped
from fairwind.report.record import Record
from fairwind.report.spread import name_axis
from fairwind.report.table import (
    by_other_scores,
    count,
    display_name,
    group_measures,
    judged,
    measures,
    worst_groups,
)
from fairwind.report.theme import SPACE, colour
from fairwind.runs.schema import Findings

MAX_COLUMNS = 20  # groups in the table
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")


def averages(record: Record) -> alt.LayerChart | None:
    """Each algorithm a line from its worst group's average to its best one's; none without groups."""
    if not group_measures(record.results):
        return None
    rows, spans = _rows(record)
    names = [display_name(label) for label in record.labels]
    labels = sorted({row["group"] for row in rows})
    widest = 50 + 7 * max((len(name) for name in labels), default=0)
    shape = alt.Shape(  # of more groups than shapes all are circles
        "group:N",
        scale=alt.Scale(domain=labels, range=SHAPES if len(labels) <= len(SHAPES) else ["circle"]),
        legend=alt.Legend(
            orient="top",
            title=None,
            symbolStrokeWidth=2,
            columns=alt.ExprRef(f"max(1, floor({SPACE} / {widest}))"),
        )
        if len(labels) <= len(SHAPES)
        else None,
    )
    unit = ", %" * (record.judged.kind == "accuracy")
    x = alt.X(
        "avg:Q",
        title=f"average {record.judged.name} of a group’s clients{unit}",
        scale=alt.Scale(zero=False, nice=False, padding=12),
        axis=alt.Axis(tickCount=alt.ExprRef("ceil(width / 80)")),
    )
    y = alt.Y(
        "algorithm:N",
        title=None,
        scale=alt.Scale(domain=names),
        axis=name_axis({name: name for name in names}),
    )
    line = (
        alt.Chart(alt.InlineData(spans))
        .mark_rule(strokeWidth=3, opacity=0.35)
        .encode(x=alt.X("low:Q"), x2=alt.X2("high:Q"), y=y, color=colour(record, legend=None))
    )
    tooltip = [
        alt.Tooltip("algorithm:N"),
        alt.Tooltip("group:N"),
        alt.Tooltip("clients:Q", format=",d"),
        alt.Tooltip("avg:Q", title=f"average {record.judged.axis}", format=".4~g"),
        *([alt.Tooltip("std:Q", title="STD over seeds", format=".3~g")] if record.seeds > 1 else []),
    ]
    worst = alt.Chart(alt.InlineData([row for row in rows if row["worst"]])).encode(x=x, y=y)
    others = alt.Chart(alt.InlineData([row for row in rows if not row["worst"]])).encode(x=x, y=y)
    dots = [
        chart.mark_point(filled=filled, size=90, strokeWidth=2, opacity=1).encode(
            shape=shape, color=colour(record, legend=None), tooltip=tooltip
        )
        for chart, filled in ((others, False), (worst, True))
    ]
    name = worst.mark_text(dy=-14, fontSize=11, limit=120).encode(text="group:N")
    return alt.LayerChart(
        layer=[line, *dots, name],
        width="container",
        height=max(120, 54 * len(names)),
        description=f"Average {record.judged.name} of each group of clients, by algorithm",
    )


class Dot(TypedDict):
    """A group under an algorithm."""

    algorithm: str
    group: str
    clients: int
    avg: float
    std: float | None
    worst: bool


class Span(TypedDict):
    """From an algorithm's worst group to its best one."""

    algorithm: str
    low: float
    high: float


def _rows(record: Record) -> tuple[list[Dot], list[Span]]:
    """A row for each algorithm and group that has an average; and where they end, for each algorithm."""
    rows: list[Dot] = []
    spans: list[Span] = []
    worst = worst_groups(record.results)
    for summary in record.results["summary"]:
        label = summary["algorithm"]
        mine: list[Dot] = [
            {
                "algorithm": display_name(label),
                "group": printable(name),
                "clients": group["clients"],
                "avg": group["avg"]["mean"],
                "std": group["avg"]["std"],
                "worst": worst.get(label) == name,
            }
            for name, group in summary.get("groups", {}).items()
            if group["avg"]["mean"] is not None
        ]
        rows += mine
        if mine:
            ends = [row["avg"] for row in mine]
            spans.append({"algorithm": display_name(label), "low": min(ends), "high": max(ends)})
    return rows, spans


def words(record: Record) -> str:
    """What the section shows."""
    federation = record.results["federation"]
    sizes: dict[str, int] = federation.get("groups", {}) if "clients" in federation else {}
    some = f" The table has the {MAX_COLUMNS} worst-off of them." if len(sizes) > MAX_COLUMNS else ""
    seeds = (
        " Worst group and gap are taken under each seed, then averaged over seeds."
        if record.seeds > 1
        else ""
    )
    return (
        f"The clients are in {count(len(sizes), 'group')}; a group’s average counts its clients alike. "
        "▾ marks an algorithm’s worst group, which is filled and named in the chart; the shorter the line, "
        f"the smaller the gap.{seeds}{some}"
    )


def tables(record: Record) -> str:
    """The averages of groups; those by scores beside the main one are folded away."""
    results = record.results
    others = ""
    for other in by_other_scores(results):
        lower = ", lower is better" if judged(other).kind == "lower" else ""
        title = f"{judged(other).title}{lower}"
        others += f"<h3>{escaped(title)}</h3>{_table(other, f'Groups: {title}')}"
    folded = f"<details><summary>By other scores</summary>{others}</details>" if others else ""
    return _table(results, "Groups") + folded


def _table(results: Findings, label: str) -> str:
    average = measures(results)[0]
    summary = [row["groups"] for row in results["summary"]]
    sizes = {name: group["clients"] for groups in summary for name, group in groups.items()}
    shown = list(sizes)
    if len(shown) > MAX_COLUMNS:  # those that are marked, in any case
        first = dict.fromkeys([*worst_groups(results).values(), *_worst_first(results, shown)])
        shown = _worst_first(results, list(first)[:MAX_COLUMNS])
    columns = [
        Column(
            f"group {group}",
            average._replace(
                name=f"{printable(group)}, {count(sizes[group], 'client')}",
                meaning=f"{average.meaning} of this group",
            ),
            [groups[group]["avg"] if group in groups else None for groups in summary],
        )
        for group in shown
    ]
    columns += columns_of(results, group_measures(results))
    worst = {algorithm: f"group {group}" for algorithm, group in worst_groups(results).items()}
    return columns_table(results, columns, label, worst)


def _worst_first(results: Findings, groups: list[str]) -> list[str]:
    sign = judged(results).sign

    def mean(group: str) -> float:
        rows = [row["groups"][group] for row in results["summary"] if group in row.get("groups", {})]
        means = [row["avg"]["mean"] for row in rows if row["avg"]["mean"] is not None]
        return sign * sum(means) / len(means) if means else math.inf

    return sorted(groups, key=mean)
