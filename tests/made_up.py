"""A run directory of made-up numbers."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fairwind.metrics import model_metrics
from fairwind.runs.files import sealed, write_json
from fairwind.runs.results import summary_of
from fairwind.runs.schema import RunRow


def write_run(
    directory: Path,
    algorithms: list[str],
    *,
    seeds: int = 3,
    clients: int = 12,
    level: dict[str, float] | None = None,
    noise: float = 1.0,
) -> dict[str, Any]:
    """A run directory of made-up numbers; `level` is the accuracy an algorithm ends near, 80 unless told."""
    rng = np.random.default_rng(7)
    directory.mkdir(exist_ok=True)
    hard, size = rng.normal(0, 10, clients), np.arange(clients)  # the first has no test samples
    runs: list[RunRow] = []
    history, accuracy, curves = [], [], []
    for algorithm in algorithms:
        end = (level or {}).get(algorithm, 80.0)
        for seed in range(seeds):
            for t in range(0, 41, 10):
                scores = np.clip(end * t / 40 + hard + rng.normal(0, noise, clients), 0, 100)
                curves.append(scores)
                final = model_metrics(scores, scores / 10, size, "accuracy")
                certainty = 1.5 if algorithm.startswith("adafedadam") and t else None
                history.append(
                    {"algorithm": algorithm, "seed": seed, "round": t, **final, "certainty": certainty}
                )
            runs.append(
                {
                    "algorithm": algorithm,
                    "seed": seed,
                    "rounds": 40,
                    "final": final,
                    "left_out": 0,
                    "stalled_rounds": 0,
                }
            )
            accuracy.append(scores)
    summary = summary_of(runs)
    results = {
        "setup": "synthetic",
        "task": "synthetic",
        "command": "",
        "data": None,
        "scores": [{"name": "accuracy", "kind": "accuracy"}],
        "config": {"algorithms": algorithms, "solver": {"name": "sgd", "lr": 0.01}, "probe_samples": None},
        "environment": {"fairwind": "0.1.0", "commit": "abc1234", "cpu": "<i>cpu</i>"},
        "federation": {
            "name": "Synthetic", "clients": clients, "classes": None, "train_samples": 700,
            "test_samples": 180, "smallest": 4, "median": 16, "largest": 80,
        },
        "runs": runs,
        "summary": summary,
        "timing": {"seconds": 75.0, "rounds_per_second": 0.5, "client_steps_per_second": None},
    }  # fmt: skip
    matrix = np.array(accuracy, dtype=np.float32)
    matrix[:, 0] = np.nan  # a client without test samples
    each = np.array(curves, dtype=np.float32).reshape(len(runs), 5, clients)
    each[..., 0] = np.nan
    arrays: dict[str, np.ndarray] = {
        "score": matrix,
        "loss": matrix / 10,
        "train_size": size * 10 + 10,
        "test_size": size,
    }
    arrays["curves"] = np.ascontiguousarray(each.transpose(1, 0, 2))
    names = json.dumps([str(k) for k in range(clients)])
    metadata = {"rounds": "[0, 10, 20, 30, 40]", "names": names}
    save_file(arrays, directory / "clients.safetensors", metadata=metadata)
    (directory / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    save_results(directory, results)
    return results


def save_results(directory: Path, results: dict[str, Any]) -> None:
    names = "history.jsonl", "clients.safetensors"
    files = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}
    write_json(directory / "results.json", sealed({**results, "files": files}))
