"""The measures, how they are printed and compared, and the table for the terminal."""

import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, cast

from rich import box
from rich.table import Table
from rich.text import Text

from fairwind.errors import printable
from fairwind.metrics import OF_ACCURACIES
from fairwind.runs.references import is_reference
from fairwind.runs.schema import (
    FederationFacts,
    Findings,
    FindingsSoFar,
    Metric,
    OverSeeds,
    Results,
    SummaryRow,
)


class Measure(NamedTuple):
    key: Metric
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


def judged(results: Findings) -> Judged:
    """The main score of results."""
    first = results["scores"][0]
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
ON_TERMINAL = ("avg", "std", "worst30", "worst", "avg_weighted")  # columns that fit into 80
FIRST = MEASURES[:7]  # which a page shows; the others are folded below
OF_SCORES = ("avg", "worst30", "best30", "worst", "avg_weighted", "worst30_weighted", "worst_group_avg")


def measures(results: Findings) -> tuple[Measure, ...]:
    """The measures of a comparison, in the words of its score."""
    return _worded(MEASURES, results)


def group_measures(results: Findings) -> tuple[Measure, ...]:
    """Those of groups, likewise, where clients are in groups."""
    return _worded(GROUP_MEASURES, results) if any("groups" in row for row in results["summary"]) else ()


def by_other_scores(results: Findings) -> Iterator[Findings]:
    """The results by each score beside the main one, as if it were that."""
    for score in results["scores"][1:]:
        rows = [
            cast(SummaryRow, {"algorithm": row["algorithm"], **row["scores"][score["name"]]})
            for row in results["summary"]
        ]
        yield {**results, "scores": [score], "summary": rows}


def of_new_clients(results: Findings) -> Findings | None:
    """The results of clients that took no part in training, as if there were no others; None without any."""
    rows = [
        cast(SummaryRow, {"algorithm": row["algorithm"], **row["new_clients"]})
        for row in results["summary"]
        if "new_clients" in row
    ]
    return {**results, "summary": rows} if rows else None


def _worded(plain: tuple[Measure, ...], results: Findings) -> tuple[Measure, ...]:
    score = judged(results)
    if score.kind == "accuracy":
        return plain
    averages = [abs(row["avg"]["mean"]) for row in results["summary"] if row["avg"]["mean"]]
    digits = 2 - math.floor(math.log10(max(averages))) if averages else 3  # three that count
    worded = []
    for measure in plain:
        if measure.key in OF_ACCURACIES:
            continue
        best: Literal["highest", "lowest"] = measure.best
        if score.kind == "lower" and measure.key in OF_SCORES:
            best = "lowest"
        meaning = measure.meaning.replace("accuracy", score.name)
        worded.append(measure._replace(digits=digits, best=best, meaning=meaning))
    return tuple(worded)


def worst_groups(results: Findings) -> dict[str, str]:
    """By algorithm, the group whose average over seeds is worst; none where an average is not known."""
    worst, sign = {}, judged(results).sign
    for row in results["summary"]:
        tested = {label: group for label, group in row.get("groups", {}).items() if group["clients"]}
        means = {label: group["avg"]["mean"] for label, group in tested.items()}
        signed = {label: sign * mean for label, mean in means.items() if mean is not None}
        if signed and len(signed) == len(means):
            worst[row["algorithm"]] = min(signed, key=lambda label: signed[label])
    return worst


def _worst_note(results: Findings) -> list[str]:
    """Which group is the worst, in a line."""
    whose: dict[str, list[str]] = {}
    for label, group in worst_groups(results).items():
        whose.setdefault(printable(group), []).append(display_name(label))
    if len(whose) == 1:
        return [f"Worst group: {next(iter(whose))}."]
    parts = (f"{group} under {', '.join(names)}" for group, names in whose.items())
    return [f"Worst group: {'; '.join(parts)}."] if whose else []


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
    "local": "Each alone",
    "pooled": "All data pooled",
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
    said = [part for part in (*parameters.split(","), model) if part]
    return NAMES.get(algorithm_of(label), name) + (f" ({', '.join(said)})" if said else "")


def mean_and_spread(value: OverSeeds | None, measure: Measure, seeds: int) -> tuple[str, str]:
    """A cell as text: the mean, – where there is none, and the spread over seeds, empty where none."""
    if value is None or value["mean"] is None:
        return "–", ""
    spread = value["std"]
    return measure.text(value["mean"]), "" if spread is None or seeds == 1 else measure.text(spread)


def sample_counts(federation: FederationFacts) -> str:
    """How many samples each part has."""
    chosen = federation.get("validation_samples", 0)
    between = f"{chosen:,} to choose, " if chosen else ""
    return f"{federation['train_samples']:,} to train, {between}{federation['test_samples']:,} to test"


def seed_count(results: Findings) -> int:
    return len({run["seed"] for run in results["runs"]})


def notes(results: Findings) -> list[str]:
    """What a reader must know before trusting the numbers: which samples they are of, what was left out."""
    note = results.get("parts", {}).get("note", "")
    lines = [note] if note else []
    stopped = results.get("stopped")
    if stopped is not None and "rounds" in (config := results["config"]):
        trained = results["runs"][0]["rounds"]
        lines.append(f"Training stopped after round {trained:,} of {config['rounds']:,}: {stopped['why']}.")
    for label in [row["algorithm"] for row in results["summary"]]:
        runs = [run for run in results["runs"] if run["algorithm"] == label]
        left_out = sum(run["left_out"] for run in runs)
        stalled = sum(run["stalled_rounds"] for run in runs)
        if left_out:
            lines.append(
                f"{display_name(label)}: {count(left_out, 'client contribution')} left out, being not finite."
            )
        if stalled:
            lines.append(
                f"{display_name(label)}: the model stayed where it was in {count(stalled, 'round')}."
            )
    return lines


def heading(results: Findings) -> str:
    """What the numbers of the table are."""
    score = judged(results)
    lower = ", lower is better" if score.kind == "lower" else ""
    return f"{score.title} over clients{', %' * (score.kind == 'accuracy')}{lower}"


def reading(results: Findings) -> str:
    """How to read the cells of the table."""
    seeds = seed_count(results)
    spread = f"Mean ± standard deviation over {seeds} seeds" if seeds > 1 else "One seed"
    return spread + ("; bold where ahead of all others beyond noise." if len(results["summary"]) > 1 else ".")


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


NAME_WIDTH = 10, 16  # of the first column: at least, and at most for a word that is not to be folded


def new_clients_table(results: Results | FindingsSoFar, width: int = 80) -> Table | None:
    """The summary of clients that took no part in training, if there are any."""
    new = of_new_clients(results)
    if new is None:
        return None
    table, facts = summary_table(new, width=width), results["federation"]
    many = count(facts["new_clients"], "new client") if "new_clients" in facts else "New clients"
    table.caption = Text(f"{many}, which took no part in training. {heading(new)}.")
    return table


def summary_table(results: Findings, ahead: Mapping[str, str] | None = None, width: int = 80) -> Table:
    """The summary for a terminal: means over seeds ± their standard deviation, below where space is short.

    `ahead` names, by measure, the algorithm that is shown to be the best, which is bold.
    """
    groups = group_measures(results)  # in the place of two others
    others = ON_TERMINAL[:3] if groups else ON_TERMINAL
    shown = [*(m for m in measures(results) if m.key in others), *groups]
    seeds = seed_count(results)
    texts = [[mean_and_spread(row.get(m.key), m, seeds) for m in shown] for row in results["summary"]]
    heads = [measure.name.replace("weighted ", "weighted\n") for measure in shown]
    beside = [
        max(*map(len, head.split("\n")), *(len(_cell(*row[i])) for row in texts))
        for i, head in enumerate(heads)
    ]
    words = [word for row in results["summary"] for word in display_name(row["algorithm"]).split()]
    name_width = min(max(NAME_WIDTH[0], *map(len, words)), NAME_WIDTH[1])
    fits = 3 + name_width + sum(2 + wide for wide in beside) <= width  # with spaces between, and at both ends
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        caption=Text(
            "\n".join([f"{heading(results)}. {reading(results)}", *_worst_note(results), *notes(results)])
        ),
        caption_justify="left",
        leading=not fits,
    )
    table.add_column("", overflow="fold", min_width=name_width)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=fits, overflow="fold")
    for row, cells in zip(results["summary"], texts, strict=True):
        line = [Text(display_name(row["algorithm"]))]
        for measure, (mean, spread) in zip(shown, cells, strict=True):
            style = "bold" if (ahead or {}).get(measure.key) == row["algorithm"] else ""
            rest = _cell("", spread) if fits else _cell("", spread).replace(" ", "\n")
            line.append(Text(mean, style).append(rest, "not bold dim"))
        table.add_row(*line)
    return table


def _cell(mean: str, spread: str) -> str:
    return f"{mean} ±{spread}" if spread else mean
