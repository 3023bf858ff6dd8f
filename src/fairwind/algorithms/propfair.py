"""Local steps on −log(1 − ℓ/M) of each batch's loss ℓ, which is steeper for larger losses.

Zhang, Malekmohammadi, Chen, Yu: Proportional Fairness in Federated Learning. TMLR 2023, Algorithm 1.
"""

from typing import Annotated

import torch
from torch import Tensor

from fairwind.algorithms.fedavg import Sums, fedavg
from fairwind.algorithms.ranges import Range, ServerRate, Size
from fairwind.contract import Local, LocalAlgorithm, Stateless
from fairwind.errors import positive


def propfair(
    *, m: Annotated[float, Range(2.0, 20.0)] = 2.0, near: float = 0.2, size: Size = 1.0, lr: ServerRate = 1.0
) -> LocalAlgorithm[Stateless, Sums]:
    """PropFair with its M, an upper bound on losses; for large M its direction approaches FedAvg's.

    If M − ℓ of a batch is below `near`, its loss is ℓ/M instead.
    """
    positive(m=m, near=near)
    mean = fedavg(size=size, lr=lr)

    def scale(loss: Tensor) -> Tensor:
        """The derivative with respect to ℓ."""
        return torch.where(m - loss < near, 1 / m, 1 / (m - loss))

    return LocalAlgorithm(mean.init, mean.client, mean.server, mean.probe, Local(scale))
