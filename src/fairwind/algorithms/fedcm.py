"""Local steps that mix the gradient with the clients' mean direction of the last round.

Xu, Wang, Wang, Yao: FedCM: Federated Learning with Client-level Momentum. arXiv 2106.10874, 2021.
"""

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fairwind.algorithms.ranges import Range, ServerRate, Size
from fairwind.contract import Contribution, Local, LocalAlgorithm, Report
from fairwind.errors import InputError, in_range, positive


class Sums(NamedTuple):
    size: Tensor  # ΣS
    travelled: Tensor  # ΣS·τ·η


class State(NamedTuple):
    direction: Tensor  # (P,) Δ_t: the mean direction of the last round's steps


def fedcm(
    *, alpha: Annotated[float, Range(0.05, 1.0)] = 0.1, size: Size = 1.0, lr: ServerRate = 1.0
) -> LocalAlgorithm[State, Sums]:
    """FedCM with server learning rate `lr`; α is the gradient's share of a step, and α = 1 is FedAvg."""
    positive(alpha=alpha)
    if alpha > 1:
        raise InputError(f"alpha={alpha} is out of range: 0 < alpha ≤ 1")
    in_range(0, math.inf, size=size, lr=lr)

    def init(x: Tensor) -> State:
        return State(torch.zeros_like(x))

    def client(r: Report) -> Contribution[Sums]:
        weight = r.size**size
        return Contribution(weight, Sums(weight, weight * r.steps * r.lr))

    def server(x: Tensor, s: State, total: Tensor, sums: Sums) -> tuple[Tensor, State]:
        return x - lr * total / sums.size, State(total / sums.travelled)

    local: Local[State] = Local(scale=alpha, shared=lambda s: (1 - alpha) * s.direction)  # αg + (1 − α)Δ
    return LocalAlgorithm(init, client, server, "none", local)
