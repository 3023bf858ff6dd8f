"""Simulations from Python: your module, your clients' data, an algorithm."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from fairwind.contract import AnyAlgorithm
from fairwind.data.federation import Federation
from fairwind.engine.checkpoint import load_checkpoint, save_checkpoint
from fairwind.engine.cohort import Loss, accuracy, cross_entropy
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Model, Settings, Simulation
from fairwind.errors import InputError, unknown
from fairwind.metrics import METRICS


@dataclass(frozen=True)
class Result:
    """A trained model, and how each client fares with it."""

    algorithm: str
    seed: int
    metrics: dict[str, float | None]  # docs/metrics.md; accuracies in percent
    accuracy: Tensor  # (K,) each client's test accuracy in percent, NaN without test samples
    loss: Tensor  # (K,) each client's mean test loss
    history: list[dict[str, Any]]  # the metrics after each evaluated round
    state_dict: dict[str, Tensor]  # of the trained model
    left_out: int  # contributions left out because a number was not finite
    stalled_rounds: int  # rounds in which the model stayed because no client was usable


def simulate(
    model: Model,
    federation: Federation,
    algorithm: AnyAlgorithm,
    *,
    seed: int = 0,
    loss: Loss = cross_entropy,
    score: Loss = accuracy,
    checkpoints: Path | str | None = None,
    **settings: Any,
) -> Result:
    """Trains a model over a federation.

    `model` is a module, whose weights are where training begins, or a function that makes one, whose
    initial weights `seed` then draws. `settings` are the fields of `fairwind.Settings`: rounds, solver,
    participation, eval_every, engine, device, and so on. With `checkpoints`, a folder, the same call made
    again after a kill goes on where it stood.
    """
    runs = {"model": algorithm}
    options: dict[str, Any] = {"loss": loss, "score": score, "checkpoints": checkpoints, **settings}
    return compare(model, federation, runs, seeds=[seed], **options)[0]


def compare(
    model: Model,
    federation: Federation,
    algorithms: Mapping[str, AnyAlgorithm],
    *,
    seeds: Sequence[int] = (0,),
    loss: Loss = cross_entropy,
    score: Loss = accuracy,
    checkpoints: Path | str | None = None,
    **settings: Any,
) -> list[Result]:
    """Trains with every algorithm under every seed, all stacked, and otherwise as `simulate` does."""
    known = [f.name for f in fields(Settings)]
    for name in settings:
        if name not in known:
            raise unknown("setting", name, known)
    runs = [Run(label, algorithm, seed) for label, algorithm in algorithms.items() for seed in seeds]
    simulation = Simulation(model, federation, runs, Settings(**settings), loss=loss, score=score)
    if checkpoints is None:
        simulation.run()
    else:
        folder, owner = Path(checkpoints), _owner(simulation)
        checkpoint, refused = load_checkpoint(folder, owner)
        if checkpoint is not None:
            simulation.restore(checkpoint)
        elif refused:
            raise InputError(f"no usable checkpoint in {folder}: {refused[0]}; give an empty folder")
        simulation.run(lambda: save_checkpoint(folder, simulation.checkpoint(), owner))
    return [_result(simulation, r) for r in range(len(runs))]


def _owner(simulation: Simulation) -> str:
    """Names a simulation by its settings, runs, data and model."""
    runs = [(run.label, run.seed) for run in simulation.runs]
    parts = asdict(simulation.settings), runs, simulation.federation.describe(), simulation.cohort.names
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _result(simulation: Simulation, r: int) -> Result:
    run = simulation.runs[r]
    history = simulation.history[r :: len(simulation.runs)]
    return Result(
        algorithm=run.label,
        seed=run.seed,
        metrics={k: v for k, v in history[-1].items() if k in METRICS},
        accuracy=simulation.accuracy[r],
        loss=simulation.loss[r],
        history=history,
        state_dict={k: v.cpu() for k, v in simulation.cohort.state_dict(simulation.x[r]).items()},
        left_out=int(simulation.left_out[r]),
        stalled_rounds=int(simulation.stalled[r]),
    )
