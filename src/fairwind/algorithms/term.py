"""Clients are weighted by e^{tF}: between the mean loss and the largest loss.

Li, Beirami, Sanjabi, Smith: Tilted Empirical Risk Minimization. ICLR 2021,
Algorithm 1 with clients as groups.
"""

import math
from typing import Annotated, NamedTuple

from torch import Tensor

from fairwind.algorithms.ranges import Range, ServerRate, Size
from fairwind.contract import Algorithm, Contribution, Report, Stateless
from fairwind.errors import in_range

STEEPEST = 600.0  # e^600 leaves float64 room for sums over clients


class Sums(NamedTuple):
    weight: Tensor  # ΣS·e^{tF}


def term(
    *, t: Annotated[float, Range(0.01, 10.0)] = 0.1, size: Size = 1.0, lr: ServerRate = 1.0
) -> Algorithm[Stateless, Sums]:
    """TERM: t = 0 weights by size, and a large t leaves only the client with the largest loss.

    t·F is clamped to ±600. `lr` is the server's learning rate.
    """
    in_range(0, math.inf, t=t, size=size, lr=lr)

    def client(r: Report) -> Contribution[Sums]:
        weight = r.size**size * tilt(t, r.loss)
        return Contribution(weight, Sums(weight))

    def server(x: Tensor, state: Stateless, total: Tensor, sums: Sums) -> tuple[Tensor, Stateless]:
        return x - lr * total / sums.weight, state

    return Algorithm(lambda _: Stateless(), client, server, probe="loss")


def tilt(t: float, loss: Tensor) -> Tensor:
    """e^{t·loss}, clamped so that it neither overflows nor vanishes."""
    return (t * loss.double()).clamp(-STEEPEST, STEEPEST).exp()
