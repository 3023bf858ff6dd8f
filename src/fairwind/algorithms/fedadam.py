"""Adaptive server optimisers on the size-weighted mean update: FedAdam, FedYogi, FedAdagrad.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated Optimization.
ICLR 2021, Algorithm 2.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.algorithms.ranges import AdaptiveRate, Size
from fairwind.contract import Algorithm, Contribution, Report
from fairwind.errors import in_range, positive


class Sums(NamedTuple):
    size: Tensor  # ΣS


class Moments(NamedTuple):
    m: Tensor  # (P,)
    v: Tensor  # (P,)
    product1: Tensor  # β₁^t
    product2: Tensor  # β₂^t


def fedadam(
    *,
    lr: AdaptiveRate = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    corrected: bool = True,
    size: Size = 1.0,
) -> Algorithm[Moments, Sums]:
    """FedAdam with Adam's usual defaults, as in the AdaFedAdam paper.

    `corrected=False` is Reddi et al.'s form: no bias correction, and v₀ = ε² (they use β₂ 0.99, ε 1e-3).
    """
    in_range(0, 1, beta2=beta2)

    def second(v: Tensor, g: Tensor) -> Tensor:
        return beta2 * v + (1 - beta2) * g**2

    return _family(second, lr, beta1, beta2 if corrected else None, eps, size)


def fedyogi(
    *, lr: AdaptiveRate = 1e-2, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-3, size: Size = 1.0
) -> Algorithm[Moments, Sums]:
    """FedYogi: the second moment changes by a bounded amount. Reddi et al. tune `lr` for each task."""
    in_range(0, 1, beta2=beta2)

    def second(v: Tensor, g: Tensor) -> Tensor:
        return v - (1 - beta2) * g**2 * torch.sign(v - g**2)

    return _family(second, lr, beta1, None, eps, size)


def fedadagrad(
    *, lr: AdaptiveRate = 1e-2, beta1: float = 0.0, eps: float = 1e-3, size: Size = 1.0
) -> Algorithm[Moments, Sums]:
    """FedAdagrad: the second moment only grows. Reddi et al. tune `lr` for each task."""
    return _family(lambda v, g: v + g**2, lr, beta1, None, eps, size)


def _family(
    second: Callable[[Tensor, Tensor], Tensor],
    lr: float,
    beta1: float,
    corrected: float | None,
    eps: float,
    size: float,
) -> Algorithm[Moments, Sums]:
    """`corrected` is β₂ where both moments are bias-corrected, None where neither is and v₀ = ε²."""
    in_range(0, math.inf, lr=lr, size=size)
    in_range(0, 1, beta1=beta1)
    positive(eps=eps)
    in_range(0, 1e15, eps=eps)  # whose square a float32 can hold

    def init(x: Tensor) -> Moments:
        one = torch.ones((), dtype=torch.float64, device=x.device)
        v = torch.zeros_like(x) if corrected else torch.full_like(x, eps**2)
        return Moments(torch.zeros_like(x), v, one, one)

    def client(r: Report) -> Contribution[Sums]:
        weight = r.size**size
        return Contribution(weight, Sums(weight))

    def server(x: Tensor, s: Moments, total: Tensor, sums: Sums) -> tuple[Tensor, Moments]:
        g = total / sums.size
        m = beta1 * s.m + (1 - beta1) * g
        v = second(s.v, g)
        if corrected is None:
            return x - lr * m / (v.sqrt() + eps), Moments(m, v, s.product1, s.product2)
        product1, product2 = s.product1 * beta1, s.product2 * corrected
        step = lr * (m / (1 - product1)) / ((v / (1 - product2)).sqrt() + eps)
        return x - step, Moments(m, v, product1, product2)

    return Algorithm(init, client, server, probe="none")
