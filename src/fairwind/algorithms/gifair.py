"""Clients are weighted by size and by the rank of their loss, which makes losses more equal.

Yue, Nouiehed, Al Kontar: GIFAIR-FL: A Framework for Group and Individual Fairness in Federated Learning.
INFORMS Journal on Data Science 2023, Algorithm 1 with each client as its own group.
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from fairwind.algorithms.ranges import Range, ServerRate, Size
from fairwind.contract import Cohort, CohortAlgorithm, Stateless
from fairwind.errors import in_range


def gifair(
    *, lam: Annotated[float, Range(0.0, 0.99, log=False)] = 0.1, size: Size = 1.0, lr: ServerRate = 1.0
) -> CohortAlgorithm[Stateless]:
    """GIFAIR-FL: `lam` is λ relative to the largest λ without negative weights; 0 is FedAvg."""
    in_range(0, 1, lam=lam)
    in_range(0, math.inf, size=size, lr=lr)

    def weigh(s: Stateless, cohort: Cohort) -> tuple[Tensor, Stateless]:
        weight, loss = cohort.report.size.double() ** size, cohort.report.loss
        p = weight / weight.sum()
        largest = p.min() / max(len(p) - 1, 1)  # λ_max
        return p + lam * largest * rank(loss), s

    def server(x: Tensor, s: Stateless, total: Tensor) -> tuple[Tensor, Stateless]:
        return x - lr * total, s

    return CohortAlgorithm(lambda x, clients: Stateless(), weigh, server, "loss")


def rank(loss: Tensor) -> Tensor:
    """r_k = Σ_j sign(F_k − F_j): the number of smaller losses minus the number of larger ones."""
    ordered = loss.sort().values
    below = torch.searchsorted(ordered, loss)
    return (below + torch.searchsorted(ordered, loss, right=True) - len(loss)).double()
