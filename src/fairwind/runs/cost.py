"""What a round costs: gradients of samples that clients compute, and bytes that they send and receive."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.codecs import codec_of
from fairwind.contract import (
    AnyAlgorithm,
    GradientAlgorithm,
    MemoryAlgorithm,
    PersonalAlgorithm,
    PooledAlgorithm,
)
from fairwind.data.counter import draw
from fairwind.engine.settings import Settings
from fairwind.engine.solver import Solver
from fairwind.runs.schema import RunRow, TotalCost

BYTES = 4  # of a parameter, float32
DRAWS = 200  # of participants that are not drawn alike, over which their shares are averaged


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
    vector = BYTES * parameters
    up = vector if settings.codec is None else codec_of(settings.codec).bytes(parameters, BYTES)
    down = vector  # the model
    local = getattr(algorithm, "local", None)
    down += vector * (local is not None and local.shared is not None)
    up += vector * isinstance(algorithm, MemoryAlgorithm | GradientAlgorithm)  # memories, gradients
    if isinstance(algorithm, GradientAlgorithm) and algorithm.corrected:
        trained = 2 * trained  # of each batch at both models
        down += vector  # the mean gradient
    if isinstance(algorithm, PersonalAlgorithm) and algorithm.alone:
        up = down = 0
    elif isinstance(algorithm, PooledAlgorithm):
        return Cost(float(trained.sum()), 0, 0)
    elif isinstance(algorithm, PersonalAlgorithm):
        trained = 2 * trained  # the personal model takes as many steps
    share: float | Tensor = participants / clients
    if settings.selection == "size":
        hashes = torch.randint(2**32, (DRAWS, clients), generator=torch.Generator().manual_seed(0))
        chosen = torch.cat([draw(each, participants, train.double()) for each in hashes])
        share = torch.bincount(chosen, minlength=clients) / DRAWS
    return Cost(float((share * (trained + probed)).sum()), up * participants, down * participants)


def with_fine_tuning(cost: TotalCost, train: Tensor, settings: Settings) -> TotalCost:
    """The cost of a run whose model every client fine-tuned in the end."""
    tuned = float(_trained(train, settings.fine_tuning).sum())
    return {**cost, "sample_gradients": cost["sample_gradients"] + tuned}


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
    """Of a run in results.json; None where the file is too old to say.

    The gradients that the clients of a real federation computed are not known, and NaN.
    """
    total, rounds = run.get("cost"), run["rounds"]
    if not total or not rounds:
        return None
    sent = total["bytes_up"] / rounds, total["bytes_down"] / rounds
    if not all(map(math.isfinite, sent)):
        return None
    return Cost(total.get("sample_gradients", math.nan) / rounds, *sent)
