"""FedAvg with a proximal term that pulls clients back to the model they received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks.
MLSys 2020, Algorithm 2.
"""

import math
from typing import Annotated

from fairwind.algorithms.fedavg import Sums, fedavg
from fairwind.algorithms.ranges import Range, ServerRate, Size
from fairwind.contract import Local, LocalAlgorithm, Stateless
from fairwind.errors import in_range


def fedprox(
    *, mu: Annotated[float, Range(1e-3, 1.0)] = 0.01, size: Size = 1.0, lr: ServerRate = 1.0
) -> LocalAlgorithm[Stateless, Sums]:
    """FedProx; μ = 0 is FedAvg."""
    in_range(0, math.inf, mu=mu)
    mean = fedavg(size=size, lr=lr)
    return LocalAlgorithm(mean.init, mean.client, mean.server, mean.probe, Local(pull=mu))
