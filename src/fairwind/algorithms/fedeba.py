"""Clients are weighted by e^{F/τ}, the weights of largest entropy for a given mean loss.

Wang, Wang, Karimireddy, Tang: FedEBA+: Towards Fair and Effective Federated Learning via Entropy-Based Model.
arXiv 2301.12407: its aggregation alone, without the alignment of gradients and models.
"""

import math

import torch

from fairwind.algorithms.term import Sums, term, tilt
from fairwind.contract import Algorithm, Contribution, Report, Stateless
from fairwind.errors import in_range, positive


def fedeba(*, tau: float = 0.1, sized: bool = False, lr: float = 1.0) -> Algorithm[Stateless, Sums]:
    """FedEBA+'s aggregation; with `sized`, weights are multiplied by the clients' sizes.

    Losses are clamped to ±600·τ. `lr` is the server's learning rate.
    """
    positive(tau=tau)
    in_range(0, math.inf, lr=lr)
    tilted = term(t=1 / tau, lr=lr)

    def client(r: Report) -> Contribution[Sums]:
        weight = (r.size if sized else torch.ones_like(r.size)) * tilt(1 / tau, r.loss)
        return Contribution(weight, Sums(weight))

    return tilted._replace(client=client)
