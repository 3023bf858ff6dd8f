"""What an executor is: something that lets the clients of all runs train for one round."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fairwind.contract import AnyAlgorithm, CohortAlgorithm, GramAlgorithm, Report, SeeingAlgorithm
from fairwind.engine.held import Held
from fairwind.engine.ranks import Ranks


class Run(NamedTuple):
    """One training: an algorithm under a seed."""

    label: str
    algorithm: AnyAlgorithm
    seed: int


def seeing(runs: Sequence[Run]) -> dict[int, SeeingAlgorithm]:
    """By number, the runs whose servers see all updates."""
    found = enumerate(run.algorithm for run in runs)
    return {r: each for r, each in found if isinstance(each, CohortAlgorithm | GramAlgorithm)}


class Outcome(NamedTuple):
    """What a round adds up to, for each of R runs."""

    total: Tensor  # (R, P) Σ coef·δ, in float64: coefficients such as F^q may leave float32's range
    sums: list[Any]  # R records of the runs' algorithms, of 0-d float64 tensors
    used: Tensor  # (R,) clients that counted
    left_out: Tensor  # (R,) clients left out because a number of theirs was not finite
    lowest: Tensor  # (R,) the lowest loss that a client measured; infinity where none did
    more: dict[int, Tensor]  # by run, (P,): a second sum, for the types of algorithm that have one
    held: dict[int, Held]  # by run: all clients' updates, for servers that see them


class Executor(Protocol):
    """Trains the round's clients of every run."""

    threads: int  # that a kernel may use, on a CPU

    def prepare(self, round: int) -> int:
        """Draws up the round; returns how many local steps it will take, in all."""
        ...

    def round(
        self, x: Tensor, loss0: Tensor, states: Sequence[Any], finish: Callable[[Outcome], None]
    ) -> None:
        """That round from models x (R, P) and the servers' states.

        `loss0` (R, K) are the clients' losses at the runs' x_0.

        `finish` is given what the round adds up to. On a GPU all of this may be recorded and replayed, so
        that `finish` must keep its results in tensors that stay in their place.
        """
        ...


def over_ranks(outcome: Outcome, runs: list[Run], ranks: Ranks) -> Outcome:
    """What the rows of all ranks add up to; on a rank without rows, records of sums may be None."""
    if ranks.world == 1:
        return outcome
    nobody = Report(*outcome.total.new_zeros(len(Report._fields), 0))
    records = []
    for run, record in zip(runs, outcome.sums, strict=True):
        if record is None:
            assert not isinstance(run.algorithm, CohortAlgorithm | GramAlgorithm)  # these have one rank
            empty = run.algorithm.client(nobody).sums
            record = type(empty)(*(each.sum() for each in empty))
        records.append(record)
    numbers = [number for record in records for number in record]
    total, used, left_out, *numbers = ranks.sum(outcome.total, outcome.used, outcome.left_out, *numbers)
    each = iter(numbers)
    sums = [type(record)(*islice(each, len(record))) for record in records]
    return Outcome(total, sums, used, left_out, ranks.lowest(outcome.lowest), {}, {})
