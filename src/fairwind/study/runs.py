"""Finished runs, read from their folders and identified by everything that determines their numbers."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from fairwind import algorithms, setups
from fairwind.engine.settings import NUMBERS, Settings, names_of
from fairwind.engine.solver import Solver
from fairwind.errors import first_line
from fairwind.runs.files import CLIENTS, HISTORY, PACKED, RESULTS
from fairwind.runs.schema import HistoryLine, ResultsFile, RunRow
from fairwind.runs.seals import damaged, lost_results, read_history, read_results, with_history
from fairwind.runs.spec import arguments, parameters

Floats = NDArray[np.float32]
EMPTY: Mapping[str, str] = {}
READ = HISTORY, PACKED, CLIENTS  # of the files that results.json seals
CUT = "time_budget", "after_evaluation"  # what stops a run before its settings do


class RunKey(NamedTuple):
    """Everything that determines a run's numbers up to rounding, with all defaults filled in."""

    setup: str
    algorithm: str
    seed: int
    settings: str

    @classmethod
    def of(
        cls,
        setup: str,
        algorithm: str,
        seed: int,
        settings: Mapping[str, Any],
        digests: Mapping[str, str] = EMPTY,
        task: str = "",
        numbers: int = NUMBERS,
    ) -> "RunKey":
        """`digests` are of algorithms: one that computes something else is another run, whatever its name.

        So is another `task`, a digest, where the setup is a task of one's own, and another version of the
        engine's `numbers`.
        """
        name, known = algorithm.partition(":")[0], {n: parameters(b) for n, b in algorithms.REGISTRY.items()}
        spec = (name, arguments("algorithm", algorithm, known)) if name in known else (algorithm, {})
        given = (*spec, digests.get(algorithm, ""), numbers)
        data = ("task", task) if task else (setup.partition(":")[0], setups.arguments_of(setup))
        # A field that did not exist when a run was stored has its default.
        every = dataclasses.asdict(Settings()) | dict(settings)
        decide = {name: every[name] for name in names_of("numbers")}
        if (
            every["target"] is not None or every["patience"] is not None
        ):  # then the rounds that are evaluated decide which is the last
            decide["eval_every"] = every["eval_every"]
        decide["solver"] = dataclasses.asdict(Solver()) | every["solver"]
        texts = [json.dumps(value, sort_keys=True) for value in (data, given, decide)]
        return cls(texts[0], texts[1], seed, texts[2])


class Clients(NamedTuple):
    """The clients of a comparison."""

    train_size: NDArray[np.int64]  # (K,)
    test_size: NDArray[np.int64]  # (K,)
    names: list[str]


class Finished(NamedTuple):
    """A finished run."""

    key: RunKey
    row: RunRow
    history: list[HistoryLine]
    accuracy: Floats | None  # (K,) None if no per-client numbers were kept
    clients: Clients | None  # likewise
    results: ResultsFile  # of the comparison it was part of: config, environment, federation, timing
    folder: Path

    @property
    def digest(self) -> str | None:
        """The digest of the data, if it was prepared from files."""
        return self.results["federation"].get("digest")

    @property
    def precision(self) -> str:
        return str(self.results["config"].get("precision", "float32"))


class PassedOver(NamedTuple):
    """A folder whose runs are not used."""

    file: Path
    why: str
    damaged: bool  # else it is whole, but nothing that a study can use

    def __str__(self) -> str:
        return f"{self.file} {self.why}: its runs are passed over"


def read_runs(*roots: Path) -> tuple[list[Finished], list[PassedOver]]:
    """All finished runs below the folders, verified, and what is passed over."""
    finished: list[Finished] = []
    refused = []
    files = [file for root in roots for name in (RESULTS, PACKED) for file in root.rglob(name)]
    for folder in sorted({file.parent for file in files}):
        if lost_results(folder):
            refused.append(PassedOver(folder / RESULTS, "is missing", damaged=True))
        elif (folder / RESULTS).exists():
            spoilt = damaged(folder, among=READ)
            try:
                finished += [] if spoilt else list(_read(folder))  # all of them, or none
            except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
                refused.append(PassedOver(folder / RESULTS, f"cannot be used ({first_line(error)})", False))
            refused += [PassedOver(folder / name, "is damaged", damaged=True) for name in spoilt]
    return finished, refused


def _read(folder: Path) -> Iterator[Finished]:
    results = read_results(folder)
    config, rows = results["config"], results["runs"]
    if "algorithms" not in config:
        raise ValueError("a real federation's training, and no comparison")
    if not results["setup"]:
        raise ValueError("its task was made in Python")
    if "algorithm_digests" not in results:
        raise ValueError("an earlier version of Fairwind did not write down what its algorithms compute")
    if (stopped := results.get("stopped", {}).get("by")) in CUT:
        raise ValueError(f"cut short by {stopped}")
    lines = read_history(folder, results)
    accuracy, clients = _clients(folder) if CLIENTS in results["files"] else (None, None)
    asked = itertools.product(config["algorithms"], config["seeds"])
    # A run may have further models, personal or averaged, with other labels: studies compare the first.
    firsts = {(row["algorithm"], row["seed"]): r for r, row in enumerate(rows)}
    digests, tasks = results["algorithm_digests"], results.get("task_digests", EMPTY)
    for spec, seed in asked:
        r = firsts[spec, seed]
        yield Finished(
            key=RunKey.of(
                results["setup"],
                spec,
                seed,
                config,
                digests,
                tasks.get(str(seed), ""),
                results.get("numbers", 0),
            ),
            row=rows[r],
            history=lines[r :: len(with_history(rows))],
            accuracy=None if accuracy is None else accuracy[r],
            clients=clients,
            results=results,
            folder=folder,
        )


def _clients(folder: Path) -> tuple[Floats, Clients]:
    """The scores (R, K) of a comparison's clients, and who they are."""
    with safe_open(folder / CLIENTS, framework="numpy") as file:
        score, train_size, test_size = (file.get_tensor(key) for key in ("score", "train_size", "test_size"))
        return score, Clients(train_size, test_size, json.loads(file.metadata()["names"]))
