"""What a round costs: gradients of samples that clients compute, and bytes that they send and receive."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.contract import (
    AnyAlgorithm,
    GradientAlgorithm,
    MemoryAlgorithm,
    PersonalAlgorithm,
    PooledAlgorithm,
)
from fairwind.engine.settings import Settings
from fairwind.engine.solver import Solver
from fairwind.runs.schema import RunRow, TotalCost

BYTES = 4  # of a parameter, float32


class Cost(NamedTuple):
    """Of all clients together; numbers that are drawn (who trains, for how long) count by their mean."""

    sample_gradients: float  #: Of local steps and of probes. A loss without its gradient is none.
    bytes_up: float  #: From clients to the server: updates, and what else the algorithm's type sends.
    bytes_down: float  #: To clients.

    def times(self, rounds: float) -> TotalCost:
        """Of so many rounds."""
        return {
            "sample_gradients": rounds * self.sample_gradients,
            "bytes_up": rounds * self.bytes_up,
            "bytes_down": rounds * self.bytes_down,
        }


def round_cost(algorithm: AnyAlgorithm, train: Tensor, settings: Settings, parameters: int) -> Cost:
    """Of one round, for clients with so many training samples (K,) and a model of so many parameters.

    The few numbers that clients report beside vectors are not counted.
    """
    clients = len(train)
    asked = settings.clients_per_round
    participants = max(1, round(settings.participation * clients)) if asked is None else asked
    trained = _trained(train, settings.solver)
    probed = torch.zeros_like(train)
    if algorithm.probe == "gradient":
        probed = train if settings.probe_samples is None else train.clamp(max=settings.probe_samples)
    up = down = 1  # vectors of the model's length: the update, the model
    local = getattr(algorithm, "local", None)
    down += local is not None and local.shared is not None
    up += isinstance(algorithm, MemoryAlgorithm | GradientAlgorithm)  # changes of memories, or gradients
    if isinstance(algorithm, GradientAlgorithm) and algorithm.corrected:
        trained = 2 * trained  # of each batch at both models
        down += 1  # the mean gradient
    if isinstance(algorithm, PersonalAlgorithm) and algorithm.alone:
        up = down = 0
    elif isinstance(algorithm, PooledAlgorithm):
        return Cost(float(trained.sum()), 0, 0)
    elif isinstance(algorithm, PersonalAlgorithm):
        trained = 2 * trained  # the personal model takes as many steps
    vectors = BYTES * parameters * participants
    share = participants / clients
    return Cost(share * float((trained + probed).sum()), up * vectors, down * vectors)


def with_fine_tuning(cost: TotalCost, train: Tensor, settings: Settings) -> TotalCost:
    """The cost of a run whose model every client fine-tuned in the end."""
    tuning = replace(settings.solver, epochs=settings.finetune, steps=None)
    return {**cost, "sample_gradients": cost["sample_gradients"] + float(_trained(train, tuning).sum())}


def _trained(train: Tensor, solver: Solver) -> Tensor:
    """The samples of each client's local steps (K,)."""
    per_epoch = -(-train // solver.batch_size)
    low, high = solver.work
    if isinstance(low, int) and isinstance(high, int):
        works: list[float] = list(range(low, high + 1))
    else:
        works = [low + (high - low) * (i + 0.5) / 1000 for i in range(1000)] if high > low else [low]
    samples = torch.zeros(len(train), dtype=torch.float64)
    for work in works:
        steps = solver.local_steps(work, per_epoch)
        epochs = steps // per_epoch.clamp(min=1)
        rest = (steps - epochs * per_epoch) * solver.batch_size
        samples += epochs * train + torch.minimum(rest, train)
    return samples / len(works)


def per_round(run: RunRow) -> Cost | None:
    """Of a run in results.json; None of a real federation, and where the file is too old to say."""
    total = run.get("cost")
    if not total or not run["rounds"]:
        return None
    cost = Cost(*(total[name] / run["rounds"] for name in ("sample_gradients", "bytes_up", "bytes_down")))
    return cost if all(map(math.isfinite, cost)) else None
