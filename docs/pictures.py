"""Draws the pictures of the first page, of docs/concepts and of the first tutorial, from runs of the package.

    python docs/pictures.py    # half a minute on two cores; writes index-*, concept-* and start-* in figures/

Numbers are computed here, under fixed seeds, or come from results/; nothing is drawn by hand.
"""

import math
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import altair as alt
import torch
import vl_convert
from tables import panel
from torch import Tensor, nn

import fairwind as fw
from fairwind.report.charts import curve_of
from fairwind.report.table import display_name
from fairwind.report.theme import FONT, PALETTE

FIGURES = Path(__file__).parent / "figures"
BLUE, ORANGE, GREEN = (PALETTE["light"][name] for name in ("fedavg", "adafedadam", "fedadam"))
QUIET = "#7c8794"  # reads on a light and on a dark page
ALPHAS = (0, 0.5, 1, 2, 4, 8)


def first_page() -> alt.LayerChart:
    """The README's picture for half a page: the clients that are worst off on Synthetic, by round."""
    record = panel("convergence", "3").record
    assert record is not None
    rows = [row for label in record.labels for row in curve_of(record, label, "worst30")]
    by_round = alt.X("round:Q", axis=alt.Axis(grid=False, tickCount=5), scale=alt.Scale(nice=False))
    names = [display_name(label) for label in record.labels]
    colours = _colours(names, [PALETTE["light"][label] for label in record.labels], "algorithm", 3)
    title = alt.Title("accuracy of the worst-off 30 % of clients, %", anchor="start", offset=8)
    base = alt.Chart(alt.InlineData(rows), width=370, height=200, title=title).encode(by_round, colours)
    band = base.mark_area(fillOpacity=0.15).encode(y="low:Q", y2="high:Q")
    line = base.mark_line(strokeWidth=2.5).encode(alt.Y("mean:Q", title=None))
    return alt.layer(band, line)


def clinic(patients: int, degrees: float, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Patients of a clinic whose rule is a line at an angle: as in the tutorial on α."""
    rule = torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])
    inputs = torch.randn(patients, 2, generator=draw)
    noise = 0.3 * torch.randn(patients, generator=draw)
    return inputs, (inputs @ rule + noise > 0).long()


def clinics() -> fw.Federation:
    """Three large clinics that nearly agree, and three small ones with rules of their own."""
    draw = torch.Generator().manual_seed(0)
    sizes = {"Oslo": (400, 0), "Turku": (300, 10), "Uppsala": (200, 20)}
    sizes |= {"Aarhus": (100, 60), "Ribe": (100, 75), "Visby": (60, 90)}
    made = {name: clinic(*of, draw) for name, of in sizes.items()}
    return fw.Federation.from_clients(made, train=0.5, name="clinics")


def objectives() -> alt.Chart:
    """Each clinic's loss over the models that are lines through the plane, and their mean by size."""
    federation = clinics()
    assert isinstance(federation.inputs, Tensor)
    assert isinstance(federation.targets, Tensor)
    rows = []
    shown = {"Oslo": "Oslo", "Ribe": "Ribe", "Visby": "Visby"}
    for degrees in range(-60, 151, 3):
        angle = math.radians(degrees)
        score = federation.inputs @ torch.tensor([math.cos(angle), math.sin(angle)]) * 3
        loss = nn.functional.softplus(torch.where(federation.targets == 1, -score, score))
        for k, name in enumerate(federation.names):
            begin = int(federation.start[k])
            if name in shown:
                own = loss[begin : begin + int(federation.train[k] + federation.test[k])]
                rows.append({"angle": degrees, "client": name, "loss": float(own.mean())})
        rows.append({"angle": degrees, "client": "all, by size", "loss": float(loss.mean())})
    order = [*shown, "all, by size"]
    return (
        alt.Chart(alt.InlineData(rows), width=520, height=260)
        .mark_line(strokeWidth=2.5)
        .encode(
            alt.X("angle:Q", title="model: angle of the dividing line, degrees", axis=alt.Axis(grid=False)),
            alt.Y("loss:Q", title="mean loss"),
            _colours(order, [BLUE, ORANGE, GREEN, QUIET]),
            alt.StrokeDash(
                "client:N",
                sort=order,
                scale=alt.Scale(domain=order, range=[[1, 0]] * 3 + [[6, 4]]),
                legend=None,
            ),
        )
    )


def weights() -> alt.Chart:
    """The share of the weight that a client has, by how far it lags behind three others of equal size."""
    rows = []
    for step in range(0, 21):
        lag = step / 20
        for alpha in (0, 1, 2, 4):
            own = lag**alpha if alpha else 1.0
            rows.append({"I": lag, "α": f"α = {alpha}", "share": 100 * own / (own + 3 * 0.5**alpha)})
    order = [f"α = {alpha}" for alpha in (0, 1, 2, 4)]
    return (
        alt.Chart(alt.InlineData(rows), width=520, height=240)
        .mark_line(strokeWidth=2.5)
        .encode(
            alt.X("I:Q", title="I of a client, where three others have I = 0.5", axis=alt.Axis(grid=False)),
            alt.Y("share:Q", title="its share of the weight, %"),
            _colours(order, [QUIET, BLUE, GREEN, ORANGE], "α"),
        )
    )


def trade() -> alt.Chart:
    """What α does to the clinics: the worst-off, the mean clinic, and the mean patient."""
    task = fw.Task(lambda: nn.Linear(2, 2), clinics(), rounds=60)
    built = {f"{a:g}": fw.algorithms.adafedadam(alpha=a, lr=0.02) for a in ALPHAS}
    compared = fw.compare(task, built, seeds=range(5), progress=False)
    names = {"avg_weighted": "all patients", "avg": "all clinics", "worst30": "worst 30 % of clinics"}
    rows = [
        {"α": float(line["algorithm"]), "mean over": name, "accuracy": line[key]["mean"]}
        for line in compared.results["summary"]
        for key, name in names.items()
    ]
    return (
        alt.Chart(alt.InlineData(rows), width=520, height=260)
        .mark_line(strokeWidth=2.5, point=True)
        .encode(
            alt.X("α:Q", axis=alt.Axis(grid=False, tickCount=8)),
            alt.Y("accuracy:Q", title="accuracy, %", scale=alt.Scale(zero=False)),
            _colours(names.values(), [QUIET, BLUE, ORANGE], "mean over"),
        )
    )


def noise() -> alt.Chart:
    """The spread of measured accuracies where every client's true accuracy is 80 %."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for samples in (5, 20, 100):
        right = (torch.rand(2000, samples, generator=draw) < 0.8).double().mean(1) * 100
        counts = torch.bincount((right / 5).round().long(), minlength=21)
        kind = f"{samples} test samples (STD {right.std(correction=0):.0f})"
        rows += [
            {"accuracy": 5 * i, "clients": 100 * int(n) / 2000, "each": kind} for i, n in enumerate(counts)
        ]
    order = list(dict.fromkeys(row["each"] for row in rows))
    return (
        alt.Chart(alt.InlineData(rows), width=520, height=240)
        .mark_line(strokeWidth=2.5, interpolate="step")
        .encode(
            alt.X("accuracy:Q", title="measured accuracy of a client, %", axis=alt.Axis(grid=False)),
            alt.Y("clients:Q", title="share of the clients, %"),
            _colours(order, [ORANGE, GREEN, BLUE], "each"),
        )
    )


def start() -> Path:
    """The chart of the worst-off clinics that the first tutorial's comparison leaves."""
    (code,) = re.findall(
        r"```python\n(# clinics\.py\n.*?)```", (FIGURES.parent / "start.md").read_text(), re.S
    )
    names: dict[str, Any] = {}
    exec(compile(code, "clinics.py", "exec"), names)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "first"
        fw.compare(names["task"], "paper", seeds=[0, 1, 2], out=out, progress=False).report()
        return shutil.copy(out / "figures" / "worst30.png", FIGURES / "start-worst30.png")


def _colours(order: Iterable[str], colours: list[str], field: str = "client", columns: int = 0) -> alt.Color:
    names = list(order)
    legend = alt.Legend(title=None, orient="top", labelLimit=260, symbolType="stroke", columns=columns)
    return alt.Color(f"{field}:N", sort=names, scale=alt.Scale(domain=names, range=colours), legend=legend)


def write(name: str, chart: alt.Chart | alt.LayerChart) -> Path:
    """An SVG that reads on light and dark pages: no background, quiet axes."""
    axis = {
        "gridColor": "#7c879433",
        "domain": False,
        "ticks": False,
        "labelFontSize": 12,
        "titleFontSize": 12,
    }
    axis |= {"labelColor": QUIET, "titleColor": QUIET, "titleFontWeight": "normal"}
    config = {"background": "transparent", "font": FONT, "view": {"stroke": None}, "axis": axis}
    config["legend"] = {"labelColor": QUIET, "labelFontSize": 12, "symbolStrokeWidth": 3, "columnPadding": 24}
    config["title"] = {"color": QUIET, "fontSize": 12, "fontWeight": "normal"}
    path = FIGURES / f"{name}.svg"
    path.write_text(vl_convert.vegalite_to_svg(chart.properties(config=config).to_dict()) + "\n")
    return path


if __name__ == "__main__":
    print(write("index-worst30", first_page()))
    for drawing in (objectives, weights, trade, noise):
        print(write(f"concept-{drawing.__name__}", drawing()))
    print(start())
