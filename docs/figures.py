"""Draws the figures of the README and of the pages about the paper from the files under results/.

python docs/figures.py                      # after new results
python docs/figures.py --data-dir DIR       # those of labels too, which need the setups' files
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from tables import ALGORITHMS, DOCS, ROOT, panel, runs

from fairwind import setups
from fairwind.paper.studies import THEORY
from fairwind.paper.two_cores import PARTITIONS
from fairwind.report import charts, pareto, theory
from fairwind.report.html import VEGA_LITE, plain_spec
from fairwind.report.labels import shown_largest, spread
from fairwind.report.paired import paired
from fairwind.report.panel import show
from fairwind.report.paper_comparison import against_others, by_algorithm
from fairwind.report.record import Record
from fairwind.report.spread import sorted_scores
from fairwind.report.table import algorithm_of, display_name
from fairwind.report.theme import colour, theme
from fairwind.study import Panel

FIGURES = DOCS / "figures"
WIDE = 640  # points
NAMES = [display_name(name) for name in ALGORITHMS if name != "adafedadam"]


def write(name: str, chart: Any, labels: Sequence[str]) -> Path:
    """A chart as figures/NAME.png, on white, with the colours of these algorithms."""
    spec = plain_spec(chart)
    if spec.get("width") == "container":
        spec["width"] = WIDE
    spec["config"] = theme(list(labels), "light") | {"background": "white", "padding": 12}
    path = FIGURES / f"{name}.png"
    path.write_bytes(vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=2))
    return path


def known(study: str, number: str) -> Record:
    record = panel(study, number).record
    assert record is not None
    return record


def sentiment() -> Record:
    """One seed of the sample of Sentiment140, by group."""
    found = show(Panel("Sentiment140", "sent140:by=group", seeds=(0,)), list(runs())).record
    assert found is not None
    return found


def three_panels(record: Record, name: str) -> alt.HConcatChart:
    """As in the paper's Figure 2: average and worst 30 % by round, and the clients at the end."""

    def lines(rows: Iterable[dict[str, Any]], x: alt.X, y: str, title: str) -> alt.Chart:
        key = alt.Legend(orient="top", title=None, symbolType="stroke", columns=5)
        chart: alt.Chart = (
            alt.Chart(alt.InlineData(list(rows)), width=250, height=190, title=title)
            .mark_line(strokeWidth=2, strokeJoin="round")
            .encode(x, alt.Y(y, title=None, scale=alt.Scale(zero=False)), colour(record, key))
        )
        return chart

    by_round = alt.X(
        "round:Q", title="round", axis=alt.Axis(grid=False, tickCount=5), scale=alt.Scale(nice=False)
    )
    by_place = alt.X("share:Q", title="share of clients, worst-off first, %", axis=alt.Axis(grid=False))
    parts = [
        lines((row for label in record.labels for row in charts.curve_of(record, label, key)), by_round, *how)
        for key, *how in (
            ("avg", "mean:Q", f"{name}: average, %"),
            ("worst30", "mean:Q", "worst-off 30 %, %"),
        )
    ]
    ends = (row for label in record.labels for row in sorted_scores(record, label))
    parts.append(lines(ends, by_place, "score:Q", "clients after the last round, %"))
    joined: alt.HConcatChart = alt.hconcat(*parts, spacing=56, bounds="flush").resolve_scale(color="shared")
    return joined


def leads() -> alt.HConcatChart:
    """AdaFedAdam with default rates minus each baseline, with default rates and with the best of a grid."""
    best = [rows[0]["algorithm"] for rows in by_algorithm(known("tuned", "0").results["summary"]).values()]
    best = [label for label in best if algorithm_of(label) != "adafedadam"]
    asked = (
        ("Synthetic", "default rates", "convergence", "3", ()),
        ("Synthetic", "best rates", "tuned", "0", best),
        ("FEMNIST, 374 writers", "default rates", "convergence", "0", ()),
        ("FEMNIST, 374 writers", "best rates", "tuned", "3", ()),
        ("CIFAR-10, VGG11", "default rates", "convergence", "1", ()),
    )
    rows = []
    for setup, rates, study, number, others in asked:
        _, found = against_others(paired(known(study, number)), others)
        for label, intervals in found.items():
            for key, measure in (("avg", "average"), ("worst30", "worst-off 30 %")):
                here = {"setup": setup, "rates": rates, "measure": measure}
                here["baseline"] = display_name(algorithm_of(label))
                rows.append(here | intervals[key]._asdict())
    order = list(dict.fromkeys(row["setup"] for row in rows))

    def part(measure: str, first: bool) -> alt.FacetChart:
        y = alt.Y("baseline:N", sort=NAMES, title=None, axis=alt.Axis(grid=False, labels=first))
        rates = list(dict.fromkeys(row["rates"] for row in rows))
        shape: dict[str, Any] = {
            "color": alt.Color(
                "rates:N",
                scale=alt.Scale(domain=rates, range=["#0B5CAD", "#D95F02"]),
                legend=alt.Legend(orient="top", title="the baseline has its"),
            ),
            "yOffset": alt.YOffset("rates:N", sort=rates),
        }
        x = alt.X("difference:Q", title=f"AdaFedAdam minus baseline, {measure}, points")
        base = alt.Chart().encode(y=y, **shape)
        zero = alt.Chart().mark_rule(strokeWidth=1).encode(x=alt.datum(0))
        bars = base.mark_rule(strokeWidth=2.5).encode(x=alt.X("low:Q"), x2=alt.X2("high:Q"))
        layers = alt.layer(zero, bars, base.mark_point(filled=True, size=60, opacity=1).encode(x=x))
        header = alt.Header(
            title=None, orient="top", labelAnchor="start", labelFontWeight=600, labels=first, labelFontSize=12
        )
        mine = alt.InlineData([row for row in rows if row["measure"] == measure])
        chart: alt.FacetChart = layers.properties(width=300, height=84, data=mine).facet(
            row=alt.Row("setup:N", sort=order, header=header), spacing=8
        )
        return chart

    joined: alt.HConcatChart = alt.hconcat(
        part("average", True), part("worst-off 30 %", False), spacing=16
    ).resolve_scale(color="shared")
    return joined


def labels(data_dir: Path) -> None:
    """The labels of the clients of each partition, draw 0, as in the paper's Figure A."""
    for setup in ("cifar10", "femnist-pooled"):
        for beta, _ in PARTITIONS:
            where = setups.Where(data_dir=data_dir / setup.partition("-")[0])
            federation = setups.federation(f"{setup}:beta={beta}", where)
            counts = federation.label_counts().numpy()
            chart = spread(federation, counts, shown_largest(counts))
            if setup != "cifar10":
                chart = chart.properties(height=320)
            print(write(f"labels-{setup}-{beta}", chart.properties(width=280), []))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the figures of the pages about the paper.")
    parser.add_argument("--data-dir", type=Path, help="folder with the setups' files: cifar10, femnist")
    o = parser.parse_args()
    record = known("convergence", "3")
    title = "Synthetic: accuracy of the worst-off 30 % of clients, %"
    print(write("synthetic-worst30", charts.curves(record, "worst30", title), record.labels))
    for name, title, record in (
        ("femnist", "FEMNIST", known("convergence", "0")),
        ("cifar10", "CIFAR-10", known("convergence", "1")),
        ("sent140", "Sentiment140", sentiment()),
        ("synthetic", "Synthetic", known("convergence", "3")),
    ):
        print(write(f"figure2-{name}", three_panels(record, title), record.labels))
    print(write("leads", leads(), ALGORITHMS))
    record = known("alpha", "0")
    print(write("alpha-front", pareto.pareto(record), record.labels))
    content = json.loads((ROOT / "results" / THEORY / "theory.json").read_text())
    for check in content["checks"]:
        if check["name"] == "bias_unequal_smoothness":
            print(write("bias-unequal-smoothness", theory.lines(check), list(theory.NAMES)))
    if o.data_dir is not None:
        labels(o.data_dir)


if __name__ == "__main__":
    main()
