"""The updates of a round, held for servers that see all clients before they weight them."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from fairwind.aggregation import usable_clients
from fairwind.contract import AnyAlgorithm, Cohort, Report
from fairwind.engine.machine import matmul_precision
from fairwind.engine.ranks import Ranks
from fairwind.engine.workers import Workers


class RoundUpdates:
    """Reports and updates of one run's clients, chunk by chunk."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        from_matrices: Callable[[list[Tensor]], Tensor],
        at_once: int,
        workers: Workers[None] | None = None,
    ):
        """`from_matrices` turns updates, given as matrices, into vectors (n, P).

        So many of their numbers are multiplied at once.
        """
        self.algorithm, self.from_matrices, self.at_once = algorithm, from_matrices, at_once
        self.workers = workers or Workers([None])
        self.reports: list[Report] = []
        self.clients: list[Tensor] = []
        self.updates: list[list[Tensor]] = []  # of each addition, matrices (n, ·) that make up δ

    def add(self, report: Report, client: Tensor, update: list[Tensor]) -> None:
        self.reports.append(report)
        self.clients.append(client)
        self.updates.append(update)

    def share(self, ranks: Ranks, clients: Tensor, model: list[Tensor]) -> None:
        """Adds what the other ranks have of a round's clients; `model` is one as matrices (1, ·)."""
        lookup = {client: place for place, client in enumerate(clients.tolist())}
        mine = torch.cat(self.clients).tolist() if self.clients else []
        place = torch.tensor([lookup[client] for client in mine], dtype=torch.int64, device=clients.device)
        report = torch.zeros(len(clients), len(Report._fields), dtype=torch.float64, device=clients.device)
        update = [matrix.new_zeros(len(clients), matrix.shape[1]) for matrix in model]
        if mine:
            report[place] = torch.stack([torch.cat(each) for each in zip(*self.reports, strict=True)], 1)
        for part, whole in enumerate(update):
            if mine:
                whole[place] = torch.cat([each[part] for each in self.updates])
            ranks.fill(whole)
        ranks.fill(report)
        self.reports, self.clients, self.updates = [Report(*report.unbind(1))], [clients], [update]

    @cached_property
    def _usable(self) -> tuple[Tensor, Tensor]:
        """The usable rows, ordered by client; and which of all rows are usable."""
        usable = torch.cat([usable_clients(self.algorithm, report) for report in self.reports])
        order = torch.argsort(torch.cat(self.clients), stable=True)
        return order[usable[order]], usable

    @property
    def left_out(self) -> int:
        return int((~self._usable[1]).sum())

    def cohort(self) -> Cohort:
        """The usable clients."""
        rows = self._usable[0]
        fields = (torch.cat(each)[rows] for each in zip(*self.reports, strict=True))
        return Cohort(torch.cat(self.clients)[rows], Report(*fields))

    def vectors(self) -> Tensor:
        """The usable clients' updates (n, P)."""
        matrices = [torch.cat(parts) for parts in zip(*self.updates, strict=True)]
        return self.from_matrices(matrices)[self._usable[0]]

    def gram(self) -> Tensor:
        """Inner products of the usable clients' updates (n, n), in float64."""
        rows, usable = self._usable
        self._mask()
        columns = max(1, self.at_once // max(1, len(usable)))
        pieces = [
            (part, begin)
            for part, matrix in enumerate(self.updates[0])
            for begin in range(0, matrix.shape[1], columns)
        ]

        @torch.no_grad()
        def work(piece: tuple[int, int], _: None) -> Tensor:
            part, begin = piece
            some = torch.cat([update[part][:, begin : begin + columns] for update in self.updates])
            return (some @ some.mT).double()

        whole = usable.new_zeros(len(usable), len(usable), dtype=torch.float64)
        with matmul_precision("float32", rows.device):
            for found in self.workers.map(work, pieces):
                whole += found
        return whole[rows][:, rows]

    def _mask(self) -> None:
        """Sets the updates of unusable clients to zero."""
        _, usable = self._usable
        if not usable.all():
            masks = torch.split(usable, [len(client) for client in self.clients])
            for update, mask in zip(self.updates, masks, strict=True):
                for matrix in update:
                    matrix.masked_fill_(~mask[:, None], 0)

    def summed(self, coef: Tensor) -> Tensor:
        """Σcoef·δ (P,) of the usable clients, in float64."""
        rows, usable = self._usable
        weights = coef.new_zeros(len(usable), dtype=torch.float64)
        weights[rows] = coef.double()
        scale = weights.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
        self._mask()
        parts = torch.split(weights / scale, [len(client) for client in self.clients])
        total = [torch.zeros_like(matrix[0], dtype=torch.float64) for matrix in self.updates[0]]

        @torch.no_grad()
        def work(given: tuple[list[Tensor], Tensor], _: None) -> list[Tensor]:
            update, part = given
            return [part.to(matrix.dtype) @ matrix for matrix in update]

        with matmul_precision("float32", rows.device):
            for found in self.workers.map(work, list(zip(self.updates, parts, strict=True))):
                for sum_, each in zip(total, found, strict=True):
                    sum_ += each
        return self.from_matrices([scale * each[None] for each in total])[0]
