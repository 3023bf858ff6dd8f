"""What a federation looks like: a table for the terminal, and how labels are spread over its clients."""

from pathlib import Path

import altair as alt
import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from rich.text import Text

from fairwind.data.federation import Federation
from fairwind.data.samples import kind
from fairwind.errors import printable
from fairwind.report.html import frame, plain_spec, section, write_figures
from fairwind.report.record import thin
from fairwind.report.table import sample_counts
from fairwind.report.theme import theme
from fairwind.runs.files import write_atomic, writing_pages

MAX_CLIENTS = 200  # columns of the figure


def data_table(spec: str, federation: Federation) -> Table:
    """Clients, samples, their spread and classes, and what is worth knowing of the source."""
    table = Table(
        title=Text(spec), title_justify="left", box=box.SIMPLE, show_header=False, padding=(0, 2, 0, 0)
    )
    for key, value in _facts(federation).items():
        table.add_row(Text(key), Text(value, overflow="fold"))
    return table


def write_labels(directory: Path, federation: Federation) -> list[Path]:
    """Writes labels.html, and the figure as labels.pdf and labels.png; returns the paths."""
    if not federation.has_labels:
        return []
    counts = federation.label_counts().numpy()
    shown = shown_largest(counts)
    specs = {
        "labels": plain_spec(spread(federation, counts, shown)),
        "sizes": plain_spec(sizes(federation, shown)),
    }
    sampled = (
        ""
        if len(shown) == len(counts)
        else (f" Of {len(counts):,} clients {len(shown)} are shown, evenly spaced by size.")
    )
    facts = _facts(federation)
    notes = federation.origin.get("notes", [])
    html = frame(
        kind="Fairwind data",
        title=federation.name,
        finding=_finding(counts),
        facts={
            k: v for k, v in facts.items() if k not in ("federation", "source", "digest", "notes", "rule")
        },
        notes=list(notes),
        body=section(
            "Labels by client",
            "Each column is a client, the largest on the left; a colour is the share of its samples that "
            f"have the label, and there is none where none has. Point at one for its numbers.{sampled}",
            ["labels"],
        )
        + section("Sizes", "Training samples of the same clients.", ["sizes"]),
        specs=specs,
        themes={"light": theme([], "light"), "dark": theme([], "dark")},
    )
    with writing_pages(directory):
        written = [write_atomic(directory / "labels.html", html.encode())]
        return written + write_figures(directory, {"labels": specs["labels"]}, theme([], "light"))


def shown_largest(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The clients by falling size, or MAX_CLIENTS of them, evenly spaced."""
    return thin(np.argsort(-counts.sum(1), kind="stable"), MAX_CLIENTS)


def spread(federation: Federation, counts: NDArray[np.int64], shown: NDArray[np.int64]) -> alt.Chart:
    """Each client a column, each class a row; the share of the client's samples is a colour."""
    classes = counts.shape[1]
    names = [*federation.class_names, *map(str, range(len(federation.class_names), classes))]
    of = f"{len(shown)} of " if len(shown) < len(federation) else ""
    rows = [
        {
            "client": printable(federation.names[k]),
            "place": place,
            "end": place + 1,
            "label": names[c],
            "count": int(counts[k, c]),
            "share": round(100 * counts[k, c] / counts[k].sum(), 2),
        }
        for place, k in enumerate(shown.tolist())
        for c in np.flatnonzero(counts[k]).tolist()
    ]
    chart: alt.Chart = (
        alt.Chart(alt.InlineData(rows), description="Share of each class among each client's samples")
        .properties(
            width="container",
            height=min(700, max(60, 26 * classes if classes < 20 else 11 * classes)),
            title=f"{federation.name}: labels of {of}{len(federation):,} clients",
        )
        .mark_rect(clip=True)
        .encode(
            x=_places(len(shown)),
            x2=alt.X2("end:Q"),
            y=alt.Y(
                "label:N",
                title=None,
                scale=alt.Scale(domain=list(names), paddingInner=0.04),
                axis=alt.Axis(labelOverlap=True),
            ),
            color=alt.Color(
                "share:Q",
                scale=alt.Scale(type="sqrt", domainMin=0),
                legend=alt.Legend(
                    orient="top",
                    title="share of the client’s samples, % (square-root scale)",
                    titleLimit=400,
                    gradientLength=180,
                    gradientThickness=10,
                ),
            ),
            tooltip=[
                "client:N",
                "label:N",
                alt.Tooltip("count:Q", title="samples", format=",d"),
                alt.Tooltip("share:Q", title="share, %", format=".1f"),
            ],
        )
    )
    return chart


def sizes(federation: Federation, shown: NDArray[np.int64]) -> alt.Chart:
    """Each client a bar of its training samples."""
    rows = [
        {
            "client": printable(federation.names[k]),
            "place": p,
            "end": p + 0.9,
            "train": int(federation.train[k]),
            "none": 0,
        }
        for p, k in enumerate(shown.tolist())
    ]
    chart: alt.Chart = (
        alt.Chart(alt.InlineData(rows), description="Training samples of each client")
        .properties(width="container", height=160)
        .mark_rect()
        .encode(
            x=_places(len(shown)),
            x2=alt.X2("end:Q"),
            y=alt.Y("train:Q", title="training samples", axis=alt.Axis(tickCount=5)),
            y2=alt.Y2("none:Q"),
            tooltip=["client:N", alt.Tooltip("train:Q", title="training samples", format=",d")],
        )
    )
    return chart


def _places(clients: int) -> alt.X:
    return alt.X(
        "place:Q",
        title="clients, largest on the left",
        scale=alt.Scale(domain=[0, clients], nice=False),
        axis=alt.Axis(labels=False, grid=False),
    )


def _facts(federation: Federation) -> dict[str, str]:
    d = federation.describe()
    facts = {
        "federation": d["name"],
        "clients": f"{d['clients']:,}",
        "samples": sample_counts(d),
        "training samples of a client": f"{d['smallest']:,} to {d['largest']:,}, median {d['median']:,g}",
        "groups": _sizes(d.get("groups", {})),
        "inputs": kind(federation.inputs),
        **({"classes": f"{d['classes']}"} if d["classes"] else {}),
        "rule": d.get("rule") or "",
        "notes": "; ".join(d.get("notes") or []),
        "source": ", ".join(
            f"{f['file']} ({f['bytes']:,} bytes, {f['layout']})" for f in d.get("source", [])
        ),
        "digest": d.get("digest", "")[:16],
    }
    return {key: value for key, value in facts.items() if value}


def _sizes(groups: dict[str, int]) -> str:
    """The clients in each group, or the number of groups where they are many."""
    if len(groups) > 8:
        return f"{len(groups):,} of {min(groups.values()):,} to {max(groups.values()):,} clients"
    return ", ".join(f"{printable(label)} ({clients:,})" for label, clients in groups.items())


def _finding(counts: NDArray[np.int64]) -> str:
    """One sentence: how unlike the whole the clients' labels are."""
    counts = counts[counts.sum(1) > 0]  # the others have only labels that do not count
    if not len(counts):
        return "No label is that of a class."
    share, whole = counts / counts.sum(1, keepdims=True), counts.sum(0) / counts.sum()
    distance = np.abs(share - whole).sum(1) / 2  # total variation
    most = counts.max(1) / counts.sum(1)
    return (
        f"In the median client {100 * np.median(most):.0f} % of the samples share one label, and its labels "
        f"lie {100 * np.median(distance):.0f} % (total variation) away from those of all clients together."
    )
