"""One run's sums of a round, to which the loop adds its clients a few at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairwind.aggregation import contribute, usable_clients
from fairwind.contract import CohortAlgorithm, GramAlgorithm, MemoryAlgorithm, Report
from fairwind.engine.executor import RoundSums, Run
from fairwind.engine.loop.learner import CompensatedSum, norm
from fairwind.engine.memory import Compression, Memories, changed
from fairwind.engine.round_updates import RoundUpdates


class ClientResult(NamedTuple):
    """A client's results."""

    client: int
    loss: Tensor  # at the received model; NaN if not probed
    grad_norm: Tensor
    update_norm: Tensor
    update: Tensor  # δ (P,)
    own: Tensor  # (·,) its own part of the model


def measured(clients: list[ClientResult], report: Report) -> Report:
    """The clients' reports (n,), with the numbers that they measured."""
    return report._replace(
        loss=torch.stack([each.loss for each in clients]),
        grad_norm=torch.stack([each.grad_norm for each in clients]),
        update_norm=torch.stack([each.update_norm for each in clients]),
    )


class RunTotals:
    """What a run's clients add up to."""

    def __init__(
        self,
        r: int,
        run: Run,
        x: Tensor,
        shared: Callable[[], Tensor],
        memories: Memories,
        gram_numbers: int,
        compression: Compression | None = None,
    ):
        """For the r-th run, whose clients receive x (P,) and u (P,), if that is `shared`."""
        self.r, self.algorithm, self.shared, self.memories = r, run.algorithm, shared, memories
        self.compression = compression
        self.total = CompensatedSum(x)
        self.sums: Any = None
        self.used, self.left_out = torch.zeros(2, dtype=torch.int64, device=x.device)
        self.lowest = torch.full((), torch.inf, dtype=torch.float64, device=x.device)
        self.change: Tensor | None = None  # Σ of the changes of clients' memories (P,)
        if isinstance(self.algorithm, MemoryAlgorithm):
            self.change = torch.zeros_like(x, dtype=torch.float64)
        self.held: RoundUpdates | None = None
        if run.held or isinstance(self.algorithm, CohortAlgorithm | GramAlgorithm):
            self.held = RoundUpdates(self.algorithm, lambda matrices: matrices[0], gram_numbers)

    def add(self, clients: list[ClientResult], report: Report) -> None:
        """Adds clients, given also their reports (n,)."""
        self.lowest = torch.fmin(self.lowest, report.loss.nan_to_num(torch.inf).min())
        clients, report, left_out = self._sent(clients, report)
        if self.held is not None or isinstance(self.algorithm, CohortAlgorithm | GramAlgorithm):
            usable = usable_clients(self.algorithm, report)
            assert self.held is not None
            self.held.add(report, self._numbers(clients), [_together(clients)])
        else:
            part, usable = contribute(self.algorithm, report)
            sums = [each.sum() for each in part.sums]
            self.sums = type(part.sums)(*(sums if self.sums is None else map(torch.add, self.sums, sums)))
            if isinstance(self.algorithm, MemoryAlgorithm):
                self._remember(self.algorithm, clients, report, usable)
            for each, coef, use in zip(clients, part.coef.tolist(), usable.tolist(), strict=True):
                if use:
                    self.total.add(coef, each.update)
        if self.compression is not None:
            self.compression.keep(self.r, self._numbers(clients), usable, left_out)
        self.used += usable.sum()
        self.left_out += (~usable).sum()

    def _sent(self, clients: list[ClientResult], report: Report) -> tuple[list[ClientResult], Report, Tensor]:
        """What arrives of clients' updates, and what a codec leaves out (n, P)."""
        if self.compression is None:
            return clients, report, report.size
        arrived, left_out = self.compression.sent(self.r, self._numbers(clients), _together(clients))
        length = torch.stack([norm([update]) for update in arrived])
        clients = [each._replace(update=update) for each, update in zip(clients, arrived, strict=True)]
        return clients, report._replace(update_norm=length), left_out

    def _numbers(self, clients: list[ClientResult]) -> Tensor:
        return torch.tensor([each.client for each in clients], device=self.lowest.device)

    def _remember(
        self,
        algorithm: MemoryAlgorithm[Any, Any],
        clients: list[ClientResult],
        report: Report,
        usable: Tensor,
    ) -> None:
        """Updates the clients' memories."""
        update, numbers = _together(clients).clone(), self._numbers(clients)
        shared = self.shared().to(update.dtype) if algorithm.local.shared else 0.0
        memory = partial(self.memories.take, self.r, numbers)
        change = changed(algorithm.memory.change(report), memory, shared, update, usable)
        self.memories.add(self.r, numbers, change)
        assert self.change is not None
        self.change += change.sum(0, dtype=torch.float64) if len(change) > 1 else change[0]


def _together(clients: list[ClientResult]) -> Tensor:
    """The updates (n, P)."""
    return clients[0].update[None] if len(clients) == 1 else torch.stack([each.update for each in clients])


def outcome(tallies: list[RunTotals], more: dict[int, Tensor]) -> RoundSums:
    """The sums of all runs; `more` are the mean gradients of those that have them."""
    total = torch.stack([tally.total.flush() for tally in tallies])
    used, left_out, lowest = (
        torch.stack([getattr(tally, name) for tally in tallies]) for name in ("used", "left_out", "lowest")
    )
    changes = {tally.r: tally.change for tally in tallies if tally.change is not None}
    held = {tally.r: tally.held for tally in tallies if tally.held is not None}
    return RoundSums(total, [tally.sums for tally in tallies], used, left_out, lowest, more | changes, held)
