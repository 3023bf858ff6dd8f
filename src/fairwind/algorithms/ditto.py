"""FedAvg, and a personal model for each client that is pulled towards the global one.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization.
ICML 2021, Algorithm 1.
"""

import math

from fairwind.algorithms.fedavg import Sums, fedavg
from fairwind.algorithms.ranges import ServerRate, Size
from fairwind.contract import PersonalAlgorithm, Stateless
from fairwind.errors import in_range


def ditto(*, lam: float = 1.0, size: Size = 1.0, lr: ServerRate = 1.0) -> PersonalAlgorithm[Stateless, Sums]:
    """Ditto with its λ; the global model is FedAvg's, and personal ones start at the first global one.

    With λ = 0 clients train alone; a larger λ keeps them closer to the global model.
    """
    in_range(0, math.inf, lam=lam)
    mean = fedavg(size=size, lr=lr)
    return PersonalAlgorithm(mean.init, mean.client, mean.server, mean.probe, pull=lam)
