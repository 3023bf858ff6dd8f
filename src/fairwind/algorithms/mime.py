"""Local steps with the server's momentum, which is fixed during a round.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: Breaking the Centralized Barrier for Cross-Device
Federated Learning. NeurIPS 2021, Algorithm 1 with SGD with momentum.
"""

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fairwind.algorithms.fedavg import Sums, fedavg
from fairwind.algorithms.ranges import Range, ServerRate
from fairwind.contract import GradientAlgorithm, Local
from fairwind.errors import in_range


class State(NamedTuple):
    m: Tensor  # (P,) momentum


def mimelite(
    *, beta: Annotated[float, Range(0.0, 0.99, log=False)] = 0.9, lr: ServerRate = 1.0
) -> GradientAlgorithm[State, Sums]:
    """MimeLite: local steps use (1 − β)·g + β·m; then m moves towards the clients' mean full gradient."""
    return _mime(beta, lr, corrected=False)


def mime(
    *, beta: Annotated[float, Range(0.0, 0.99, log=False)] = 0.9, lr: ServerRate = 1.0
) -> GradientAlgorithm[State, Sums]:
    """Mime: the same, with g corrected to g(y) − g(x) + the mean full gradient, as in SVRG."""
    return _mime(beta, lr, corrected=True)


def _mime(beta: float, lr: float, *, corrected: bool) -> GradientAlgorithm[State, Sums]:
    in_range(0, 1, beta=beta)
    in_range(0, math.inf, lr=lr)
    mean = fedavg(lr=lr)

    def init(x: Tensor) -> State:
        return State(torch.zeros_like(x))

    def server(x: Tensor, s: State, total: Tensor, sums: Sums, gradient: Tensor) -> tuple[Tensor, State]:
        new_x, _ = mean.server(x, mean.init(x), total, sums)
        return new_x, State(beta * s.m + (1 - beta) * gradient)

    local: Local[State] = Local(scale=1 - beta, shared=lambda s: beta * s.m)
    return GradientAlgorithm(init, mean.client, server, local, corrected)
