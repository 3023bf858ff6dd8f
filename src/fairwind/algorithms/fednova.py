"""Updates normalised by their number of local steps, so that more steps do not mean more weight.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization. NeurIPS 2020.
"""

import math
from typing import NamedTuple

from torch import Tensor

from fairwind.algorithms.ranges import ServerRate, Size
from fairwind.contract import Algorithm, Contribution, Report, Stateless
from fairwind.errors import in_range


class Sums(NamedTuple):
    size: Tensor  # ΣS
    steps: Tensor  # ΣS·τ


def fednova(*, size: Size = 1.0, lr: ServerRate = 1.0) -> Algorithm[Stateless, Sums]:
    """FedNova with τ_eff = Σ p_k τ_k; with momentum τ is ‖a‖₁, which the solver reports.

    `lr` is the server's learning rate; the paper's is 1.
    """
    in_range(0, math.inf, size=size, lr=lr)

    def client(r: Report) -> Contribution[Sums]:
        weight = r.size**size
        return Contribution(weight / r.steps, Sums(weight, weight * r.steps))

    def server(x: Tensor, state: Stateless, total: Tensor, sums: Sums) -> tuple[Tensor, Stateless]:
        effective = sums.steps / sums.size  # τ_eff
        return x - lr * effective * total / sums.size, state

    return Algorithm(lambda _: Stateless(), client, server, probe="none")
