"""A common descent direction: the shortest convex combination of the normalised updates.

Hu, Shaloudegi, Zhang, Yu: Federated Learning Meets Multi-Objective Optimization.
IEEE Transactions on Network Science and Engineering 2022, Algorithm 1 (FedMGDA+).
"""

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fairwind.algorithms.ranges import Range, ServerRate, Size
from fairwind.algorithms.simplex import least
from fairwind.contract import Cohort, GramAlgorithm
from fairwind.errors import in_range


class State(NamedTuple):
    lr: Tensor  # η of this round


def fedmgda(
    *,
    eps: Annotated[float, Range(0.01, 1.0)] = 0.2,
    size: Size = 0.0,
    lr: ServerRate = 1.0,
    decay: float = 1.0,
) -> GramAlgorithm[State]:
    """FedMGDA+: weights are within `eps` of λ₀, which is uniform: the size exponent is 0 by default.

    With eps ≥ 1 no client's loss increases to first order; with 0 the weights are λ₀. The server's learning
    rate is `lr`, multiplied by `decay` after each round.
    """
    in_range(0, math.inf, eps=eps, size=size, lr=lr, decay=decay)

    def init(x: Tensor, clients: int) -> State:
        return State(torch.tensor(lr, dtype=torch.float64, device=x.device))

    def weigh(s: State, cohort: Cohort, gram: Tensor) -> tuple[Tensor, State]:
        norm = gram.diagonal().sqrt()
        (moved,) = torch.nonzero(norm, as_tuple=True)  # a zero update has no direction
        coef = torch.zeros_like(norm)
        if len(moved) == 0:
            return coef, s
        norm = norm[moved]
        prior = cohort.report.size.double()[moved] ** size
        prior = prior / prior.sum()  # λ₀
        cosine = gram[moved][:, moved] / norm / norm[:, None]
        mixture = least(cosine, torch.zeros_like(norm), (prior - eps).clamp(min=0), prior + eps, prior)  # λ*
        return coef.index_copy(0, moved, mixture / norm), s

    def server(x: Tensor, s: State, total: Tensor) -> tuple[Tensor, State]:
        return x - s.lr * total, State(s.lr * decay)

    return GramAlgorithm(init, weigh, server, "none")
