"""The server's step on a CPU, in blocks if the algorithm is elementwise over parameters.

A step is about twenty operations, each of which reads and writes vectors as long as the model. In blocks,
intermediate results stay in the cache.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairwind.aggregation import advance, advance_seeing, contribute, finite, step
from fairwind.contract import (
    Algorithm,
    CohortAlgorithm,
    GramAlgorithm,
    LocalAlgorithm,
    PersonalAlgorithm,
    Report,
)
from fairwind.engine import tuning
from fairwind.engine.executor import RoundSums, Run
from fairwind.engine.workers import Workers
from fairwind.layers.pointwise import Operations

Summed = Algorithm[Any, Any] | LocalAlgorithm[Any, Any] | PersonalAlgorithm[Any, Any]


class Server:
    """The servers of all runs, which take their steps in place."""

    def __init__(self, runs: Sequence[Run], dtype: torch.dtype, *, blocks: bool, workers: int):
        """For models of this type, in `blocks` where that is possible."""
        self.runs = runs
        self.in_blocks = [
            blocks
            and isinstance(run.algorithm, Algorithm | LocalAlgorithm | PersonalAlgorithm)
            and is_elementwise(run.algorithm, dtype)
            for run in runs
        ]
        self.workers = Workers([None] * (workers if any(self.in_blocks) else 1))

    def advance(self, r: int, x: Tensor, state: Any, outcome: RoundSums) -> tuple[Tensor, Any, Tensor]:
        """Run r's next model and state, and whether they changed; bit for bit as `aggregation.advance`."""
        algorithm = self.runs[r].algorithm
        if isinstance(algorithm, CohortAlgorithm | GramAlgorithm):
            held = outcome.held[r]
            return advance_seeing(algorithm, x, state, held.cohort(), held.gram, held.summed)
        more = (outcome.more[r],) if r in outcome.more else ()
        total, sums, clients = outcome.total[r], outcome.sums[r], outcome.used[r]
        if not self.in_blocks[r]:
            return advance(algorithm, x, state, total, sums, clients, *more)
        new_x, new_state = torch.empty_like(x), type(state)(*map(torch.empty_like, state))

        size = tuning.MAX_CACHED_NUMBERS

        @torch.no_grad()
        def work(begin: int, _: None) -> Tensor:
            here = slice(begin, begin + size)
            part = type(state)(*(old[here] if old.ndim else old for old in state))
            found = step(algorithm, x[here], part, total[here], sums)
            new_x[here] = found[0]
            for new, value in zip(new_state, found[1], strict=True):
                new[here if new.ndim else ()] = value
            return finite(found[0], *found[1])

        moved = torch.stack([clients > 0, *self.workers.map(work, range(0, len(x), size))]).all()
        return (new_x, new_state, moved) if moved else (x, state, moved)


def is_elementwise(
    algorithm: Algorithm[Any, Any] | LocalAlgorithm[Any, Any] | PersonalAlgorithm[Any, Any],
    dtype: torch.dtype,
) -> bool:
    """Whether a server's step is elementwise over parameters."""
    x = torch.linspace(-1, 1, 5, dtype=dtype)
    first, last = x[:3], x[3:]
    one = torch.ones((), dtype=torch.float64)
    try:
        sums = contribute(algorithm, Report(*[one] * len(Report._fields)))[0].sums
        with Operations() as seen:
            whole, begin, end = (
                algorithm.server(p, algorithm.init(p), p.double(), sums)[0] for p in (x, first, last)
            )
        vectors = {tuple(old.shape) for old in algorithm.init(x)} <= {(5,), ()}
    except Exception:  # whatever an algorithm makes of such numbers
        return False
    return vectors and seen.pointwise and torch.equal(whole, torch.cat([begin, end]))
