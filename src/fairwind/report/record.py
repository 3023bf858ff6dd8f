"""A run directory, read back."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from fairwind.files import CLIENTS, HISTORY, RESULTS, read_json
from fairwind.report.table import Judged, judged, seed_count


class Record(NamedTuple):
    results: dict[str, Any]  # results.json
    history: list[dict[str, Any]]  # history.jsonl: one row per run and evaluated round
    score: NDArray[np.float32]  # (R, K) accuracies in percent, NaN where a client has no test samples
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

    @property
    def judged(self) -> Judged:
        """What the score is."""
        return judged(self.results)

    def score_of(self, label: str) -> NDArray[np.float32]:
        """The rows of one algorithm, (seeds, K)."""
        return self.score[[run["algorithm"] == label for run in self.results["runs"]]]


def read_record(directory: Path) -> Record:
    with safe_open(directory / CLIENTS, framework="numpy") as file:
        main = "score" if "score" in file.keys() else "accuracy"  # older records' name  # noqa: SIM118
        score, train, test = (file.get_tensor(key) for key in (main, "train_size", "test_size"))
        known = (file.metadata() or {}).get("names")
    numbered = [str(k) for k in range(len(train))]  # as in records that lack names
    lines = (directory / HISTORY).read_text(encoding="utf-8").splitlines()
    return Record(
        read_json(directory / RESULTS),
        [json.loads(line) for line in lines if line.strip()],
        score,
        train,
        test,
        json.loads(known) if known else numbered,
    )
