"""Writes the tables of PAGES from the files under results/; docs/figures.py draws their figures.

    python docs/tables.py            # after new results
    python docs/tables.py --check    # exit code 1 where a page does not show what results/ holds

A table stands between `<!-- table: NAME ARGUMENTS -->` and `<!-- end -->`; NAME is a function of TABLES.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from fairwind.algorithms import PAPER as ALGORITHMS
from fairwind.intervals import Interval, over_draws
from fairwind.paper.studies import STUDIES, THEORY
from fairwind.paper.two_cores import PARTITIONS
from fairwind.report.finding import best_shown
from fairwind.report.paired import paired as paired_runs
from fairwind.report.panel import Shown, show
from fairwind.report.paper_comparison import (
    BESIDE,
    STATISTICS,
    against_others,
    beside_paper,
    by_algorithm,
    distance,
    published,
    published_rows,
    statistics_of,
)
from fairwind.report.table import MEASURES, display_name, seed_count
from fairwind.report.targets import target_tables
from fairwind.study import Finished, missing, read_runs

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAPER = ("parts", "costs", "controls", "tuned", "readings", "precision", "theory", "runs")
PAGES = (
    ROOT / "README.md",
    *(
        DOCS / f"{name}.md"
        for name in ("reproduction", "data", "metrics", "choosing", "personal", "benchmarks")
    ),
    *(DOCS / "paper" / f"{name}.md" for name in PAPER),
    DOCS / "howto" / "liars.md",
    DOCS / "federation.md",
)
STAND_INS = {"features": "linear on CIFAR-10 features", "pooled": "MLP on FEMNIST pooled"}
MARKED = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)", re.S)


@cache
def runs() -> tuple[Finished, ...]:
    found, passed = read_runs(ROOT / "results")
    if passed:
        sys.exit(str(passed[0]))
    return tuple(found)


@cache
def panel(study: str, number: str) -> Shown:
    chosen = STUDIES[study]
    return show(chosen.panels[int(number)], list(runs()))


@cache
def with_all_seeds(study: str, number: str) -> Shown:
    """A panel with every seed that is stored of its algorithms, not only those that it asks for."""
    chosen = STUDIES[study].panels[int(number)]
    return show(replace(chosen, seeds=(0, 1, 2)), list(runs()))


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def summary(study: str, number: str, *keys: str) -> str:
    """Means ± standard deviations over seeds, bold where ahead of all others beyond noise.

    Of all stored seeds, which are counted where algorithms differ in them.
    """
    record = with_all_seeds(study, number).record
    assert record is not None
    shown = [m for m in MEASURES if m.key in (keys or ("avg", "std", "worst30", "avg_weighted"))]
    ahead = best_shown(record, paired_runs(record))
    runs_of = Counter(run["algorithm"] for run in record.results["runs"])
    counted = len(set(runs_of.values())) > 1
    rows = []
    for row in record.results["summary"]:
        several = runs_of[row["algorithm"]] > 1
        cells = []
        for m in shown:
            mean, std = row[m.key]["mean"], row[m.key]["std"]
            digits = 1 if m.digits == 2 else m.digits
            text = "–" if mean is None else f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if several else "")
            cells.append(f"**{text}**" if row["algorithm"] == ahead.get(m.key) else text)
        rows.append([display_name(row["algorithm"]), *cells, *[str(runs_of[row["algorithm"]])] * counted])
    return table(["algorithm", *(m.name for m in shown), *["seeds"] * counted], rows)


def overview() -> str:
    """The README's table: average and worst 30 % of three setups, bold as on a page."""
    setups = {"Synthetic": "3", "FEMNIST": "0", "CIFAR-10": "1"}
    shown = [m for m in MEASURES if m.key in ("avg", "worst30")]
    rows: dict[str, list[str]] = {}
    for number in setups.values():
        record = panel("convergence", number).record
        assert record is not None
        assert seed_count(record.results) == 3
        ahead = best_shown(record, paired_runs(record))
        for row in record.results["summary"]:
            cells = rows.setdefault(row["algorithm"], [])
            for m in shown:
                text = f"{row[m.key]['mean']:.1f} ± {row[m.key]['std']:.1f}"
                cells.append(f"**{text}**" if row["algorithm"] == ahead.get(m.key) else text)
    head = [name for setup in setups for name in (f"{setup}: average", "worst 30 %")]
    return table(["algorithm", *head], [[display_name(name), *cells] for name, cells in rows.items()])


def beside(study: str, number: str, statistics: str = "") -> str:
    """Ours / the paper's (difference in pooled standard deviations), † where the place differs.

    Weighted by size where some published row of the table cannot be unweighted.
    """
    shown = panel(study, number)
    assert shown.record is not None
    chosen = statistics.replace("-", " ") or statistics_of(shown.panel.published)
    cells = beside_paper(shown.record.results["summary"], shown.panel.published, chosen)
    rows = []
    for label, row in cells.items():
        texts = []
        for cell in row.values():
            apart = "" if cell.pooled is None else f" ({cell.pooled:+.1f} σ)"
            texts.append(f"{cell.ours:.1f}{'' if cell.in_order else ' †'} / {cell.paper:.1f}{apart}")
        rows.append([display_name(label), *texts])
    names = [
        f"{'weighted ' * STATISTICS[chosen][k].endswith('_weighted')}{m.name}" for k, m in BESIDE.items()
    ]
    return table(["algorithm", *(f"{name}, ours / paper" for name in names)], rows)


def attacks(server: str) -> str:
    """Honest clients' average / worst 30 % with each defence, without liars and under each attack."""
    found = lying()
    names = ["none", *found["attacks"]]
    shares = [0.0, *[0.3] * len(found["attacks"])]
    cells = [(name, share) for name, share in zip(names, shares, strict=True)]
    rows = [
        [f"`{defence}`" if server != "Flower" else defence]
        + [honest(found, server, defence, name, share) for name, share in cells]
        for defence in dict.fromkeys(row["defence"] for row in found["rows"] if row["algorithm"] == server)
    ]
    return table(["defence" if server != "Flower" else "strategy", "no liars", *names[1:]], rows)


def liars(attack: str) -> str:
    """The same under one attack, by the share of the clients that lie."""
    found = lying()
    rows = []
    for server, defence in dict.fromkeys((row["algorithm"], row["defence"]) for row in found["rows"]):
        who = f"Flower's {defence}" if server == "Flower" else f"{display_name(server)}, `{defence}`"
        under = [
            honest(found, server, defence, attack if share else "none", share) for share in found["shares"]
        ]
        rows.append([who, *under])
    return table(["", *(f"{share:.0%}" for share in found["shares"])], rows)


def honest(found: dict[str, Any], server: str, defence: str, attack: str, share: float) -> str:
    """Average / worst 30 %, means over seeds."""
    wanted = {"algorithm": server, "defence": defence, "attack": attack, "share": share}
    mine = [row for row in found["rows"] if all(row[name] == value for name, value in wanted.items())]
    assert len(mine) == len(found["seeds"])
    return " / ".join(f"{mean(row[name] for row in mine):.1f}" for name in ("avg", "worst30"))


def caps() -> str:
    """What the bounds cost honest clients: average / worst 30 % with and without them."""
    found = json.loads((ROOT / "benchmarks" / "results" / "caps.json").read_text())["runs"]
    key = "setup", "algorithm", "seed"
    without = {tuple(row[k] for k in key): row for row in found if not row["bounds"]}
    rows = []
    for row in found:
        if row["bounds"]:
            both = row, without[tuple(row[k] for k in key)]
            cells = [f"{each['avg']:.1f} / {each['worst30']:.1f}" for each in both]
            capped = f"{row['capped_a_round']:.1f} of {row['clients']}"
            rows.append(
                [f"`{row['setup']}`", display_name(row["algorithm"]), str(row["seed"]), capped, *cells]
            )
    return table(["setup", "algorithm", "seed", "cut per round", "with bounds", "without"], rows)


@cache
def lying() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "liars.json").read_text())
    return found


def impossible() -> str:
    """The published rows that cannot be of clients that count once each."""
    rows = []
    for row in published_rows():
        if not row.possible("up"):
            texts = (f"{row.average:.2f} / {row.std:.2f} / {row.worst30:.2f}", f"{row.least_down:.2f}")
            rows.append([display_name(row.algorithm), ", ".join(row.tables), *texts, f"{row.least_up:.2f}"])
    head = [
        "algorithm",
        "table",
        "published average / STD / worst 30 %",
        "least STD, 30 % rounded down",
        "up",
    ]
    return table(head, rows)


def late(study: str, *numbers: str) -> str:
    """Average / STD / worst 30 % over the last five evaluations and after the last, of all stored seeds.

    With `seed=0` among the numbers of panels, of that seed alone.
    """
    rows: dict[str, list[str]] = {}
    only = [int(each.removeprefix("seed=")) for each in numbers if each.startswith("seed=")]
    for number in (each for each in numbers if each.isdigit()):
        record = with_all_seeds(study, number).record
        assert record is not None
        for label in record.labels:
            lines = [line for line in record.history if line["algorithm"] == label]
            lines = [line for line in lines if not only or line["seed"] in only]
            last = sorted({line["round"] for line in lines})[-5:]
            kept = [line for line in lines if line["round"] in last]
            end = [line for line in lines if line["round"] == last[-1]]
            means = [
                " / ".join(f"{mean(line[key] for line in some):.1f}" for key in BESIDE)
                for some in (kept, end)
            ]
            seeds = len({line["seed"] for line in lines})
            name = display_name(label)
            for default in (" (alpha=1)", " (warmup=6)"):
                name = name.removesuffix(default)
            rows.setdefault(name, [name, *means, str(seeds)])
    head = ["algorithm", "average / STD / worst 30 %, last five evaluations", "after the last round", "seeds"]
    return table(head, list(rows.values()))


def moved(study: str, first: str, *others: str) -> str:
    """How far other panels' runs end from the first's under the same seed, and how far seeds lie apart.

    The control is bf16 once more: the longer runs of the convergence study, at the same round and seed.
    """
    kept = {number: panel(study, number) for number in (first, *others)}
    names = [str(kept[number].panel.changes["precision"]) for number in others]
    head = ["algorithm"]
    for name in ("average", "worst 30 %"):
        head += [f"{name}, float32", *(f"{other} moved it" for other in names), "bf16 twice", "seeds"]
    longer, rounds = panel("convergence", "1").record, kept[others[-1]].panel.changes["rounds"]
    assert longer is not None
    finals: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
    for number, shown in kept.items():
        assert shown.record is not None
        for run in shown.record.results["runs"]:
            finals.setdefault(run["algorithm"], {}).setdefault(number, {})[run["seed"]] = run["final"]
    rows = []
    for label, by_panel in finals.items():
        cells = []
        for key in ("avg", "worst30"):
            start = {seed: final[key] for seed, final in by_panel[first].items()}
            cells.append(f"{mean(start.values()):.1f}")
            for number in others:
                apart = [abs(final[key] - start[seed]) for seed, final in by_panel[number].items()]
                cells.append(f"{mean(apart):.1f}")
            again = [
                abs(by_panel[others[-1]][line["seed"]][key] - line[key])
                for line in longer.history
                if line["algorithm"] == label and line["round"] == rounds
            ]
            cells.append(f"{mean(again):.1f}")
            cells.append(f"± {pstdev(start.values()):.1f}")
        rows.append([display_name(label), *cells])
    return table(head, rows)


def paired(study: str, number: str, *others: str) -> str:
    """AdaFedAdam minus each other algorithm (or those named), with 95 % intervals that hold together."""
    record = panel(study, number).record
    assert record is not None
    one, found = against_others(paired_runs(record), others)
    rows = [[display_name(k), *map(interval_text, row.values())] for k, row in found.items()]
    return table([f"{display_name(one)} minus", *(m.name for m in BESIDE.values())], rows)


def interval_text(interval: Interval) -> str:
    return f"{interval.difference:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]"


def targets(study: str, number: str) -> str:
    """Rounds, sample gradients and bytes until the average reaches a target, over seeds."""
    record = panel(study, number).record
    assert record is not None
    return "\n".join(table(*each) for each in target_tables(record))


def readings() -> str:
    """How far each reading of Synthetic lies from the paper, nearest first; last without the worst 30 %."""
    rows = []
    for number, each in enumerate(STUDIES["readings"].panels):
        record = panel("readings", str(number)).record
        if record is None:
            continue
        away, places = [], []
        for statistics in STATISTICS:
            cells = beside_paper(record.results["summary"], each.published, statistics)
            away.append(distance(cells))
            places.append(sum(cell.in_order for row in cells.values() for cell in row.values()))
        ten = {label: {k: cell for k, cell in row.items() if k != "worst30"} for label, row in cells.items()}
        texts = [f"{a:.1f} ({p} of 15)" for a, p in zip(away, places, strict=True)] + [f"{distance(ten):.1f}"]
        rows.append((min(away), [each.title, *texts]))
    return table(["data", *STATISTICS, "average and STD of these"], [row for _, row in sorted(rows)])


def rival() -> str:
    """AdaFedAdam minus FedNova on each reading of Synthetic: over the rounds, and at the end."""
    rows = []
    for number, each in enumerate(STUDIES["readings"].panels):
        record = panel("readings", str(number)).record
        assert record is not None
        curves: list[dict[int, float]] = []
        for label in ("adafedadam", "fednova"):
            lines = [line for line in record.history if line["algorithm"] == label and line["round"]]
            by_round = {
                t: mean(x["avg"] for x in lines if x["round"] == t) for t in {x["round"] for x in lines}
            }
            curves.append(by_round)
        apart = {t: curves[0][t] - curves[1][t] for t in sorted(curves[0])}
        step = min(apart)
        behind = step * sum(value < 0 for value in apart.values())
        known = paired_runs(record)
        ends = [known.difference(key, "adafedadam", "fednova", 1) for key in ("avg", "worst30")]
        texts = ["–" if end is None else interval_text(end) for end in ends]
        rows.append([each.title, f"{behind:,}", f"{mean(apart.values()):+.1f}", *texts])
    head = ["data", "rounds that FedNova leads", "average, mean over rounds", "average, at the end"]
    return table([*head, "worst 30 %, at the end"], rows)


def draws(study: str, mine: str, one: str, theirs: str, *others: str) -> str:
    """One algorithm minus others, over several draws of the data: the panels `mine` and `theirs`, as 0,1,2.

    A draw counts once, with its mean over seeds; the intervals of a table hold together.
    """
    differences: dict[str, dict[str, list[float]]] = {other: {key: [] for key in BESIDE} for other in others}
    for first, second in zip(mine.split(","), theirs.split(","), strict=True):
        ours, rest = finals(study, first), finals(study, second)
        for other, by_key in differences.items():
            for key, found in by_key.items():
                seeds = ours[one].keys() & rest[other].keys()
                found.append(mean(ours[one][seed][key] - rest[other][seed][key] for seed in seeds))
    rows = [
        [display_name(other), *(interval_text(over_draws(d, len(others))) for d in by_key.values())]
        for other, by_key in differences.items()
    ]
    return table([f"{display_name(one)} minus", *(m.name for m in BESIDE.values())], rows)


def finals(study: str, number: str) -> dict[str, dict[int, dict[str, float]]]:
    """The metrics after the last round, by algorithm and seed."""
    record = panel(study, number).record
    assert record is not None
    found: dict[str, dict[int, dict[str, float]]] = {}
    for run in record.results["runs"]:
        found.setdefault(run["algorithm"], {})[run["seed"]] = run["final"]
    return found


def unequal() -> str:
    """Average / STD / worst 30 % by partition and algorithm in both studies, beside the paper's."""
    rows = []
    for beta, name in PARTITIONS:
        theirs = published()["tables"].get(f"heterogeneity/{beta}", {"rows": {}})["rows"]
        for label in ALGORITHMS:
            cells = []
            for study in ("features", "pooled"):
                means = [draw[label] for draw in by_partition(study, beta)]
                cells.append(
                    " / ".join(f"{mean(m[key] for m in means):.1f}" for key in BESIDE) if means else "–"
                )
            ends = list(vgg11(beta).get(label, {}).values())
            ours = " / ".join(f"{mean(end[key] for end in ends):.1f}" for key in BESIDE) if ends else "–"
            cells.append(ours + (f" ({len(ends)})" if ends else ""))
            paper = [theirs[label][key][0] for key in BESIDE] if theirs else []
            cells.append(" / ".join(f"{value:.1f}" for value in paper) or "–")
            rows.append([name, display_name(label), *cells])
    heads = [
        "clients",
        "algorithm",
        *STAND_INS.values(),
        "VGG11 on CIFAR-10 (seeds)",
        "the same in the paper",
    ]
    return table(heads, rows)


def vgg11(beta: str) -> dict[str, dict[int, dict[str, float]]]:
    """By algorithm and seed, the metrics of the paper's own study of this partition, as far as it was run."""
    for number, each in enumerate(STUDIES["heterogeneity"].panels):
        if each.setup == f"cifar10:beta={beta}":
            return finals("heterogeneity", str(number)) if panel("heterogeneity", str(number)).record else {}
    raise LookupError(beta)


def unequal_lead(study: str) -> str:
    """AdaFedAdam minus each other by partition: mean over draws, the least and the greatest draw."""
    rows = []
    for key in ("avg", "worst30"):
        for other in (label for label in ALGORITHMS if label != "adafedadam"):
            cells = []
            for beta, _ in PARTITIONS:
                apart = [draw["adafedadam"][key] - draw[other][key] for draw in by_partition(study, beta)]
                cells.append(f"{mean(apart):+.1f} ({min(apart):+.1f} to {max(apart):+.1f})" if apart else "–")
            rows.append([BESIDE[key].name, display_name(other), *cells])
    heads = [f"{name}, {len(by_partition(study, beta))} draws" for beta, name in PARTITIONS]
    return table(["", "AdaFedAdam minus", *heads], rows)


def by_partition(study: str, beta: str) -> list[dict[str, dict[str, float]]]:
    """By draw of a partition that is complete, each algorithm's metrics as means over seeds."""
    found = []
    for number, each in enumerate(STUDIES[study].panels):
        shown = panel(study, str(number))
        if f"beta={beta}," in each.setup and not shown.missing:
            ends = finals(study, str(number))
            found.append(
                {
                    label: {key: mean(end[key] for end in by_seed.values()) for key in BESIDE}
                    for label, by_seed in ends.items()
                }
            )
    return found


def momentum() -> str:
    """Momentum that starts at zero in every round, and momentum that is kept, beside the paper's rows."""
    rows = json.loads((ROOT / "results" / "solvers" / "momentum.json").read_text())["rows"]
    lines = []
    for solver, name in (("momentum", "momentum"), ("nesterov", "Nesterov")):
        theirs = published()["tables"][f"solvers/{solver}"]["rows"]
        for label in ALGORITHMS:
            cells = []
            for start in ("zero", "kept"):
                (row,) = [
                    r for r in rows if (r["solver"], r["algorithm"], r["start"]) == (solver, label, start)
                ]
                cells.append(" / ".join(f"{row[f'{key}_weighted']['mean']:.1f}" for key in BESIDE))
            cells.append(" / ".join(f"{theirs[label][key][0]:.1f}" for key in BESIDE))
            lines.append([name, display_name(label), *cells])
    return table(["", "algorithm", "zero in every round", "kept from round to round", "paper"], lines)


def other_solvers() -> str:
    """AdaFedAdam and the others with further local solvers on Synthetic."""
    lines = []
    for number, each in enumerate(STUDIES["solvers"].panels):
        record = panel("solvers", str(number)).record
        assert record is not None
        cells = {row["algorithm"]: row for row in record.results["summary"]}
        texts = [
            f"{cells[x]['avg']['mean']:.1f} / {cells[x]['worst30']['mean']:.1f}" if x in cells else "–"
            for x in ALGORITHMS
        ]
        lines.append([each.title.removeprefix("Synthetic, "), *texts])
    return table(["average / worst 30 %", *map(display_name, ALGORITHMS)], lines)


def tuned(number: str) -> str:
    """Each algorithm with its default rate, and with the best of the grid."""
    record = panel("tuned", number).record
    assert record is not None
    defaults = ("fedavg:lr=1", "fednova:lr=1", "qfedavg:lr=1", "fedadam:lr=0.001", "adafedadam:lr=0.001")
    rows = []
    for name, rates in by_algorithm(record.results["summary"]).items():
        texts = []
        for row in (next(r for r in rates if r["algorithm"] in defaults), rates[0]):
            rate = row["algorithm"].partition("lr=")[2]
            texts += [rate, " / ".join(f"{row[key]['mean']:.1f}" for key in BESIDE)]
        rows.append([display_name(name), *texts])
    return table(["algorithm", "default rate", "average / STD / worst 30 %", "best rate", "with it"], rows)


def lag() -> str:
    """What α does to clients' training losses, and to their test losses."""
    rows = json.loads((ROOT / "results" / "alpha" / "lag.json").read_text())["rows"]
    head = ["", "mean I", "worst 30 % of I", "RSD of I", "test loss", "test loss, worst 30 %"]
    return table(
        head, [[display_name(row["algorithm"]), *(f"{row[k]:.3f}" for k in list(row)[1:])] for row in rows]
    )


def speed() -> str:
    """How long the runs of the README's table took."""
    shown = {"Synthetic": "3", "FEMNIST": "0", "CIFAR-10": "1"}
    texts = []
    for name, number in shown.items():
        folders = {r.folder: r for found in panel("convergence", number).chosen.values() for r in found}
        runs = sum(len(r.results["runs"]) for r in folders.values())
        seconds = sum(r.results["timing"]["seconds"] for r in folders.values())
        first = next(iter(folders.values())).results["environment"]
        device = first["processor"] if first["device"] == "cpu" else first["device"]
        texts.append(f"- {name}: {runs} runs in {seconds:,.0f} s on {device}\n")
    return "".join(texts)


def timed(file: str, task: str, runs: int) -> dict[str, Any]:
    """The last recorded timing beside a plain loop, of benchmarks/engine.py or gpu.py."""
    content = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
    calls = [each["results"] for each in content.get("runs", [content])]
    rows = [row for call in calls for row in (call.values() if isinstance(call, dict) else call)]
    *_, last = (row for row in rows if row["task"].startswith(task) and row["runs"] == runs)
    return dict(last)


def times(ratio: float) -> str:
    return f"{ratio:.{int(ratio < 10)}f}×"


def digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def speedups() -> str:
    """How much faster 15 runs at once are than a plain loop, and single runs of users' modules."""
    stacked = {
        "Synthetic, 100 clients, linear 60×10": ("Synthetic", "gpu", "synthetic-cpu"),
        "FEMNIST, 3,500 clients (CPU: 40), MLP 784-128-62": ("FEMNIST", "gpu", "users-cpu"),
        "CIFAR-10, 16 clients, VGG11": ("CIFAR-10", "gpu", ""),
        "Sent140, 697 clients, two-layer LSTM": ("Sent140", "engine-h200/sent140-15-runs", ""),
    }
    single = {
        "Transformer encoder, 2 layers of 128": ("Transformer encoder", "gpu", "users-cpu"),
        "nn.LSTM, 128 units": ("nn.LSTM", "gpu", "lstm-cpu"),
        "LEAF's CNN for FEMNIST, 6.6 M parameters": ("LEAF's CNN", "gpu", "leaf-cpu"),
        "LoRA on GPT-2, 124 M frozen parameters": ("LoRA", "users-uncompiled-h200", "users-cpu"),
        "ResNet-18, group norm": ("ResNet-18", "gpu", "resnet-cpu"),
    }

    def rows(of: Mapping[str, tuple[str, str, str]], runs: int) -> list[list[str]]:
        made = []
        for title, (task, *files) in of.items():
            made.append([title, *(times(timed(file, task, runs)["ratio"]) if file else "" for file in files)])
        return made

    devices = ["NVIDIA H200", "2 CPU cores"]
    first, second = (
        table(["15 runs stacked", *devices], rows(stacked, 15)),
        table(["1 run", *devices], rows(single, 1)),
    )
    return f"{first}\nWith one run, for other models:\n\n{second}"


def on_gpu() -> str:
    """The setups on a GPU, 1 run and 15, and users' modules with 1, beside a plain loop and a floor."""
    setups = {
        "Synthetic, linear 60×10, tf32": "Synthetic",
        "FEMNIST, MLP 784-128-62, tf32": "FEMNIST",
        "CIFAR-10, VGG11, bf16, Dir(0.05)": "CIFAR-10",
        "LEAF's CNN for FEMNIST (6.6 M parameters), batch 10": "LEAF's CNN",
        "Transformer encoder, 2 layers of 128, 32 tokens, batch 10": "Transformer encoder",
        "nn.LSTM, 128 units, 32 tokens, batch 10": "nn.LSTM",
        "ResNet-18 with group norm, batch 32": "ResNet-18",
    }
    made = []
    for title, task in setups.items():
        found = [timed("gpu", task, 1)]
        if task in ("Synthetic", "FEMNIST", "CIFAR-10"):
            found.append(timed("gpu", task, 15))
        loops = sorted(
            {f"{each['loop_us']:,.0f}" for each in found}, key=lambda text: int(text.replace(",", ""))
        )
        cells = [f"{digits(each['stacked_us'])} µs, **{times(each['ratio'])}**" for each in found]
        rounds = [digits(each["run_round_ms"]) for each in found]
        shares = [f"{100 * each['round_of_floor']:.0f}" for each in found]
        made.append(
            [
                title,
                f"{found[0]['clients']:,}",
                f"{'–'.join(loops)} µs",
                *[*cells, ""][:2],
                f"{' / '.join(rounds)} ms",
                f"{' / '.join(shares)} %",
            ]
        )
    head = ["clients", "plain loop", "1 run", "15 runs stacked", "time per round and run (1 / 15 runs)"]
    return table(["NVIDIA H200", *head, "share of hardware limit (1 / 15 runs)"], made)


def throughput() -> str:
    """Client steps per second of recorded comparisons, evaluation included."""
    recorded = (
        "runs/readings-synthetic/results",
        "femnist/cpu-100",
        "runs/femnist-h200/results",
        "runs/cifar10-h200-seeds-0-1/results",
        "runs/sent140-26551e3e9b/results",
    )
    rows = []
    for name in recorded:
        results = json.loads((ROOT / "results" / f"{name}.json").read_text())
        e, steps = results["environment"], results["timing"]["client_steps_per_second"]
        device = e["processor"] if e["device"] == "cpu" else e["device"]
        setup = f"[`{results['setup']}`](../results/{name}.json)"
        rows.append([setup, str(len(results["runs"])), device, f"{steps:,.0f}"])
    return table(["setup", "runs", "device", "client steps per second"], rows)


def sentiment() -> str:
    """Average / STD / worst 30 % on the sample of Sentiment140, beside the paper's on all of it."""

    def cell(values: Mapping[str, float]) -> str:
        return " / ".join(f"{values[key]:.1f}" for key in ("avg", "std", "worst30"))

    def means(name: str) -> dict[str, str]:
        found = json.loads((ROOT / "results" / "sent140" / f"{name}.json").read_text())["summary"]
        return {row["algorithm"]: cell({k: row[k]["mean"] for k in BESIDE}) for row in found}

    group, user = means("h200-group-100"), means("h200-user-50")
    paper = published()["tables"]["convergence/sent140"]["rows"]
    rows = []
    for run in (run for run in runs() if run.results["setup"] == "sent140:by=group"):
        name = run.row["algorithm"]
        best = max(run.history, key=lambda line: line["avg"])
        theirs = cell({key: paper[name][key][0] for key in BESIDE})
        at = f"{cell(best)} (round {best['round']})"
        rows.append([display_name(name), group[name], at, cell(run.history[-1]), user[name], theirs])
    head = ["by group, 100 rounds", "1000 rounds, at the best", "at the end", "by user, 50 rounds"]
    return table(["algorithm", *head, "paper, 697 users, 1000 rounds"], rows)


def coverage() -> str:
    """How often simulated intervals hold the truth: the lowest and the highest share, by seeds."""
    content = json.loads((ROOT / "benchmarks" / "results" / "coverage.json").read_text())
    rows = []
    for seeds in dict.fromkeys(row["seeds"] for row in content["rows"]):
        for apart in dict.fromkeys(row["apart"] for row in content["rows"]):
            mine = [row for row in content["rows"] if (row["seeds"], row["apart"]) == (seeds, apart)]
            texts = []
            for how in ("covered", "bootstrap"):
                for key in BESIDE:
                    shares = [row[how][key] for row in mine]
                    texts.append(f"{min(shares):.0f} to {max(shares):.0f}")
            rows.append([f"{seeds} seeds that differ by {apart:g}", *texts])
    names = [m.name for m in BESIDE.values()]
    return table(["% of intervals that hold", *names, *(f"bootstrap, {name}" for name in names)], rows)


def verdicts() -> str:
    """The theory's claims, and what was found."""
    content = json.loads((ROOT / "results" / THEORY / "theory.json").read_text())
    formulas = {
        "R_t = N": "$R_t = N$",
        "S(N)": "$S(N)$",
        "Σ p_k F_k^α ∇F_k": r"$\sum p_k F_k^\alpha \nabla F_k$",
        "F^α": r"$F^\alpha$",
    }
    rows = []
    for check in content["checks"]:
        claim = check["claim"]
        for plain, formula in formulas.items():
            claim = claim.replace(plain, formula)
        rows.append([claim, check["verdict"]])
    return table(["claim", "verdict"], rows)


def guarantee() -> str:
    """Theorem 2 step by step: its bound, the telescoped sum before it, and the assumption of its proof."""
    content = json.loads((ROOT / "results" / THEORY / "theory.json").read_text())
    (check,) = [c for c in content["checks"] if c["name"] == "theorem2_guarantee"]
    rows = []
    for clients in ("alike", "heterogeneous"):
        for name, several in (("one", False), ("several", True)):
            mine = [r for r in check["rows"] if r["clients"] == clients and (r["local_steps"] > 1) == several]
            held = [r for r in mine if r["held"]]
            shares = [
                100 * r["R_at_least_C_share"] for r in mine if r["rounds"] == max(x["rounds"] for x in mine)
            ]
            rows.append(
                [
                    f"{clients}, {name}",
                    f"{len(held)} of {len(mine)}",
                    f"{sum(r['held_telescoped'] for r in held)} of {len(held)}",
                    f"{min(shares):.0f} to {max(shares):.0f} %",
                ]
            )
    head = ["clients, local steps", "bound with T held", "of these, the telescoped sum"]
    return table([*head, r"rounds with $R_t \ge C_t$, longest runs"], rows)


def made() -> str:
    """Every comparison under results/runs: where and when it was made, how long it took."""
    folders = {run.folder: run for run in runs()}
    rows = []
    for folder, run in sorted(folders.items()):
        e, config = run.results["environment"], run.results["config"]
        device = e["processor"] if e["device"] == "cpu" else e["device"]
        rows.append(
            [
                f"[{folder.name}](../../{folder.relative_to(ROOT)}/results.json)",
                f"{len(run.results['runs'])} × {config['rounds']}",
                f"{device}, {run.precision}",
                e["date"][:10],
                f"{run.results['timing']['seconds']:,.0f}",
            ]
        )
    return table(["comparison", "runs × rounds", "device", "date", "seconds"], rows)


def remaining() -> str:
    """What has not been run yet, by study."""
    rows = []
    for name, study in STUDIES.items():
        jobs = missing(study.panels, list(runs()), lambda setup: None)  # type: ignore[arg-type,return-value]
        count = sum(len(job.recipe.algorithms) * len(job.recipe.seeds) for job in jobs)
        where = ", ".join(dict.fromkeys(job.recipe.setup for job in jobs))
        if jobs:
            rows.append([f"`fairwind paper {name}`", f"{count}", where])
    return table(["command", "runs left", "setups"], rows)


TASKS = {  # of benchmarks/rates.py
    "clinics": "six clinics",
    "ten": "ten clients",
    "eight": "eight clients, linear",
    "digits": "digits, 20 clients",
    "femnist": "FEMNIST, 40 writers",
    "synthetic": "Synthetic",
    "synthetic-li": "Li's Synthetic(1, 1)",
    "synthetic-sizes-li": "Synthetic, Li's sizes",
}


def recorded(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())[
        "results"
    ]
    places = {task: place for place, task in enumerate(TASKS)}
    return sorted(rows, key=lambda row: places.get(row["task"], 0))


def with_interval(difference: list[float]) -> str:
    apart, low, high = (f"{number:+.1f}".replace("-", "−") for number in difference)
    return f"{apart} [{low}, {high}]"


def rates_after(rounds: str) -> str:
    """The worst 30 % with the default server rate → with the chosen one (which), after so many rounds."""
    cells: dict[str, list[str]] = {}
    for row in recorded("rates"):
        if row["rounds"] == int(rounds):
            one, other = (row[which]["worst30"] for which in ("default", "chosen"))
            text = f"{one:.0f} → {other:.0f} ({row['rate']:g})" if row["difference"] else f"{one:.0f}"
            cells.setdefault(TASKS[row["task"]], []).append(text)
    return table(["task", *map(display_name, ALGORITHMS)], [[task, *row] for task, row in cells.items()])


def rates_of(task: str) -> str:
    """Average / STD / worst 30 % of a task with default and chosen server rates, by rounds."""
    rows = []
    for row in recorded("rates"):
        if row["task"] == task:
            results = [
                " / ".join(f"{row[which][key]:.1f}" for key in ("avg", "std", "worst30"))
                for which in ("default", "chosen")
            ]
            apart = with_interval(row["difference"]["worst30"]) if row["difference"] else "the default"
            name = display_name(row["algorithm"])
            rows.append([str(row["rounds"]), name, results[0], f"{row['rate']:g}", results[1], apart])
    return table(["rounds", "algorithm", "default rate", "chosen", "its result", "worst 30 %"], rows)


def exponents() -> str:
    """Average / worst 30 % with size=1, and what 0.5 and 0 change in the worst 30 %."""
    rows: dict[tuple[str, str], list[str]] = {}
    for row in recorded("exponent"):
        cells = rows.setdefault((row["task"], row["algorithm"]), [])
        if row["size"] == 1:
            cells.append(f"{row['result']['avg']:.1f} / {row['result']['worst30']:.1f}")
        else:
            cells.append(with_interval(row["difference"]["worst30"]))
    head = ["task", "algorithm", "size=1: average / worst 30 %", "size=0.5: worst 30 %", "size=0"]
    return table(head, [[TASKS[task], display_name(name), *cells] for (task, name), cells in rows.items()])


def codecs() -> str:
    """Kilobytes of a client's update, and average / worst 30 % with each codec, as means over seeds."""
    content = json.loads((ROOT / "benchmarks" / "results" / "codecs.json").read_text())
    rows: dict[tuple[str, str], list[str]] = {}
    for row in content["results"]:
        cells = rows.setdefault((row["task"], row["codec"] or "none"), [])
        cells[:] = cells or [f"{row['bytes_up_per_round'] / row['clients'] / 1e3:.2f}"]
        cells.append(" / ".join(f"{row[key]['mean']:.1f}" for key in ("avg", "worst30")))
    names = dict.fromkeys(display_name(row["algorithm"]) for row in content["results"])
    told = {
        row["task"]: f"{TASKS[row['task']]}, {row['rounds']} rounds, {row['seeds']} seeds"
        for row in content["results"]
    }
    body = [[told[task], codec, *cells] for (task, codec), cells in rows.items()]
    return table(["task", "codec", "an update, kB", *names], body)


def doors() -> str:
    """Megabytes of a message to a node and of its reply, with a model that is mostly frozen."""
    content = json.loads((ROOT / "benchmarks" / "results" / "doors.json").read_text())
    rows = [
        [door, *(f"{each[way] / 1e6:.3f}" for way in ("to", "from"))]
        for door, each in content["doors"].items()
    ]
    return table(["", "to a node, MB", "its reply, MB"], rows)


def joined() -> str:
    """Of each task and model: average and worst 30 %, who gains from joining, and what new clients get."""
    rows = []
    for row in recorded("joining"):
        gains = {each["algorithm"]: each for each in row["joining"]["algorithms"]}
        task = f"{TASKS[row['task']]}, {row['rounds']} rounds"
        for line in row["summary"]:
            label = line["algorithm"]
            levels = " / ".join(f"{line[key]['mean']:.1f}" for key in ("avg", "worst30"))
            cells = [task, display_name(label), levels, "–", "–", "–"]
            if label in gains:
                found, apart = gains[label], gains[label].get("average")
                cells[3] = f"{found['better']} / {found['equal']} / {found['worse']}"
                cells[4] = with_interval([apart[key] for key in ("value", "low", "high")]) if apart else "–"
            if "new_clients" in line:
                cells[5] = f"{line['new_clients']['avg']['mean']:.1f}"
            rows.append(cells)
            task = ""
    head = ["task", "model", "average / worst 30 %", "gain / same / lose", "gain", "new clients: average"]
    return table(head, rows)


def searched() -> str:
    """Of each task: what a search chose, beside the default with the best worst 30 %; and its cost."""
    rows = []
    for row in recorded("tuning-cpu"):
        lines = {line["algorithm"]: line for line in row["summary"]}
        best = max(ALGORITHMS, key=lambda name: lines[name]["worst30"]["mean"])
        levels = [
            " / ".join(f"{lines[name][key]['mean']:.1f}" for key in BESIDE) for name in (row["choice"], best)
        ]
        cost = row["whole runs"]
        task, apart = f"{TASKS[row['task']]}, {row['rounds']} rounds", row["difference"][best]["worst30"]
        chosen, default = [f"`{row['choice']}`", levels[0]], [f"{display_name(best)} {levels[1]}"]
        spent = f"{cost['by rounds']:.1f}, {cost['by seconds']:.1f}"
        rows.append([task, *chosen, *default, with_interval(apart), spent])
    head = ["task", "the choice", "average / STD / worst 30 %", "the best default", "worst 30 %, difference"]
    return table([*head, "cost in whole runs: by rounds, by time"], rows)


def personal(task: str) -> str:
    """Average / STD / worst 30 % by method, and how many clients are worse off than alone."""
    rows = []
    for row in recorded("personal-cpu"):
        if row["task"] == task:
            levels = [f"{row[key]:.1f} ± {row[f'{key}_std']:.1f}" for key in BESIDE]
            alone = row["method"] == "each alone"
            worse = "–" if alone else f"{row['worse_than_alone']} of {row['clients']}"
            rows.append([row["method"], *levels, worse])
    return table(["method", *(m.name for m in BESIDE.values()), "worse off than alone"], rows)


TABLES: dict[str, Callable[..., str]] = {
    f.__name__: f
    for f in (
        overview,
        summary,
        beside,
        impossible,
        late,
        moved,
        paired,
        draws,
        unequal,
        unequal_lead,
        momentum,
        other_solvers,
        targets,
        readings,
        rival,
        tuned,
        lag,
        speed,
        speedups,
        on_gpu,
        throughput,
        sentiment,
        coverage,
        verdicts,
        guarantee,
        made,
        remaining,
        rates_after,
        rates_of,
        exponents,
        searched,
        personal,
        doors,
        codecs,
        joined,
        attacks,
        liars,
        caps,
    )
}


def rendered(text: str) -> str:
    """A page with its tables made anew."""

    def fill(found: re.Match[str]) -> str:
        name, *arguments = found[2].split()
        return f"{found[1]}{TABLES[name](*arguments)}{found[3]}"

    return MARKED.sub(fill, text)


def main() -> None:
    stale = [page for page in PAGES if page.exists() and rendered(page.read_text()) != page.read_text()]
    if "--check" in sys.argv:
        sys.exit("\n".join(f"{page.name} is not what results/ holds" for page in stale) or 0)
    for page in stale:
        page.write_text(rendered(page.read_text()))
        print(f"{page.relative_to(ROOT)}: tables written anew")


if __name__ == "__main__":
    main()
