"""Control variates correct each client's steps by how its gradients differ from the mean gradient.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning. ICML 2020, Algorithm 1 with option II.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.algorithms.ranges import ServerRate
from fairwind.contract import Change, Contribution, Local, Memory, MemoryAlgorithm, Report
from fairwind.errors import in_range


class Sums(NamedTuple):
    clients: Tensor  # |S|


class State(NamedTuple):
    c: Tensor  # (P,) the mean of all clients' c_k
    clients: Tensor  # N


def scaffold(*, lr: ServerRate = 1.0) -> MemoryAlgorithm[State, Sums]:
    """SCAFFOLD; clients are weighted equally, and `lr` is the server's learning rate."""
    in_range(0, math.inf, lr=lr)

    def init(x: Tensor, clients: int) -> State:
        return State(torch.zeros_like(x), torch.tensor(float(clients), dtype=torch.float64, device=x.device))

    def client(r: Report) -> Contribution[Sums]:
        one = torch.ones_like(r.size)
        return Contribution(one, Sums(one))

    def change(r: Report) -> Change:
        return Change(shared=-1.0, update=1 / (r.steps * r.lr))  # c_k⁺ − c_k = −c + δ/(τη)

    def server(x: Tensor, s: State, total: Tensor, sums: Sums, changes: Tensor) -> tuple[Tensor, State]:
        return x - lr * total / sums.clients, s._replace(c=s.c + changes / s.clients)

    local: Local[State] = Local(shared=lambda s: s.c)  # u = c − c_k
    return MemoryAlgorithm(init, client, server, "none", local, Memory(-1.0, change))
