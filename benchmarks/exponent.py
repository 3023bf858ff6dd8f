"""What weighting clients by S^½, or all alike, does in place of S: the option `size` of an algorithm.

    python benchmarks/exponent.py [TASK …] [--data-dir FOLDER] [--json FILE]

Algorithms have the server rates that rates.py chose for all rounds (benchmarks/results/rates.json), and are
trained with size=1, 0.5 and 0 under the same five seeds. Compared on the test samples.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import fairwind as fw
from fairwind.runs.environment import environment
from rates import RATES, SEEDS, SHOWN
from tuning import tasks

CHOSEN = Path(__file__).parent / "results" / "rates.json"
SIZES = (1, 0.5, 0)
WEIGHING = [name for name in RATES if name != "qfedavg"]  # which weighs by losses alone


def measure(name: str, task: fw.Task) -> list[dict[str, Any]]:
    chosen = {
        row["algorithm"]: row["rate"]
        for row in json.loads(CHOSEN.read_text())["results"]
        if row["task"] == name and row["rounds"] == task.rounds
    }
    specs = {
        (algorithm, size): f"{algorithm}:lr={chosen[algorithm]:g},size={size:g}"
        for algorithm in WEIGHING
        for size in SIZES
    }
    compared = fw.compare(task, list(specs.values()), seeds=SEEDS, progress=False)
    numbers: dict[str, Any] = {line["algorithm"]: line for line in compared.results["summary"]}
    rows = []
    for (algorithm, size), spec in specs.items():
        row = {
            "task": name,
            "algorithm": algorithm,
            "size": size,
            "result": {key: numbers[spec][key]["mean"] for key in (*SHOWN, "avg_weighted")},
        }
        if size != 1:
            apart = compared.difference(spec, specs[algorithm, 1])
            row["difference"] = {key: list(apart[key]) for key in ("avg", "worst30")}
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="those of rates.py")
    parser.add_argument("--data-dir", type=Path, help="of FEMNIST's files; the hub if not given")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    made = tasks(o.data_dir)
    rows = []
    for name in o.tasks or made:
        rows += measure(name, made[name]())
        if o.json:
            content = {"environment": environment("cpu"), "seeds": SEEDS, "results": rows}
            o.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
