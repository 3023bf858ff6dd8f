"""A run directory, read back."""

import json
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from fairwind.report.table import Judged, judged, seed_count
from fairwind.runs.files import CLIENTS, RECIPE, read_json
from fairwind.runs.schema import FURTHER, Baseline, FindingsSoFar, HistoryLine, Part, Parts, Results
from fairwind.runs.seals import read_history, read_results

TESTED: Parts = {"history": "test", "final": "test"}  # of older runs, which do not say it
MAX_ROUNDS = 60  # of the clients' own curves


class RecipeFacts(TypedDict, total=False):
    """What a page shows of recipe.json."""

    model: str | None
    algorithm_digests: dict[str, str]
    baselines: dict[str, Baseline]


class Record(NamedTuple):
    results: Results | FindingsSoFar
    history: list[HistoryLine]
    score: NDArray[np.float32]  # (R, K) accuracies in percent, NaN where a client has no samples of the part
    train_size: NDArray[np.int64]  # (K,)
    test_size: NDArray[np.int64]  # (K,) of the part
    names: list[str]  # of the clients
    beside: tuple[str, ...] = ()  # all labels of the page it is shown on, so that each keeps its colour there
    loss: NDArray[np.float32] | None = None  # (R, K) mean test losses
    groups: tuple[str, ...] = ()  # of the clients, where they are in groups
    rounds: tuple[int, ...] = ()  # at which each client's score was kept, of many some
    curves: NDArray[np.float32] | None = None  # (rounds, R, K) these scores
    recipe: RecipeFacts | None = None
    new_score: NDArray[np.float32] | None = None  # (runs that fit them, N) of clients that did not train
    new_names: tuple[str, ...] = ()  # of these
    state: str = ""  # of a run that is not finished: how far it is
    running: bool = False

    @property
    def domain(self) -> list[str]:
        """The labels that colours are given out over."""
        return list(self.beside) or self.labels

    @property
    def labels(self) -> list[str]:
        """The algorithms, in the order of the summary."""
        return [row["algorithm"] for row in self.results["summary"]]

    @property
    def watched(self) -> list[str]:
        """Those with a history; others are evaluated at the end alone."""
        known = {line["algorithm"] for line in self.history}
        return [label for label in self.labels if label in known]

    def owner(self, label: str) -> str:
        """The algorithm whose run has this model: of a further model, the one it is called after."""
        return next((one for one in self.labels for kind in FURTHER if label == f"{one} ({kind})"), label)

    @property
    def owners(self) -> list[str]:
        """The algorithms without their further models."""
        return list(dict.fromkeys(map(self.owner, self.labels)))

    @property
    def part(self) -> Part:
        """Which samples tables and single clients are of: test samples, unless the run goes on."""
        return self.results.get("parts", TESTED)["final"]

    @property
    def of_curves(self) -> str:
        """What is added to the title of a curve that is not of test samples."""
        part = self.results.get("parts", TESTED)["history"]
        return "" if part == "test" else f", {part} samples"

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
    """A finished run."""
    results = read_results(directory)
    with safe_open(directory / CLIENTS, framework="numpy") as file:
        keys = set(file.keys())
        score, train, test = (file.get_tensor(name) for name in ("score", "train_size", "test_size"))
        loss = file.get_tensor("loss") if "loss" in keys else None
        new_score = file.get_tensor("new.score") if "new.score" in keys else None
        metadata = file.metadata() or {}
        rounds = json.loads(metadata.get("rounds", "[]")) if "curves" in keys else []
        shown, curves = read_curves(file, rounds)
    return Record(
        results=results,
        history=read_history(directory, results),
        score=score,
        train_size=train,
        test_size=test,
        names=json.loads(metadata["names"]),
        loss=loss,
        groups=tuple(json.loads(metadata.get("groups", "[]"))),
        rounds=shown,
        curves=curves,
        recipe=_recipe(directory),
        new_score=new_score,
        new_names=tuple(json.loads(metadata.get("new_names", "[]"))),
    )


def read_curves(file: Any, rounds: list[int]) -> tuple[tuple[int, ...], NDArray[np.float32] | None]:
    """The clients' scores at up to MAX_ROUNDS of the evaluated rounds, from an open safetensors file."""
    if not rounds:
        return (), None
    kept = thin(np.arange(len(rounds)), MAX_ROUNDS).tolist()
    slices = file.get_slice("curves")  # all of them may be hundreds of MB
    return tuple(rounds[t] for t in kept), np.stack([slices[t] for t in kept])


def thin(values: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """At most `most` of the values, evenly spaced, the first and the last among them."""
    places = np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(np.int64)
    return np.take(values, places)


def _recipe(directory: Path) -> RecipeFacts:
    try:
        return cast(RecipeFacts, read_json(directory / RECIPE))
    except (OSError, ValueError):
        return {}
