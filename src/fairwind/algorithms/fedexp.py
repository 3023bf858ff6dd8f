"""FedAvg with a larger server step, the more the clients' updates differ.

Jhunjhunwala, Wang, Joshi: FedExP: Speeding Up Federated Averaging via Extrapolation. ICLR 2023, Algorithm 1.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.algorithms.ranges import Size
from fairwind.contract import Algorithm, Contribution, Report
from fairwind.errors import in_range, positive


class Sums(NamedTuple):
    size: Tensor  # ΣS
    squares: Tensor  # ΣS·‖δ‖²


class State(NamedTuple):
    server_lr: Tensor  # η_g of the last round


def fedexp(*, eps: float = 1e-3, size: Size = 1.0) -> Algorithm[State, Sums]:
    """FedExP; a larger `eps` keeps the server's learning rate closer to 1, which is FedAvg."""
    positive(eps=eps)
    in_range(0, math.inf, size=size)

    def init(x: Tensor) -> State:
        return State(torch.ones((), dtype=torch.float64, device=x.device))

    def client(r: Report) -> Contribution[Sums]:
        weight = r.size**size
        return Contribution(weight, Sums(weight, weight * r.update_norm**2))

    def server(x: Tensor, s: State, total: Tensor, sums: Sums) -> tuple[Tensor, State]:
        mean = total / sums.size  # Δ̄
        spread = sums.squares / sums.size  # (1/M)·Σ‖Δ_i‖², weighted by size
        lr = (spread / (2 * (mean.square().sum() + eps))).clamp(min=1)  # η_g
        return x - lr * mean, State(lr)

    return Algorithm(init, client, server, probe="none")
