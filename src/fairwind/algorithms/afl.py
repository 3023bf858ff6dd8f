"""Minimax over mixtures of clients: λ ascends on their losses, the model descends on the λ-weighted loss.

Mohri, Sivek, Suresh: Agnostic Federated Learning. ICML 2019, Algorithm 1 (Stochastic-AFL).
"""

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fairwind.algorithms.ranges import Range, ServerRate
from fairwind.algorithms.simplex import project
from fairwind.contract import Cohort, CohortAlgorithm
from fairwind.errors import in_range


class State(NamedTuple):
    mixture: Tensor  # λ (K,)
    average: Tensor  # (P,) of the models after each round
    rounds: Tensor


def afl(
    *, lr_lambda: Annotated[float, Range(1e-3, 1.0)] = 0.1, lr: ServerRate = 1.0
) -> CohortAlgorithm[State]:
    """AFL with learning rates `lr_lambda` of λ and `lr` of the server; also evaluates the averaged model.

    For λ, absent clients get the mean loss of those present. Updates of those present are weighted by their
    shares of λ; if these are all 0, the model does not change.
    """
    in_range(0, math.inf, lr_lambda=lr_lambda, lr=lr)

    def init(x: Tensor, clients: int) -> State:
        mixture = torch.full((clients,), 1 / clients, dtype=torch.float64, device=x.device)
        return State(mixture, x.clone(), torch.zeros((), dtype=torch.float64, device=x.device))

    def weigh(s: State, cohort: Cohort) -> tuple[Tensor, State]:
        present = s.mixture[cohort.client]
        share = present.sum()
        loss = cohort.report.loss.double()
        loss = loss - loss.max()  # a constant changes nothing
        losses = loss.mean().expand_as(s.mixture).index_copy(0, cohort.client, loss)
        mixture = project(s.mixture + lr_lambda * losses)
        return present / torch.where(share > 0, share, 1), s._replace(mixture=mixture)

    def server(x: Tensor, s: State, total: Tensor) -> tuple[Tensor, State]:
        new, rounds = x - lr * total, s.rounds + 1
        return new, State(s.mixture, s.average + (new - s.average) / rounds, rounds)

    return CohortAlgorithm(init, weigh, server, "loss", averaged_model=lambda s: s.average)
