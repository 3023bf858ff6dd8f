"""Clients are weighted by F^q; the step adapts through an estimated Lipschitz constant.

Li, Sanjabi, Beirami, Smith: Fair Resource Allocation in Federated Learning. ICLR 2020, Algorithm 2.
"""

import math
from typing import Annotated, NamedTuple

from torch import Tensor

from fairwind.algorithms.ranges import Range
from fairwind.contract import Algorithm, Contribution, Report, Stateless, nonnegative
from fairwind.errors import in_range


class Sums(NamedTuple):
    h: Tensor  # Σh


def qfedavg(
    *, q: Annotated[float, Range(0.0, 5.0, log=False)] = 1.0, lr: Annotated[float, Range(0.1, 100.0)] = 1.0
) -> Algorithm[Stateless, Sums]:
    """q-FedAvg; q = 0 with the paper's `lr` of 1 is the unweighted mean of the clients' models."""
    in_range(0, math.inf, q=q, lr=lr)

    def client(r: Report) -> Contribution[Sums]:
        loss = nonnegative(r.loss) + 1e-10  # F, made positive as the authors do, for q < 1
        lipschitz = 1 / r.lr  # L
        coef = lipschitz * loss**q
        h = q * loss ** (q - 1) * (lipschitz * r.update_norm) ** 2 + coef
        return Contribution(coef, Sums(h))

    def server(x: Tensor, state: Stateless, total: Tensor, sums: Sums) -> tuple[Tensor, Stateless]:
        return x - lr * total / sums.h, state

    return Algorithm(lambda _: Stateless(), client, server, probe="loss")
