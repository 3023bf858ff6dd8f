"""What charts look like: the colour and the dash of each algorithm, and the config, light or dark."""

from typing import Literal

import altair as alt

from fairwind.report.html import Spec
from fairwind.report.record import Record
from fairwind.report.table import algorithm_of, display_name

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


def theme(labels: list[str], mode: Literal["light", "dark"]) -> Spec:
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
            "symbolBaseFillColor": quiet,
            "symbolBaseStrokeColor": text,  # of shapes; else black, which a dark page swallows
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


def colour(record: Record, legend: alt.Legend | None) -> alt.Color:
    """Colour by algorithm, over all algorithms of the page so that each keeps its colour in every chart."""
    names = [display_name(label) for label in record.domain]
    return alt.Color("algorithm:N", scale=alt.Scale(domain=names), legend=legend)
