"""A run directory, read back."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from fairwind.files import CLIENTS, HISTORY, RESULTS
from fairwind.report.table import seed_count


class Record(NamedTuple):
    results: dict[str, Any]  # results.json
    history: list[dict[str, Any]]  # history.jsonl: one row per run and evaluated round
    accuracy: NDArray[np.float32]  # (R, K) percent, NaN where a client has no test samples
    train_size: NDArray[np.int64]  # (K,)
    test_size: NDArray[np.int64]  # (K,)
    names: list[str]  # of the clients
    beside: tuple[str, ...] = ()  # all labels of the page it is shown on, so that each keeps its colour there

    @property
    def domain(self) -> list[str]:
        """The labels that colours are given out over."""
        return list(self.beside) or self.labels

    @property
    def labels(self) -> list[str]:
        """The algorithms, in the order of the summary."""
        return [row["algorithm"] for row in self.results["summary"]]

    @property
    def seeds(self) -> int:
        """The number of seeds."""
        return seed_count(self.results)

    def accuracy_of(self, label: str) -> NDArray[np.float32]:
        """The rows of one algorithm, (seeds, K)."""
        return self.accuracy[[run["algorithm"] == label for run in self.results["runs"]]]


def read_record(directory: Path) -> Record:
    with safe_open(directory / CLIENTS, framework="numpy") as file:
        clients = {key: file.get_tensor(key) for key in ("accuracy", "train_size", "test_size")}
        known = (file.metadata() or {}).get("names")
    numbered = [str(k) for k in range(len(clients["train_size"]))]  # as in records that lack names
    lines = (directory / HISTORY).read_text(encoding="utf-8").splitlines()
    return Record(
        results=json.loads((directory / RESULTS).read_text(encoding="utf-8")),
        history=[json.loads(line) for line in lines if line.strip()],
        **clients,
        names=json.loads(known) if known else numbered,
    )
