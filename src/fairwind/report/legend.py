"""One key for all charts of a page: a button for each algorithm, which shows and hides it everywhere."""

import copy
from html import escape
from typing import Any

from fairwind.report.html import Spec, escaped
from fairwind.report.table import display_name
from fairwind.report.theme import DASHES, PALETTE, styles

HIDDEN = "hidden"  # the parameter of every chart that holds the names of hidden algorithms


def shared(spec: Spec) -> Spec:
    """A chart that draws no algorithm that is hidden, and says which of its data are worth saving."""
    drawn = copy.deepcopy(spec)
    if _share(drawn):
        drawn["params"] = [*drawn.get("params", []), {"name": HIDDEN, "value": []}]
    data = drawn.get("datasets", {})
    if data:
        most = max(data, key=lambda name: ("algorithm" in str(data[name][:1]), len(data[name])))
        drawn["usermeta"] = {"csv": most}
    return drawn


def _share(part: Any) -> bool:
    """Whether anything in this part of a spec is drawn by algorithm."""
    if "layer" in part:
        return any(list(map(_share, part["layer"])))  # all of them
    fields = [
        channel.get("field") for channel in part.get("encoding", {}).values() if isinstance(channel, dict)
    ]
    if "algorithm" in fields:
        shown = {"filter": f"indexof({HIDDEN}, datum.algorithm) < 0"}
        part["transform"] = [*part.get("transform", []), shown]
    return "algorithm" in fields


def legend_html(labels: list[str]) -> str:
    """The buttons; nothing where there is one algorithm."""
    if len(labels) < 2:
        return ""
    keys = ""
    for label, (colour, dash) in zip(labels, styles(labels), strict=True):
        dashes = " ".join(map(str, DASHES[dash]))
        light, dark = PALETTE["light"][colour], PALETTE["dark"][colour]
        keys += (
            f'<button type="button" class="key" aria-pressed="true" style="--light:{light};--dark:{dark}" '
            f'data-name="{escape(display_name(label))}"><svg width="26" height="10" aria-hidden="true">'
            f'<line x1="1" y1="5" x2="25" y2="5" stroke-width="3" stroke-dasharray="{dashes}"/></svg>'
            f"<span>{escaped(display_name(label))}</span></button>"
        )
    return (
        '<div class="legend" role="group" aria-label="Algorithms shown in all charts">'
        f'<div class="keys">{keys}</div>'
        '<button type="button" class="all" data-show="all">All</button>'
        '<button type="button" class="all" data-show="none">None</button></div>'
    )
