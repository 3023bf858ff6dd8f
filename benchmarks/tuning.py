"""What a search gains over every default, and what it costs.

    python benchmarks/tuning.py [TASK …] [--data-dir FOLDER] [--trials 64] [--aim worst30] [--json FILE]

Each task is searched on validation samples with `fw.tune`; then its choice and the defaults of the paper's
five algorithms are trained under three other seeds, and compared on the test samples. The cost of a search is
also given in whole runs: in rounds, and in the time of one run of AdaFedAdam on this machine. `femnist` is 40
writers of the files in --data-dir, or of the hub, for 200 rounds.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import fairwind as fw
from fairwind.algorithms import PAPER
from fairwind.runs.environment import environment


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def clinics() -> fw.Task:
    """The six clinics of docs/start.md."""
    torch.manual_seed(0)
    diagnosis = torch.randn(8, 3)
    clients = []
    for count in (600, 300, 150, 80, 40, 40):
        inputs = torch.randn(count, 8) + torch.randn(8)
        clients.append((inputs, (inputs @ diagnosis).argmax(1)))
    data = fw.Federation.from_clients(clients, validation=0.1)
    return fw.Task(small, data, rounds=50, name="clinics")


def ten() -> fw.Task:
    """The ten clients of README.md."""
    torch.manual_seed(0)
    inputs = [torch.randn(20 * (k + 1), 8) + torch.randn(8) for k in range(10)]
    data = fw.Federation.from_clients([(x, x[:, :3].argmax(1)) for x in inputs], validation=0.1)
    return fw.Task(small, data, rounds=200, name="ten clients")


def eight() -> fw.Task:
    """A linear model, and eight clients who agree on the labels and not on the inputs."""
    torch.manual_seed(0)
    rule = torch.randn(20, 5)
    inputs = [torch.randn(100 * (k + 1), 20) + torch.randn(20) for k in range(8)]
    data = fw.Federation.from_clients([(x, (x @ rule).argmax(1)) for x in inputs], validation=0.1)
    return fw.Task(lambda: nn.Linear(20, 5), data, rounds=100, name="eight clients")


def digits() -> fw.Task:
    """Handwritten digits of scikit-learn, dealt out to 20 clients by Dirichlet shares of each class."""
    pictures, labels = load_digits(return_X_y=True)
    draw = np.random.default_rng(0)
    owner = np.empty(len(labels), dtype=np.int64)
    for label in range(10):
        mine = np.flatnonzero(labels == label)
        owner[mine] = draw.choice(20, len(mine), p=draw.dirichlet(np.full(20, 0.5)))
    clients = [((pictures[owner == k] / 16).astype(np.float32), labels[owner == k]) for k in range(20)]
    data = fw.Federation.from_clients(clients, validation=0.15, classes=10, name="digits")
    return fw.Task(lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), data, rounds=200)


TASKS: dict[str, Callable[[], fw.Task]] = {
    "clinics": clinics,
    "ten": ten,
    "eight": eight,
    "digits": digits,
    "synthetic": lambda: fw.setup("synthetic:validation=0.1"),
    "synthetic-li": lambda: fw.setup("synthetic-li:validation=0.1"),
    "synthetic-sizes-li": lambda: fw.setup("synthetic:sizes=li,validation=0.1"),
}


def tasks(data_dir: Path | None) -> dict[str, Callable[[], fw.Task]]:
    """By name; FEMNIST from files in a folder, or from the hub."""

    def femnist() -> fw.Task:
        return replace(fw.setup("femnist:clients=40,validation=0.1", data_dir=data_dir), rounds=200)

    return TASKS | {"femnist": femnist}


def measure(name: str, task: fw.Task, trials: int, aim: str) -> dict[str, Any]:
    once = seconds(lambda: fw.simulate(task, "adafedadam", progress=False))
    found = fw.tune(task, PAPER, aim=aim, trials=trials, progress=False)
    cost, compared = found.cost, found.compared
    return {
        "task": name,
        "rounds": task.rounds,
        "choice": found.spec,
        "cost": cost,
        "whole runs": {"by rounds": cost["rounds"] / task.rounds, "by seconds": cost["seconds"] / once},
        "seconds of one run": once,
        "summary": compared.results["summary"],
        "difference": {
            other: {key: list(value) for key, value in compared.difference(found.spec, other).items()}
            for other in PAPER
        },
    }


def seconds(work: Callable[[], object]) -> float:
    work()  # builds what it needs
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(tasks(None)))
    parser.add_argument("--data-dir", type=Path, help="of FEMNIST's files; the hub if not given")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--aim", default="worst30")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    made = tasks(o.data_dir)
    rows = []
    for name in o.tasks or made:
        row = measure(name, made[name](), o.trials, o.aim)
        rows.append(row)
        cost = row["whole runs"]
        print(
            f"{name}: {row['choice']}; as many rounds as {cost['by rounds']:.1f} runs, as long as "
            f"{cost['by seconds']:.1f}"
        )
        for line in row["summary"]:
            cells = " / ".join(f"{line[key]['mean']:.1f}" for key in ("avg", "std", "worst30"))
            told = ""
            if line["algorithm"] in PAPER:
                apart, low, high = row["difference"][line["algorithm"]]["worst30"]
                told = f"   worst 30 % of the choice: {apart:+.1f} [{low:+.1f}, {high:+.1f}]"
            print(f"  {line['algorithm']:45}{cells}{told}", flush=True)
        if o.json:
            content = {"environment": environment("cpu"), "trials": o.trials, "aim": o.aim, "results": rows}
            o.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
