"""FedAvg with momentum on the server.

Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification. arXiv 1909.06335, 2019: FedAvgM. SlowMo (Wang, Tantia, Ballas, Rabbat, ICLR 2020, Algorithm 1)
takes the same steps if the local learning rate is constant.
"""

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fairwind.algorithms.fedavg import Sums, fedavg
from fairwind.algorithms.ranges import Range, ServerRate, Size
from fairwind.contract import Algorithm
from fairwind.errors import in_range


class State(NamedTuple):
    v: Tensor  # (P,) momentum


def fedavgm(
    *, beta: Annotated[float, Range(0.0, 0.99, log=False)] = 0.9, size: Size = 1.0, lr: ServerRate = 1.0
) -> Algorithm[State, Sums]:
    """FedAvgM with server learning rate `lr`; β = 0 is FedAvg."""
    in_range(0, 1, beta=beta)
    in_range(0, math.inf, lr=lr)

    def init(x: Tensor) -> State:
        return State(torch.zeros_like(x))

    def server(x: Tensor, s: State, total: Tensor, sums: Sums) -> tuple[Tensor, State]:
        v = beta * s.v + total / sums.size  # v ← βv + Δ
        return x - lr * v, State(v)

    return Algorithm(init, fedavg(size=size).client, server, probe="none")
