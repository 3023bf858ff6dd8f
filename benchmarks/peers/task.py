"""What every peer needs to know of the task, and the line it prints. Needs NumPy only."""

import json
import statistics
import sys
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Client = tuple[Array, NDArray[np.int64]]

RATE, BATCH, FEATURES, CLASSES, CORES = 0.01, 10, 60, 10, 2
WARM_UP = 5  # rounds that are not timed: compilers, caches and pools of workers start in them


def arguments() -> tuple[str, int, str]:
    """The file of data, the number of rounds, and the variant of a peer that has several."""
    path, rounds, *variant = sys.argv[1:]
    return path, int(rounds), "".join(variant)


@lru_cache
def clients(path: str) -> list[Client]:
    """Each client's training inputs and labels."""
    data = np.load(path)
    ends = data["sizes"].cumsum()[:-1]
    return list(zip(np.split(data["inputs"], ends), np.split(data["targets"], ends), strict=True))


def zeros() -> list[Array]:
    """The weight and the bias that training starts from."""
    return [np.zeros((CLASSES, FEATURES), np.float32), np.zeros(CLASSES, np.float32)]


def report(path: str, version: str, marks: list[float], weight: Array, bias: Array) -> None:
    """Prints the median round between `marks`, the ends of rounds, and the mean loss of training samples."""
    data = np.load(path)
    z = data["inputs"] @ np.asarray(weight).T + np.asarray(bias)
    loss = np.mean(np.logaddexp.reduce(z, 1) - z[np.arange(len(z)), data["targets"]], dtype=float)
    seconds = statistics.median(np.diff(marks)[WARM_UP - 1 :])
    print(json.dumps({"version": version, "seconds": seconds, "loss": loss}), flush=True)
