"""Clients are weighted by e^{F/τ}, the weights of largest entropy for a given mean loss.

Wang, Wang, Karimireddy, Tang: FedEBA+: Towards Fair and Effective Federated Learning via Entropy-Based Model.
arXiv 2301.12407: its aggregation alone, without the alignment of gradients and models.
"""

import math
from typing import Annotated

from fairwind.algorithms.ranges import Range, ServerRate, Size
from fairwind.algorithms.term import Sums, term
from fairwind.contract import Algorithm, Stateless
from fairwind.errors import in_range, positive


def fedeba(
    *, tau: Annotated[float, Range(0.05, 10.0)] = 0.1, size: Size = 0.0, lr: ServerRate = 1.0
) -> Algorithm[Stateless, Sums]:
    """FedEBA+'s aggregation. Its weights do not depend on sizes: the size exponent is 0 by default.

    Losses are clamped to ±600·τ. `lr` is the server's learning rate.
    """
    positive(tau=tau)
    in_range(0, math.inf, lr=lr)
    return term(t=1 / tau, size=size, lr=lr)
