"""Numbers of a training for Prometheus, in its text format.

A file is written anew after every round. Prometheus reads it through node_exporter, whose textfile collector
is given the folder (`--collector.textfile.directory`); the name of the file must end in .prom.
"""

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path

from fairwind.errors import InputError
from fairwind.exchange.evaluation import Evaluations
from fairwind.exchange.server import Aggregator
from fairwind.runs.files import write_atomic
from fairwind.tracking import metrics

HELP = {
    "round": "Rounds that are over.",
    "round_end_timestamp_seconds": "When the last round ended.",
    "evaluated_round": "The round that scores are of.",
    "stalled_rounds_total": "Rounds in which the model stayed as it was.",
    "refused_total": "Replies that did not count.",
    "bytes_up_total": "Bytes of vectors from clients.",
    "bytes_down_total": "Bytes of vectors to clients that train.",
    "bytes_evaluation_total": "Bytes of models to clients that evaluate.",
}


def check_file(path: str | Path) -> Path:
    """Refuses a file that node_exporter would not read."""
    if Path(path).suffix != ".prom":
        raise InputError(f"metrics={str(path)!r}: node_exporter reads files that end in .prom")
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"metrics={str(path)!r}: its folder is not there")
    return Path(path).absolute()


def write_metrics(path: Path, aggregator: Aggregator, evaluations: Evaluations) -> None:
    """Writes the numbers of the rounds so far."""
    numbers: dict[str, float] = {
        "round": aggregator.round,
        "round_end_timestamp_seconds": time.time(),
        "stalled_rounds_total": aggregator.stalled,
        "refused_total": aggregator.left_out,
        **{f"{name}_total": count for name, count in aggregator.bytes.named().items()},
    }
    last_round = {n: v for n, v in aggregator.counts().items() if n not in ("bytes_up", "bytes_down")}
    numbers |= {f"last_round_{name}": value for name, value in last_round.items()}
    if evaluations.history:
        line = evaluations.newest[0]
        told = {name: v for name, v in metrics(line).items() if name not in aggregator.counts()}
        numbers |= {"evaluated_round": line["round"], **{f"score_{name}": v for name, v in told.items()}}
    labels = {"algorithm": evaluations.label, "seed": str(evaluations.seed)}
    write_atomic(path, exposition(numbers, labels).encode())


def exposition(numbers: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Numbers by name, in Prometheus's text format; all of them have the same labels."""
    told = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    lines = []
    for name, value in numbers.items():
        metric = "fairwind_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        if name in HELP:
            lines.append(f"# HELP {metric} {HELP[name]}")
        lines.append(f"# TYPE {metric} {'counter' if name.endswith('_total') else 'gauge'}")
        lines.append(f"{metric}{{{told}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
