"""The size-weighted mean of the clients' models.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks
from Decentralized Data. AISTATS 2017, Algorithm 1.
"""

import math
from typing import NamedTuple

from torch import Tensor

from fairwind.algorithms.ranges import ServerRate, Size
from fairwind.contract import Algorithm, Contribution, Report, Stateless
from fairwind.errors import in_range


class Sums(NamedTuple):
    size: Tensor  # ΣS


def fedavg(*, size: Size = 1.0, lr: ServerRate = 1.0) -> Algorithm[Stateless, Sums]:
    """FedAvg with server learning rate `lr`; 1 is the plain mean."""
    in_range(0, math.inf, size=size, lr=lr)

    def client(r: Report) -> Contribution[Sums]:
        weight = r.size**size
        return Contribution(weight, Sums(weight))

    def server(x: Tensor, state: Stateless, total: Tensor, sums: Sums) -> tuple[Tensor, Stateless]:
        return x - lr * total / sums.size, state

    return Algorithm(lambda _: Stateless(), client, server, probe="none")
