"""The updates of a round, held for servers that see all clients before they weigh them."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from fairwind.aggregation import usable_clients
from fairwind.contract import Cohort, Report, SeeingAlgorithm
from fairwind.engine.precision import products


class Held:
    """Reports and updates of one run's clients, as they come."""

    def __init__(self, algorithm: SeeingAlgorithm, from_matrices: Callable[[list[Tensor]], Tensor]):
        """`from_matrices` turns the matrices that updates are given as into vectors (n, P)."""
        self.algorithm, self.from_matrices = algorithm, from_matrices
        self.reports: list[Report] = []
        self.clients: list[Tensor] = []
        self.updates: list[list[Tensor]] = []  # of each addition, matrices (n, ·) that make up δ

    def add(self, report: Report, client: Tensor, update: list[Tensor]) -> None:
        self.reports.append(report)
        self.clients.append(client)
        self.updates.append(update)

    @cached_property
    def _usable(self) -> tuple[Tensor, Tensor]:
        """Which of the rows count, ordered by client; and which of all rows are usable."""
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

    def gram(self) -> Tensor:
        """Inner products of the usable clients' updates (n, n), in float64."""
        rows, usable = self._usable
        masks = torch.split(usable, [len(client) for client in self.clients])
        for update, mask in zip(self.updates, masks, strict=True):
            for matrix in update:
                matrix.masked_fill_(~mask[:, None], 0)
        with products("float32", rows.device):
            blocks = [[_product(a, b) for b in self.updates] for a in self.updates]
        whole = torch.cat([torch.cat(row, dim=1) for row in blocks])
        return whole[rows][:, rows]

    def summed(self, coef: Tensor) -> Tensor:
        """Σcoef·δ (P,) of the usable clients, in float64."""
        rows, usable = self._usable
        weights = coef.new_zeros(len(usable), dtype=torch.float64)
        weights[rows] = coef.double()
        scale = weights.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
        sizes = [len(client) for client in self.clients]
        parts = torch.split(weights / scale, sizes), torch.split(usable, sizes)
        total = [torch.zeros_like(matrix[0], dtype=torch.float64) for matrix in self.updates[0]]
        with products("float32", rows.device):
            for update, part, mask in zip(self.updates, *parts, strict=True):
                for sum_, matrix in zip(total, update, strict=True):
                    sum_ += part.to(matrix.dtype) @ matrix.masked_fill_(~mask[:, None], 0)
        return self.from_matrices([scale * each[None] for each in total])[0]


def _product(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return torch.stack([(one @ other.mT).double() for one, other in zip(a, b, strict=True)]).sum(0)
