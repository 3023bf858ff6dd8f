"""Algorithms of the kinds that users write, beyond those of the registry."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairwind import algorithms
from fairwind.contract import (
    AnyAlgorithm,
    Cohort,
    CohortAlgorithm,
    GramAlgorithm,
    Local,
    LocalAlgorithm,
    Stateless,
)


class Seen(NamedTuple):
    loss: Tensor  # (K,) of each client, when it was last seen


def worst_first() -> AnyAlgorithm:
    """Clients weigh by how much larger their loss is than the least, and the server keeps all losses."""

    def init(x: Tensor, clients: int) -> Seen:
        return Seen(torch.zeros(clients, dtype=torch.float64, device=x.device))

    def weigh(s: Seen, cohort: Cohort) -> tuple[Tensor, Seen]:
        loss = cohort.report.loss
        weight = loss - loss.min() + 0.1
        return weight / weight.sum(), Seen(s.loss.index_copy(0, cohort.client, loss))

    def server(x: Tensor, s: Seen, total: Tensor) -> tuple[Tensor, Seen]:
        return x - total, s

    return CohortAlgorithm(init, weigh, server, "loss")


def by_angle() -> AnyAlgorithm:
    """Clients weigh by the inner product of their update with the mean update."""

    def init(x: Tensor, clients: int) -> Seen:
        return Seen(torch.zeros(clients, dtype=torch.float64, device=x.device))

    def weigh(s: Seen, cohort: Cohort, gram: Tensor) -> tuple[Tensor, Seen]:
        weight = gram.mean(1).abs() / gram.diagonal().sqrt().clamp(min=1e-9)
        return weight / weight.sum(), s

    def server(x: Tensor, s: Seen, total: Tensor) -> tuple[Tensor, Seen]:
        return x - total, s

    return GramAlgorithm(init, weigh, server, "none")


def scaled() -> AnyAlgorithm:
    """Steps that shrink with the batch's loss, are pulled back, and follow the server's last move."""
    mean = algorithms.fedavg()
    local: Local[Seen] = Local(lambda loss: 1 / (1 + loss), 0.3, lambda s: s.loss)

    def server(x: Tensor, s: Seen, total: Tensor, sums: Any) -> tuple[Tensor, Seen]:
        new, _ = mean.server(x, Stateless(), total, sums)
        return new, Seen(0.1 * (x - new))

    return LocalAlgorithm(lambda x: Seen(torch.zeros_like(x)), mean.client, server, "none", local)


def measured() -> AnyAlgorithm:
    """FedAvg whose clients measure loss and gradient, of which it makes nothing."""
    return algorithms.fedavg(size=1.0)._replace(probe="gradient")


OWN: dict[str, Callable[[], AnyAlgorithm]] = {
    "worst_first": worst_first,
    "by_angle": by_angle,
    "scaled": scaled,
    "measured": measured,
}


def built(name: str) -> AnyAlgorithm:
    """One of these, or of the registry."""
    return OWN[name]() if name in OWN else algorithms.build(name)
