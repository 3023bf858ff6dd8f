"""The measures, how they are printed and compared, and the table for the terminal."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from fairwind.errors import printable
from fairwind.metrics import OF_ACCURACIES
from fairwind.runs.references import is_reference

Results = dict[str, Any]


class Measure(NamedTuple):
    key: str
    name: str
    digits: int
    best: Literal["highest", "lowest"]
    meaning: str

    def text(self, value: float) -> str:
        """A value as the tables show it: with so many decimals, or by its power of ten."""
        few = -4 < self.digits < 6
        return f"{value:.{max(0, self.digits)}f}" if few else f"{value:.2e}"


class Judged(NamedTuple):
    """The score that a comparison is about."""

    name: str
    kind: str

    @property
    def sign(self) -> int:
        """1 where larger is better, else −1."""
        return -1 if self.kind == "lower" else 1

    @property
    def title(self) -> str:
        """As a heading begins."""
        return self.name[:1].upper() + self.name[1:]

    @property
    def axis(self) -> str:
        return f"{self.name}, %" if self.kind == "accuracy" else self.name

    def text(self, value: float) -> str:
        """A value as words say it."""
        return f"{value:.1f} %" if self.kind == "accuracy" else f"{value:.4g}"

    def number(self, value: float) -> str:
        """An end of an interval as words say it."""
        if self.kind == "accuracy":
            text = f"{value:.1f}" if abs(value) >= 0.05 else f"{value:.2f}"  # near zero its side counts
        else:
            text = f"{value:.3g}"
        return "0" if float(text) == 0 else text.replace("-", "−")

    def gap(self, value: float) -> str:
        """A difference as words say it."""
        return f"{value:.1f} points" if self.kind == "accuracy" else f"{value:.3g}"


def judged(results: Results) -> Judged:
    """The main score of results; older ones know accuracy only."""
    first = (results.get("scores") or [{"name": "accuracy", "kind": "accuracy"}])[0]
    return Judged(SCORES.get(first["name"], first["name"]), first["kind"])


MEASURES = (
    Measure("avg", "average", 2, "highest", "mean accuracy over clients, each counted once"),
    Measure("std", "STD", 2, "lowest", "standard deviation of accuracy over clients"),
    Measure("worst30", "worst 30 %", 2, "highest", "mean accuracy of the worst-off 30 % of clients"),
    Measure("best30", "best 30 %", 2, "highest", "mean accuracy of the best-off 30 % of clients"),
    Measure("worst", "worst", 2, "highest", "accuracy of the worst-off client"),
    Measure("avg_weighted", "weighted average", 2, "highest", "mean accuracy, clients weighted by size"),
    Measure("std_weighted", "weighted STD", 2, "lowest", "its standard deviation, clients weighted by size"),
    Measure(
        "worst30_weighted",
        "weighted worst 30 %",
        2,
        "highest",
        "mean accuracy of the worst-off 30 % of clients, weighted by size",
    ),
    Measure("std_beyond_noise", "STD beyond noise", 2, "lowest", "STD that small test sets do not explain"),
    Measure("rsd_error", "RSD of error", 3, "lowest", "STD of the clients’ error over its mean"),
    Measure("jain", "Jain’s index", 3, "highest", "1 when all clients have the same accuracy"),
    Measure("gini", "Gini", 3, "lowest", "0 when all clients have the same accuracy"),
    Measure("loss_avg", "loss", 3, "lowest", "mean test loss over clients"),
    Measure("loss_worst30", "loss, worst 30 %", 3, "lowest", "mean loss of the worst-off 30 % of clients"),
)
GROUP_MEASURES = (
    Measure(
        "worst_group_avg", "worst group", 2, "highest", "mean accuracy over the clients of the worst group"
    ),
    Measure("group_gap", "gap", 2, "lowest", "how far the worst group’s average is from the best one’s"),
)
SCORES = {"mae": "MAE", "mse": "MSE", "rmse": "RMSE", "f1": "F1", "auc": "AUC", "r2": "R²", "iou": "IoU"}
SCORES |= {"multilabel_accuracy": "multi-label accuracy"}
OF_SCORES = ("avg", "worst30", "best30", "worst", "avg_weighted", "worst30_weighted", "worst_group_avg")


def measures(results: Results) -> tuple[Measure, ...]:
    """The measures of a comparison, in the words of its score."""
    return _worded(MEASURES, results)


def group_measures(results: Results) -> tuple[Measure, ...]:
    """Those of groups, likewise, where clients are in groups."""
    return _worded(GROUP_MEASURES, results) if any("groups" in row for row in results["summary"]) else ()


def _worded(given: tuple[Measure, ...], results: Results) -> tuple[Measure, ...]:
    score = judged(results)
    if score.kind == "accuracy":
        return given
    averages = [abs(row["avg"]["mean"]) for row in results["summary"] if row["avg"]["mean"]]
    digits = 2 - math.floor(math.log10(max(averages))) if averages else 3  # three that count
    found = []
    for measure in given:
        if measure.key in OF_ACCURACIES:
            continue
        best = "lowest" if score.kind == "lower" and measure.key in OF_SCORES else measure.best
        meaning = measure.meaning.replace("accuracy", score.name)
        found.append(measure._replace(digits=digits, best=best, meaning=meaning))
    return tuple(found)


def worst_groups(results: Results) -> dict[str, str]:
    """By algorithm, the group whose average over seeds is worst; none where an average is not known."""
    found = {}
    for row in results["summary"]:
        means = {g: each["avg"]["mean"] for g, each in row.get("groups", {}).items() if each["clients"]}
        known = {group: mean for group, mean in means.items() if mean is not None}
        if known and len(known) == len(means):
            sign = judged(results).sign
            found[row["algorithm"]] = min(known, key=lambda group: sign * known[group])
    return found


def _worst_note(results: Results) -> list[str]:
    """Which group is the worst, in a line."""
    whose: dict[str, list[str]] = {}
    for label, group in worst_groups(results).items():
        whose.setdefault(printable(group), []).append(display_name(label))
    if len(whose) == 1:
        return [f"Worst group: {next(iter(whose))}."]
    each = (f"{group} under {', '.join(names)}" for group, names in whose.items())
    return [f"Worst group: {'; '.join(each)}."] if whose else []


NAMES = {
    "adafedadam": "AdaFedAdam",
    "fedavg": "FedAvg",
    "fedadam": "FedAdam",
    "fednova": "FedNova",
    "qfedavg": "q-FedAvg",
    "fedyogi": "FedYogi",
    "fedadagrad": "FedAdagrad",
    "term": "TERM",
    "afl": "AFL",
    "fedmgda": "FedMGDA+",
    "fedfv": "FedFV",
    "propfair": "PropFair",
    "gifair": "GIFAIR-FL",
    "aaggff": "AAggFF",
    "fedeba": "FedEBA+",
    "ditto": "Ditto",
    "fedavgm": "FedAvgM",
    "fedexp": "FedExP",
    "fedprox": "FedProx",
    "fedcm": "FedCM",
    "mimelite": "MimeLite",
    "mime": "Mime",
    "scaffold": "SCAFFOLD",
    "feddyn": "FedDyn",
}


def algorithm_of(label: str) -> str:
    """The algorithm a label names, without parameters: `q-fedavg:q=1` and `qfedavg` are both `qfedavg`."""
    return label.partition(" (")[0].partition(":")[0].lower().replace("-", "").replace("_", "")


def display_name(label: str) -> str:
    """`ditto:lam=2 (personal)` reads Ditto (lam=2, personal); one without a name here keeps its label.

    A reference to a variant reads as its name does: `mine.py:fedadam_normalised` is FedAdam normalised.
    """
    first, _, rest = label.rpartition(":")[2].partition("_")
    if is_reference(label) and first in NAMES:
        return f"{NAMES[first]} {rest.replace('_', ' ')}".strip()
    spec, _, model = label.removesuffix(")").partition(" (") if label.endswith(")") else (label, "", "")
    name, _, parameters = spec.partition(":")
    said = [each for each in (*parameters.split(","), model) if each]
    return NAMES.get(algorithm_of(label), name) + (f" ({', '.join(said)})" if said else "")


def mean_and_spread(row: dict[str, Any], measure: Measure, seeds: int) -> tuple[str, str]:
    """A cell as text: the mean, – where there is none, and the spread over seeds, empty where none."""
    value = row.get(measure.key) or {}
    mean, spread = value.get("mean"), value.get("std")
    if mean is None:
        return "–", ""
    return measure.text(mean), "" if spread is None or seeds == 1 else measure.text(spread)


def seed_count(results: Results) -> int:
    return len({run["seed"] for run in results["runs"]})


def notes(results: Results) -> list[str]:
    """What a reader must know before trusting the numbers: contributions left out, rounds without a step."""
    found = []
    for label in [row["algorithm"] for row in results["summary"]]:
        runs = [run for run in results["runs"] if run["algorithm"] == label]
        left_out = sum(run["left_out"] for run in runs)
        stalled = sum(run["stalled_rounds"] for run in runs)
        if left_out:
            found.append(
                f"{display_name(label)}: {count(left_out, 'client contribution')} left out, being not finite."
            )
        if stalled:
            found.append(
                f"{display_name(label)}: the model stayed where it was in {count(stalled, 'round')}."
            )
    return found


def heading(results: Results) -> str:
    """What the numbers of the table are."""
    score = judged(results)
    lower = ", lower is better" if score.kind == "lower" else ""
    return f"{score.title} over clients{', %' * (score.kind == 'accuracy')}{lower}"


def reading(results: Results) -> str:
    """How to read the cells of the table."""
    seeds = seed_count(results)
    spread = f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One seed"
    return spread + ("; bold where ahead of all others beyond noise." if len(results["summary"]) > 1 else ".")


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


NAME_WIDTH = 10  # of the first column, in which names are folded


def summary_table(results: Results, ahead: Mapping[str, str] | None = None, width: int = 80) -> Table:
    """The summary for a terminal: means over seeds ± their standard deviation, below where space is short.

    `ahead` names, by measure, the algorithm that is shown to be the best, which is bold.
    """
    groups = group_measures(results)  # in the place of two others
    others = ("avg", "std", "worst30") if groups else ("avg", "std", "worst30", "worst", "avg_weighted")
    shown = [*(m for m in measures(results) if m.key in others), *groups]
    found = [[mean_and_spread(row, m, seed_count(results)) for m in shown] for row in results["summary"]]
    heads = [measure.name.replace("weighted ", "weighted\n") for measure in shown]
    beside = [
        max(*map(len, head.split("\n")), *(len(_cell(*row[i])) for row in found))
        for i, head in enumerate(heads)
    ]
    fits = 3 + NAME_WIDTH + sum(2 + each for each in beside) <= width  # with spaces between, and at both ends
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        caption=Text(
            "\n".join([f"{heading(results)}. {reading(results)}", *_worst_note(results), *notes(results)])
        ),
        caption_justify="left",
        leading=not fits,
    )
    table.add_column("", overflow="fold", min_width=NAME_WIDTH)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=fits, overflow="fold")
    for row, cells in zip(results["summary"], found, strict=True):
        texts = [Text(display_name(row["algorithm"]))]
        for measure, (mean, spread) in zip(shown, cells, strict=True):
            style = "bold" if (ahead or {}).get(measure.key) == row["algorithm"] else ""
            rest = _cell("", spread) if fits else _cell("", spread).replace(" ", "\n")
            texts.append(Text(mean, style).append(rest, "not bold dim"))
        table.add_row(*texts)
    return table


def _cell(mean: str, spread: str) -> str:
    return f"{mean} ±{spread}" if spread else mean
