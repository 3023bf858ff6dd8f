"""Who gains from joining a federation, and what clients get who come later.

    python benchmarks/joining.py [TASK …] [--data-dir FOLDER] [--json FILE]

FedAvg and AdaFedAdam are compared with training alone and with all data in one place, and their models after
an epoch of fine-tuning at each client; a fifth of the clients takes no part in training. `femnist` is 40
writers of the files in --data-dir, or of the hub, with a larger local rate than the setup's, because 40
rounds are few. Tasks that are not named stay in the file as they are.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fairwind as fw
from fairwind.runs.environment import environment
from tuning import digits

ALGORITHMS = ("fedavg", "adafedadam:lr=0.01", "local", "pooled")
SEEDS = (1, 2, 3)
NEW = "new_clients=0.2"


def own() -> fw.Task:
    """A task of one's own: handwritten digits, dealt out to 20 clients by Dirichlet shares of each class."""
    task = digits()
    return replace(task, federation=task.federation.with_new_clients(0.2), rounds=100)


def tasks(data_dir: Path | None) -> dict[str, Callable[[], fw.Task]]:
    """By name; FEMNIST from files in a folder, or from the hub."""

    def femnist() -> fw.Task:
        task = fw.setup(f"femnist:clients=40,{NEW}", data_dir=data_dir)
        return replace(task, rounds=40, solver=replace(task.solver, lr=0.05))

    return {
        "synthetic": lambda: replace(fw.setup(f"synthetic:{NEW}"), rounds=500),
        "femnist": femnist,
        "digits": own,
    }


def measure(name: str, task: fw.Task) -> dict[str, Any]:
    compared = fw.compare(task, ALGORITHMS, seeds=SEEDS, finetune=1, progress=False)
    results, new = compared.results, task.federation.new_clients
    assert new is not None
    print(f"{name}: {len(compared.clients)} clients, {len(new)} new ones, {task.rounds} rounds\n{compared}\n")
    return {
        "task": name,
        "setup": results["task"],
        "rounds": task.rounds,
        "clients": len(compared.clients),
        "new_clients": len(new),
        "summary": results["summary"],
        "joining": results["joining"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(tasks(None)))
    parser.add_argument("--data-dir", type=Path, help="of FEMNIST's files; the hub if not given")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    made = tasks(o.data_dir)
    known = json.loads(o.json.read_text())["results"] if o.json and o.json.exists() else []
    rows = {row["task"]: row for row in known}
    for name in o.tasks or made:
        rows[name] = measure(name, made[name]())
        if o.json:
            content = {"environment": environment("cpu"), "seeds": SEEDS, "results": list(rows.values())}
            o.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
