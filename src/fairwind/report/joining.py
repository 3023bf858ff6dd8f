"""Who gains from joining the federation, as a table, a chart and a line each."""

from collections.abc import Sequence

import altair as alt
import numpy as np

from fairwind.errors import printable
from fairwind.intervals import Interval
from fairwind.report.charts import legend
from fairwind.report.html import table_html
from fairwind.report.record import Record, thin
from fairwind.report.table import count, display_name
from fairwind.report.theme import colour
from fairwind.runs.gains import Joining, alone_label, joining

MAX_PLACES = 200  # of a line of sorted gains
MOST_NAMES = 3  # of clients that lose


def gains(record: Record) -> list[Joining]:
    """Of each algorithm, if training alone is compared, and single clients are known."""
    if not record.names:
        return []
    return joining(record.results["runs"], record.score, record.results["scores"][0]["kind"])


def table(record: Record, found: Sequence[Joining]) -> str:
    """A row for each algorithm: who gains, how much, and who loses most."""
    rows = []
    for each in found:
        lost = [f"{printable(name)} ({_signed(gain)})" for name, gain in each.losers(record.names)]
        share = each.better_share
        better = f"{share.difference:.0f} % [{share.low:.0f}, {share.high:.0f}]" if share else "–"
        cells = str(each.better), str(each.equal), str(each.worse), better, _average(record, each.average)
        rows.append([display_name(each.algorithm), *cells, ", ".join(lost[:MOST_NAMES]) or "nobody"])
    heads = ["", "better off", "as well off", "worse off", "better off, of all", "average gain"]
    heads.append("who loses most")
    return table_html(heads, rows)


def _average(record: Record, average: Interval | None) -> str:
    if average is None:
        return "–"
    unit = " points" if record.judged.kind == "accuracy" else ""
    return f"{_signed(average.difference)}{unit} [{_signed(average.low)}, {_signed(average.high)}]"


def _signed(value: float) -> str:
    return f"{value:+.3g}".replace("-", "−")


def lines(record: Record) -> list[str]:
    """For a terminal: of how many clients each algorithm is better than training alone, and by how much."""
    return [
        f"{display_name(each.algorithm)}: {count(each.better, 'client')} better off than alone, {each.worse} "
        f"worse off; average gain {_average(record, each.average)}"
        for each in gains(record)
    ]


def chart(record: Record, found: Sequence[Joining]) -> alt.LayerChart:
    """The clients' gains in order, the largest loss on the left: a line for each algorithm."""
    rows = []
    for each in found:
        ordered = np.sort(each.gains[np.isfinite(each.gains)])
        for k in thin(np.arange(len(ordered)), MAX_PLACES).tolist():
            share = float(f"{100 * (k + 0.5) / len(ordered):.4g}")
            name = display_name(each.algorithm)
            rows.append({"algorithm": name, "share": share, "gain": float(f"{ordered[k]:.4g}")})
    x = alt.X(
        "share:Q",
        title="share of clients, the largest loss on the left, %",
        scale=alt.Scale(domain=[0, 100], nice=False),
        axis=alt.Axis(grid=False, tickCount=6),
    )
    y = alt.Y("gain:Q", title=f"gain over training alone: {record.judged.axis}", axis=alt.Axis(tickCount=6))
    lines = (
        alt.Chart(alt.InlineData(rows))
        .mark_line(strokeWidth=2.25, point=alt.OverlayMarkDef(size=30))
        .encode(
            x=x,
            y=y,
            color=colour(record, legend([each.algorithm for each in found])),
            tooltip=["algorithm:N", alt.Tooltip("gain:Q", format="+.3~g")],
        )
    )
    zero = alt.Chart(alt.InlineData([{"gain": 0}])).mark_rule(strokeDash=[4, 3]).encode(y="gain:Q")
    return alt.LayerChart(
        layer=[zero, lines],
        width="container",
        height=280,
        description="Each client's score less that of the model it trains alone, in order, by algorithm",
    )


def words(record: Record) -> str:
    """What the numbers are."""
    rows = record.results["runs"]
    alone = display_name(alone_label(rows) or "local")
    others = {row.get("baseline") for row in rows}
    beside = [
        text
        for kind, text in (
            ("finetuned", "A fine-tuned model is the federation's after some more epochs at the client."),
            ("pooled", "Pooled data is what a federation would like to reach without moving samples."),
        )
        if kind in others
    ]
    return " ".join(
        [
            f"Each client's score with the federation's model, less its score with a model that it trains "
            f"alone ({alone}), with as many local steps: a mean over seeds. One client's number is as rough "
            "as its test set is small. In brackets 95 % intervals: of the share over clients, of the gain "
            "over clients and seeds.",
            *beside,
        ]
    )
