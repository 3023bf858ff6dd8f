"""Whether default server rates are good ones: each against the rate that validation samples choose.

    python benchmarks/rates.py [TASK …] [--data-dir FOLDER] [--json FILE]

For each of the paper's five algorithms, a grid of server rates is trained once; after 10, 50, 200 and all
rounds, the rate with the best worst 30 % on validation samples is chosen. Then choices and defaults are
trained for so many rounds under five other seeds, and compared on the test samples.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fairwind as fw
from fairwind.runs.environment import environment
from tuning import tasks

ADAPTIVE = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)  # about how far each weight moves in a round
RATES = {
    "fedavg": (0.1, 0.3, 1, 3, 10, 30),
    "fedadam": ADAPTIVE,
    "fednova": (0.1, 0.3, 1, 3, 10, 30),
    "qfedavg": (0.1, 0.3, 1, 3, 10, 30, 100),
    "adafedadam": ADAPTIVE,
}
DEFAULTS = {"fedavg": 1, "fedadam": 0.001, "fednova": 1, "qfedavg": 1, "adafedadam": 0.001}
HORIZONS = (10, 50, 200)
SEEDS = (1, 2, 3, 4, 5)
SHOWN = ("avg", "std", "worst30")
TOLD = ("default", "chosen")


def spec(name: str, rate: float) -> str:
    return name if rate == DEFAULTS[name] else f"{name}:lr={rate:g}"


def chosen_rates(task: fw.Task, rounds: list[int]) -> dict[int, dict[str, float]]:
    """By number of rounds and algorithm, the rate with the best worst 30 % on the validation samples."""
    search = replace(task, federation=task.federation.for_choosing())
    grid = {spec(name, rate): (name, rate) for name, rates in RATES.items() for rate in rates}
    trained = fw.compare(search, list(grid), seeds=[0], rounds=rounds[-1], eval_every=10, progress=False)
    choices: dict[int, dict[str, float]] = {}
    for horizon in rounds:
        best: dict[str, tuple[tuple[float, float], float]] = {}  # the average decides among equal worst 30 %
        for run in trained:
            line = next(line for line in run.history if line["round"] == horizon)
            name, rate = grid[run.algorithm]
            average, worst30 = line["avg"], line["worst30"]
            if average is None or worst30 is None:
                continue
            if name not in best or (worst30, average) > best[name][0]:
                best[name] = (worst30, average), rate
        choices[horizon] = {name: rate for name, (_, rate) in best.items()}
    return choices


def measure(name: str, make: Callable[[], fw.Task]) -> list[dict[str, Any]]:
    task = make()
    rounds = [horizon for horizon in HORIZONS if horizon < task.rounds] + [task.rounds]
    rows = []
    for horizon, rates in chosen_rates(task, rounds).items():
        specs = dict.fromkeys([*RATES, *(spec(algorithm, rate) for algorithm, rate in rates.items())])
        compared = fw.compare(task, list(specs), seeds=SEEDS, rounds=horizon, progress=False)
        numbers: dict[str, Any] = {line["algorithm"]: line for line in compared.results["summary"]}
        for algorithm, rate in rates.items():
            chosen = spec(algorithm, rate)
            apart = {} if chosen == algorithm else compared.difference(chosen, algorithm)
            row = {
                "task": name,
                "rounds": horizon,
                "algorithm": algorithm,
                "rate": rate,
                "default": {key: numbers[algorithm][key]["mean"] for key in SHOWN},
                "chosen": {key: numbers[chosen][key]["mean"] for key in SHOWN},
                "difference": {key: list(apart[key]) for key in ("avg", "worst30") if apart},
            }
            rows.append(row)
            print(shown(row), flush=True)
    return rows


def shown(row: dict[str, Any]) -> str:
    default, chosen = (" / ".join(f"{row[which][key]:.1f}" for key in SHOWN) for which in TOLD)
    told = "the default is chosen"
    if row["difference"]:
        apart, low, high = row["difference"]["worst30"]
        told = f"→ {chosen} with {row['rate']:g}; worst 30 % {apart:+.1f} [{low:+.1f}, {high:+.1f}]"
    return f"{row['task']}, {row['rounds']} rounds, {row['algorithm']:10} {default} {told}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(tasks(None)))
    parser.add_argument("--data-dir", type=Path, help="of FEMNIST's files; the hub if not given")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    made = tasks(o.data_dir)
    rows = []
    for name in o.tasks or made:
        rows += measure(name, made[name])
        if o.json:
            content = {"environment": environment("cpu"), "seeds": SEEDS, "results": rows}
            o.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
