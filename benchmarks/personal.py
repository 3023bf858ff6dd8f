"""What keeping a part of the model at the clients gains, where their inputs or their labels differ.

    python benchmarks/personal.py [TASK …] [--data-dir FOLDER] [--json FILE]

In `features`, 20 clients have each a random part of scikit-learn's handwritten digits, turned by a multiple
of 90°, with a contrast and a brightness of its own. In `labels` the digits are dealt out by Dirichlet shares
of 0.1 of each class. So is, in `cifar10`, every 30th image of CIFAR-10's training part; its files are in
--data-dir, or come from the hub. All methods train the same small network with batch norm for two local
epochs a round. Rows of other tasks in FILE are kept.
"""

import argparse
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import fairwind as fw
from fairwind.metrics import fairness
from fairwind.runs.environment import environment
from fairwind.runs.schema import Part

CLIENTS = 20
SEEDS = (1, 2, 3)
SHOWN = ("avg", "std", "worst30")


THINNED = 30
ROUNDS = {"features": 50, "labels": 50, "cifar10": 30}


def network(channels: int, size: int) -> nn.Module:
    """For images of size × size."""
    body = nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
    )
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(32 * (size // 4) ** 2, 10)))


def dealt(owner: np.ndarray, change: Callable[[np.ndarray, int], np.ndarray]) -> fw.Federation:
    pictures, labels = load_digits(return_X_y=True)
    images = (pictures / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    clients = [
        (np.ascontiguousarray(change(images[owner == k], k)), labels[owner == k]) for k in range(CLIENTS)
    ]
    return fw.Federation.from_clients(clients, classes=10, name="digits")


def by_features() -> fw.Federation:
    """Each client sees the digits turned, and brighter, darker or as a negative."""
    draw = np.random.default_rng(0)
    contrast, offset = (
        draw.uniform(0.3, 2, CLIENTS) * draw.choice([-1, 1], CLIENTS),
        draw.normal(0, 1, CLIENTS),
    )

    def change(images: np.ndarray, k: int) -> np.ndarray:
        changed: np.ndarray = contrast[k] * np.rot90(images, k % 4, axes=(2, 3)) + offset[k]
        return changed.astype(np.float32)

    return dealt(draw.permutation(np.arange(1797) % CLIENTS), change)


def by_labels() -> fw.Federation:
    draw, labels = np.random.default_rng(0), load_digits(return_X_y=True)[1]
    owner = np.empty(len(labels), dtype=np.int64)
    for label in range(10):
        mine = np.flatnonzero(labels == label)
        owner[mine] = draw.choice(CLIENTS, len(mine), p=draw.dirichlet(np.full(CLIENTS, 0.1)))
    return dealt(owner, lambda images, k: images)


def cifar10(data_dir: Path | None) -> fw.Federation:
    """Every 30th image of each client's part of CIFAR-10."""
    whole = fw.setup(f"cifar10:clients={CLIENTS},beta=0.1", data_dir=data_dir).federation

    def kept(part: Part, k: int) -> tuple[Any, Any]:
        starts, sizes = whole.part(part)
        pixels, labels = whole.at(slice(int(starts[k]), int(starts[k] + sizes[k]), THINNED))
        return pixels.float() / 255, labels

    clients = [{"train": kept("train", k), "test": kept("test", k)} for k in range(CLIENTS)]
    return fw.Federation.from_clients(clients, classes=10, name="CIFAR-10")


def tasks(data_dir: Path | None) -> dict[str, Callable[[], fw.Federation]]:
    return {"features": by_features, "labels": by_labels, "cifar10": partial(cifar10, data_dir)}


HEAD: dict[str, Any] = {"personal": "head.*", "batch_norm": "shared"}
SHARED: dict[str, Any] = {"batch_norm": "shared"}

# By method: the task's settings, how many epochs train the personal part alone, the algorithm, and the label
# of the model that is its result.
METHODS: dict[str, tuple[dict[str, Any], float | None, str, str]] = {
    "each alone": (SHARED, None, "local", "local"),
    "FedAvg": (SHARED, None, "fedavg", "fedavg"),
    "FedAvg, fine-tuned": (SHARED, None, "fedavg", "fedavg (fine-tuned)"),
    "AdaFedAdam, lr=0.01": (SHARED, None, "adafedadam:lr=0.01", "adafedadam:lr=0.01"),
    "FedBN": ({"batch_norm": "local"}, None, "fedavg", "fedavg"),
    "FedPer": (HEAD, None, "fedavg", "fedavg"),
    "FedRep": (HEAD, 1, "fedavg", "fedavg"),
    "FedBABU": (HEAD, 0, "fedavg", "fedavg (fine-tuned)"),
    "LG-FedAvg": ({"personal": "body.*", "batch_norm": "local"}, None, "fedavg", "fedavg"),
    "Ditto": (SHARED, None, "ditto", "ditto (personal)"),
}


def measure(name: str, federation: fw.Federation) -> list[dict[str, Any]]:
    solver = fw.Solver(lr=0.05, batch_size=16, epochs=2)
    assert isinstance(federation.inputs, torch.Tensor)
    _, channels, size, _ = federation.inputs.shape
    model = partial(network, channels, size)
    scores: dict[str, torch.Tensor] = {}  # (seeds, K)
    rows, commit = [], environment("cpu")["commit"]
    for method, (settings, first, algorithm, label) in METHODS.items():
        task = fw.Task(model, federation, solver=replace(solver, personal_first=first), **settings)
        tuned = int(label.endswith("(fine-tuned)"))
        compared = fw.compare(
            task, algorithm, seeds=SEEDS, rounds=ROUNDS[name], finetune=tuned, progress=False
        )
        runs = [run for run in compared if run.algorithm == label]
        assert len(runs) == len(SEEDS), [run.algorithm for run in compared]
        scores[method] = torch.stack([run.score for run in runs]).double()
        gains = scores[method].mean(0) - scores["each alone"].mean(0)
        sizes = compared.test_size
        found = [fairness(run.score, run.loss, sizes) for run in runs]
        row = {
            "task": name,
            "rounds": ROUNDS[name],
            "commit": commit,
            "method": method,
            **{key: float(np.mean([each[key] for each in found])) for key in SHOWN},
            **{f"{key}_std": float(np.std([each[key] for each in found], ddof=1)) for key in SHOWN},
            "worse_than_alone": int((gains < 0).sum()),
            "clients": int((~gains.isnan()).sum()),
        }
        rows.append(row)
        levels = " / ".join(f"{row[key]:.1f}" for key in SHOWN)
        print(f"{name:9} {method:20} {levels}; worse off than alone: {row['worse_than_alone']}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(tasks(None)))
    parser.add_argument("--data-dir", type=Path, help="of CIFAR-10's files; the hub if not given")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    made = tasks(o.data_dir)
    names, rows = o.tasks or list(made), []
    if o.json and o.json.exists():
        rows = [row for row in json.loads(o.json.read_text())["results"] if row["task"] not in names]
    for name in names:
        rows += measure(name, made[name]())
        if o.json:
            content = {"environment": environment("cpu"), "seeds": SEEDS, "results": rows}
            o.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
