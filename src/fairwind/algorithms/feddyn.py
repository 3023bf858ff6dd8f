"""Dynamic regularization of each client's loss, which aligns local optima with the global one.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic Regularization.
ICLR 2021, Algorithm 1.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fairwind.algorithms.ranges import Range
from fairwind.contract import Change, Contribution, Local, Memory, MemoryAlgorithm, Report
from fairwind.errors import positive


class Sums(NamedTuple):
    clients: Tensor  # |P_t|


class State(NamedTuple):
    h: Tensor  # (P,) the mean of all clients' g_k
    clients: Tensor  # m


def feddyn(*, alpha: Annotated[float, Range(1e-3, 1.0)] = 0.01) -> MemoryAlgorithm[State, Sums]:
    """FedDyn; clients are weighted equally. A larger α keeps them closer to the global model."""
    positive(alpha=alpha)

    def init(x: Tensor, clients: int) -> State:
        return State(torch.zeros_like(x), torch.tensor(float(clients), dtype=torch.float64, device=x.device))

    def client(r: Report) -> Contribution[Sums]:
        one = torch.ones_like(r.size)
        return Contribution(one, Sums(one))

    def change(r: Report) -> Change:
        return Change(update=alpha)  # g_k⁺ = g_k − α(θ_k − θ), where θ_k − θ = −δ

    def server(x: Tensor, s: State, total: Tensor, sums: Sums, changes: Tensor) -> tuple[Tensor, State]:
        h = s.h + changes / s.clients
        return x - total / sums.clients - h / alpha, s._replace(h=h)

    local: Local[State] = Local(pull=alpha)  # of the step down ∇L_k(θ) − g_k + α(θ − θ^{t−1})
    return MemoryAlgorithm(init, client, server, "none", local, Memory(-1.0, change))
