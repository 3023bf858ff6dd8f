"""The page of the theory checks: each claim with its verdict, what was measured, and a chart."""

from pathlib import Path
from typing import NamedTuple

import altair as alt

from fairwind.report.html import chart_html, escaped, frame, plain_spec, table_html, write_figures
from fairwind.report.table import NAMES, display_name
from fairwind.report.theme import theme
from fairwind.runs.files import write_atomic, writing_pages
from fairwind.runs.schema import TheoryCheck, TheoryFile, TheoryRow

TITLE = "The theory, checked on convex problems"


class Lines(NamedTuple):
    """What a check's chart draws: one line for each combination of `by`, over `x`."""

    x: tuple[str, str]  # field, and what it is called
    y: tuple[str, str]
    by: tuple[str, ...]
    where: tuple[tuple[str, str | int], ...] = ()  # what the rows that are drawn have in common
    largest: str = ""  # a field of which only the rows with the largest value are drawn
    log_x: bool = True
    log_y: bool = True


LINES = {
    "theorem1_equal_budgets": Lines(
        ("N", "local steps N"),
        ("gap_mean", "loss left, as a share of the first"),
        ("problem", "noise"),
        (("equal", "gradients"), ("setting", "conditions")),
        largest="budget",
    ),
    "theorem1_bound": Lines(
        ("N", "local steps N"), ("times_adam", "bound’s speed for as many gradients, Adam = 1"), ("c",)
    ),
    "theorem1_best_case": Lines(
        ("N", "local steps N"), ("R_mean", "mean R"), ("problem", "noise", "setting"), (("noise", "none"),)
    ),
    "theorem1_worst_case": Lines(("rounds", "rounds"), ("square_mean", "mean of ‖∇f‖²"), ("N",)),
    "theorem2_guarantee": Lines(
        ("rounds", "rounds"),
        ("square_mean", "mean of ‖∇f‖²"),
        ("clients", "local_steps"),
        (("start", "zero"),),
    ),
    "bias_unequal_smoothness": Lines(
        ("ratio", "smoothness of client 2 over that of client 1"),
        ("bias", "distance from the optimum, as a share of that between the centres"),
        ("algorithm",),
        (("local_steps_1", 20), ("local_steps_2", 20)),
        log_y=False,
    ),
    "bias_unequal_curvature": Lines(
        ("condition", "largest over smallest eigenvalue of the Hessians"),
        ("bias_mean", "mean distance from the optimum"),
        ("algorithm", "local_steps"),
        log_y=False,
    ),
    "equation6_direction": Lines(
        ("alpha", "α"),
        ("angle_mean", "mean angle to the α-fair gradient, degrees"),
        ("local_steps", "first_losses"),
        log_x=False,
        log_y=False,
    ),
    "minimax_limit": Lines(
        ("alpha", "α"), ("distance_to_minimax", "distance to the minimax solution"), (), log_x=False
    ),
    "alpha_fair_gradients_shrink": Lines(
        ("alpha", "α"), ("rounds", "rounds to the α-fair solution"), ("method", "optima"), log_x=False
    ),
}
WORDS = {"local_steps": "local steps", "first_losses": "first losses"}


def write_theory(directory: Path, content: TheoryFile) -> list[Path]:
    """Writes index.html and the figures of the checks in `content` (theory.json); returns the paths."""
    checks = content["checks"]
    specs = {c["name"]: plain_spec(chart) for c in checks if (chart := lines(c)) is not None}
    labels = list(NAMES)  # for their colours
    light = theme(labels, "light")
    verdicts = [check["verdict"] for check in checks]
    html = frame(
        kind="Fairwind study",
        title=TITLE,
        finding=", ".join(
            f"{verdicts.count(v)} of {len(checks)} claims: {v}" for v in dict.fromkeys(verdicts)
        ),
        facts={"scale": content["scale"], "commit": str(content["environment"]["commit"])},
        notes=[],
        body="\n".join(_section(check, check["name"] in specs) for check in checks),
        specs=specs,
        themes={"light": light, "dark": theme(labels, "dark")},
    )
    (directory / "figures").mkdir(parents=True, exist_ok=True)
    with writing_pages(directory):
        written = [write_atomic(directory / "index.html", html.encode())]
        return written + write_figures(directory / "figures", specs, light)


def lines(check: TheoryCheck) -> alt.LayerChart | None:
    """The chart of a check, or nothing where it has no rows to draw."""
    if (drawn := LINES.get(check["name"])) is None:
        return None
    (x, x_title), (y, y_title) = drawn.x, drawn.y
    chosen = [row for row in check["rows"] if all(row[k] == v for k, v in drawn.where)]
    if drawn.largest:
        largest = max((row[drawn.largest] for row in chosen), default=0)
        chosen = [row for row in chosen if row[drawn.largest] == largest]
    rows = [
        {"x": row[x], "y": row[y], "line": _name(row, drawn.by)}
        for row in chosen
        if row[x] is not None and row[y] is not None
    ]
    rows = [r for r in rows if (r["x"] > 0 or not drawn.log_x) and (r["y"] > 0 or not drawn.log_y)]
    if not rows:
        return None
    x_scale, y_scale = (alt.Scale(type="log" if log else "linear") for log in (drawn.log_x, drawn.log_y))
    base = alt.Chart(alt.InlineData(rows)).encode(
        x=alt.X("x:Q", title=x_title, scale=x_scale, axis=alt.Axis(grid=False, tickCount=6)),
        y=alt.Y("y:Q", title=y_title, scale=y_scale, axis=alt.Axis(tickCount=6, format="~g")),
        color=alt.Color("line:N", sort=None, legend=alt.Legend(orient="top", title=None, columns=2)),
        tooltip=[
            "line:N",
            alt.Tooltip("x:Q", title=x_title),
            alt.Tooltip("y:Q", title=y_title, format=".3g"),
        ],
    )
    line = base.mark_line(strokeWidth=2, point=True)
    return alt.LayerChart(layer=[line], width="container", height=320, description=check["claim"])


def _name(row: TheoryRow, by: tuple[str, ...]) -> str:
    """What a line is called: the values of its fields, with a word for those that are numbers."""
    parts = []
    for key in by:
        value = row[key]
        if key == "algorithm":
            parts.append(display_name(value))
        elif isinstance(value, str):
            parts.append(f"{WORDS.get(key, key)} {value}" if key in ("noise", "first_losses") else value)
        else:
            parts.append(f"{WORDS.get(key, key)} {value:.3g}")
    return ", ".join(parts) or "α-fair solution"


def _section(check: TheoryCheck, drawn: bool) -> str:
    rows = check["rows"]
    head = list(rows[0]) if rows else []
    table = table_html(head, [[_value(row.get(key)) for key in head] for row in rows]) if rows else ""
    plot = f'<div class="charts">{chart_html(check["name"])}</div>' if drawn else ""
    return (
        f"<section><h2>{escaped(check['claim'])}</h2><p><b>{escaped(check['verdict'].capitalize())}.</b> "
        f"{escaped(check['explanation'])}</p>{plot}"
        f"<details><summary>All measured rows</summary>{table}</details></section>"
    )


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return "–" if value is None else str(value)
