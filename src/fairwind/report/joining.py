"""Who gains from joining the federation, as a table and a chart."""

from collections.abc import Sequence

import altair as alt
import numpy as np

from fairwind.errors import printable
from fairwind.report.charts import legend
from fairwind.report.gains import Joining
from fairwind.report.html import table_html
from fairwind.report.record import Record, thin
from fairwind.report.table import display_name
from fairwind.report.theme import colour

MAX_PLACES = 200  # of a line of sorted gains
MOST_NAMES = 3  # of clients that lose


def table(record: Record, found: Sequence[Joining]) -> str:
    """A row for each algorithm: who gains, how much, and who loses most."""
    unit = " points" if record.judged.kind == "accuracy" else ""
    rows = []
    for each in found:
        lost = [f"{printable(name)} ({gain:+.3g})" for name, gain in each.losers(record.names)[:MOST_NAMES]]
        average = "–"
        if each.average is not None:
            average = (
                f"{each.average.difference:+.3g}{unit} [{each.average.low:+.3g}, {each.average.high:+.3g}]"
            )
        counts = str(each.better), str(each.worse)
        rows.append([display_name(each.algorithm), *counts, average, ", ".join(lost) or "nobody"])
    return table_html(["", "better off", "worse off", "average gain", "who loses most"], rows)


def chart(record: Record, found: Sequence[Joining]) -> alt.LayerChart:
    """The clients' gains in order, the largest loss on the left: a line for each algorithm."""
    rows = []
    for each in found:
        gains = np.sort(each.gains[np.isfinite(each.gains)])
        for k in thin(np.arange(len(gains)), MAX_PLACES).tolist():
            share = float(f"{100 * (k + 0.5) / len(gains):.4g}")
            name = display_name(each.algorithm)
            rows.append({"algorithm": name, "share": share, "gain": float(f"{gains[k]:.4g}")})
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
            color=colour(record, legend(record.labels)),
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


WORDS = (
    "Each client's score with the federation's model, less its score with a model that it trains alone, with "
    "as many local steps: a mean over seeds. One client's number is as rough as its test set is small."
)
