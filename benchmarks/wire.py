"""What a codec of updates saves, and what it costs: bytes a round, and accuracy after the same rounds.

    python benchmarks/wire.py --tasks synthetic --json benchmarks/results/codecs.json
    python benchmarks/wire.py --tasks femnist --rounds 100 --seeds 0 1 --json benchmarks/results/codecs.json

FEMNIST is that of 40 writers, with its MLP. Results are of test samples after the last round. A file
keeps what it has of other tasks.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fairwind as fw
from fairwind.runs.environment import environment

CODECS = (None, "bf16", "int8", "topk:share=0.1", "topk:share=0.01")
ALGORITHMS = ("fedavg", "adafedadam")


def measure(
    name: str, task: fw.Task, codec: str | None, seeds: list[int], rounds: int
) -> list[dict[str, Any]]:
    options: dict[str, Any] = {"rounds": rounds, "eval_every": rounds, "progress": False}
    compared = fw.compare(task, ALGORITHMS, seeds=seeds, codec=codec, **options)
    rows = []
    for summary in compared.results["summary"]:
        label = summary["algorithm"]
        cost = next(run["cost"] for run in compared.results["runs"] if run["algorithm"] == label)
        rows.append(
            {
                "task": name,
                "codec": codec,
                "algorithm": label,
                "rounds": rounds,
                "seeds": len(seeds),
                "clients": len(task.federation),
                "bytes_up_per_round": cost["bytes_up"] / rounds,
                "bytes_down_per_round": cost["bytes_down"] / rounds,
                "avg": summary["avg"],
                "worst30": summary["worst30"],
                "seconds": compared.results["timing"]["seconds"],
            }
        )
        shown = f"{summary['avg']['mean']:.1f} / {summary['worst30']['mean']:.1f}"
        print(
            f"{name}, {codec}, {label}: {rows[-1]['bytes_up_per_round']:,.0f} bytes up, {shown}", flush=True
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    tasks: dict[str, Callable[[Path | None], fw.Task]] = {
        "synthetic": lambda folder: fw.setup("synthetic"),
        "femnist": lambda folder: fw.setup("femnist:clients=40", data_dir=folder),
    }
    parser.add_argument("--tasks", nargs="+", choices=list(tasks), default=list(tasks))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--data-dir", type=Path, help="FEMNIST's files, if not the hub")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    if given.json and given.json.exists():
        before = json.loads(given.json.read_text())["results"]
        rows = [row for row in before if row["task"] not in given.tasks]
    for name in given.tasks:
        task = tasks[name](given.data_dir)
        for codec in CODECS:
            rows += measure(name, task, codec, given.seeds, given.rounds)
            if given.json:
                about = {"environment": environment("cpu"), "results": rows}
                given.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
