"""The interface of executors, which train the clients of all runs for one round."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fairwind.contract import (
    AnyAlgorithm,
    CohortAlgorithm,
    GramAlgorithm,
    PooledAlgorithm,
    Report,
    WeighingAlgorithm,
)
from fairwind.engine.ranks import Ranks
from fairwind.engine.round_updates import RoundUpdates


class Run(NamedTuple):
    """One training: an algorithm under a seed."""

    label: str
    algorithm: AnyAlgorithm
    seed: int


def in_order(runs: Sequence[Run]) -> list[Run]:
    """As a simulation has them: those with all samples in one place last, which another engine trains."""
    return sorted(runs, key=lambda run: isinstance(run.algorithm, PooledAlgorithm))


def seeing(runs: Sequence[Run]) -> dict[int, WeighingAlgorithm]:
    """The indices of runs whose servers see all updates."""
    found = enumerate(run.algorithm for run in runs)
    return {r: each for r, each in found if isinstance(each, CohortAlgorithm | GramAlgorithm)}


class RoundSums(NamedTuple):
    """The sums of a round, for each of R runs."""

    total: Tensor  # (R, P) Σ coef·δ, in float64: coefficients such as F^q may exceed float32's range
    sums: list[Any]  # R records of the runs' algorithms, of 0-d float64 tensors
    used: Tensor  # (R,) usable clients
    left_out: Tensor  # (R,) clients left out because of numbers that are not finite
    lowest: Tensor  # (R,) the lowest loss of any client's probe; infinity without probes
    more: dict[int, Tensor]  # by run, (P,): a second sum, for the types of algorithm that have one
    held: dict[int, RoundUpdates]  # by run: all clients' updates, for servers that see them


class ClientUpdates(NamedTuple):
    """The results of some clients of a run."""

    run: int
    client: Tensor  # (n,)
    report: Report  # (n,)
    update: Tensor  # (n, P) δ


# By run, the vector u (P,) that its server adds to every step, for algorithms that have one.
Shared = Callable[[int], Tensor]


class Executor(Protocol):
    """Trains the round's clients of every run."""

    threads: int  # threads of a kernel, on a CPU

    def prepare(self, round: int) -> int:
        """Prepares the round; returns its total number of local steps."""
        ...

    def round(self, x: Tensor, loss0: Tensor, shared: Shared, finish: Callable[[RoundSums], None]) -> None:
        """Trains the prepared round from models x (R, P).

        `loss0` (R, K) are the clients' losses at the runs' x_0.

        `finish` is called with the sums of the round. On a GPU all of this may be recorded and replayed as a
        CUDA graph, so `finish` must write its results into existing tensors.
        """
        ...

    def gradients(self, x: Tensor) -> dict[int, Tensor]:
        """The mean full gradients (P,) at x (R, P), by run, for servers that get them; trains nothing."""
        ...

    def updates(
        self, x: Tensor, loss0: Tensor, shared: Shared, gradients: dict[int, Tensor]
    ) -> Iterator[ClientUpdates]:
        """Trains the prepared round, too, and yields the clients' updates instead of sums.

        `gradients` are the mean full gradients by run; those that are missing are measured, and added. New
        personal models are kept, but memories do not change.
        """
        ...


def over_ranks(outcome: RoundSums, runs: list[Run], ranks: Ranks) -> RoundSums:
    """The sums over all ranks, but for `more` and `held`; on a rank without rows, records may be None."""
    if ranks.world == 1:
        return outcome
    nobody = Report(*outcome.total.new_zeros(len(Report._fields), 0))
    records = []
    for run, record in zip(runs, outcome.sums, strict=True):
        if record is None and not isinstance(run.algorithm, CohortAlgorithm | GramAlgorithm):
            empty = run.algorithm.client(nobody).sums
            record = type(empty)(*(each.sum() for each in empty))
        records.append(record)
    numbers = [number for record in records for number in record or ()]
    total, used, left_out, *numbers = ranks.sum(outcome.total, outcome.used, outcome.left_out, *numbers)
    each = iter(numbers)
    sums = [record and type(record)(*islice(each, len(record))) for record in records]
    lowest = ranks.lowest(outcome.lowest)
    return RoundSums(total, sums, used, left_out, lowest, outcome.more, outcome.held)
