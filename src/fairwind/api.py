"""Simulations from Python: your module, your clients' data, an algorithm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from fairwind import setups
from fairwind.contract import Algorithm, AnyAlgorithm
from fairwind.data.federation import Federation
from fairwind.engine.executor import Run
from fairwind.engine.losses import Loss, accuracy, cross_entropy
from fairwind.engine.ranks import join
from fairwind.engine.settings import Model, Settings
from fairwind.engine.simulation import Simulation
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


def prepare(
    spec: str,
    *,
    data_dir: str | Path | None = None,
    glove: str | Path | None = None,
    cache: str | Path | None = None,
) -> Federation:
    """The data of a setup, such as "cifar10:beta=0.1": prepared from files, or generated.

    From the files of `data_dir`; without it as prepared before, or else downloaded from the Hugging Face hub.
    """
    places = (None if place is None else Path(place) for place in (data_dir, glove, cache))
    return setups.federation(spec, setups.Where(*places), ranks=join())


def simulate(
    model: Model,
    federation: Federation,
    algorithm: AnyAlgorithm,
    *,
    seed: int = 0,
    loss: Loss = cross_entropy,
    score: Loss = accuracy,
    **settings: Any,
) -> Result:
    """Trains a model over a federation.

    `model` is a module, whose weights are where training begins, or a function that makes one, whose
    initial weights `seed` then draws. `settings` are the fields of `fairwind.Settings`: rounds, solver,
    participation, eval_every, engine, device, and so on.
    """
    runs = {"model": algorithm}
    return compare(model, federation, runs, seeds=[seed], loss=loss, score=score, **settings)[0]


def compare(
    model: Model,
    federation: Federation,
    algorithms: Mapping[str, AnyAlgorithm],
    *,
    seeds: Sequence[int] = (0,),
    loss: Loss = cross_entropy,
    score: Loss = accuracy,
    **settings: Any,
) -> list[Result]:
    """Trains with every algorithm under every seed, all stacked, and otherwise as `simulate` does."""
    if not isinstance(federation, Federation):
        kind = type(federation).__name__
        raise InputError(f"a {kind} is not a federation: make one with Federation.from_clients")
    if not isinstance(algorithms, Mapping):
        raise InputError("give the algorithms by name, as in {'mean': fairwind.algorithms.fedavg()}")
    for algorithm in algorithms.values():
        if not isinstance(algorithm, Algorithm):
            raise InputError(f"{algorithm!r} is not an algorithm: give fairwind.algorithms.fedavg(), say")
    known = [f.name for f in fields(Settings)]
    for name in settings:
        if name not in known:
            raise unknown("setting", name, known)
    runs = [Run(label, algorithm, seed) for label, algorithm in algorithms.items() for seed in seeds]
    simulation = Simulation(
        model, federation, runs, Settings(**settings), loss=loss, score=score, ranks=join()
    )
    simulation.run()
    return [_result(simulation, r) for r in range(len(runs))]


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
        state_dict={k: v.cpu() for k, v in simulation.state_dict(r).items()},
        left_out=int(simulation.left_out[r]),
        stalled_rounds=int(simulation.stalled[r]),
    )
