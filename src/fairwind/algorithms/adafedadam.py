"""Normalised updates, weights by lag, and a server-side Adam whose step adapts to the certainty.

Ju, Zhang, Toor, Hellander: Accelerating Fair Federated Learning: Adaptive Federated Adam.
IEEE Transactions on Machine Learning in Communications and Networking, 2024, Algorithms 1 and 2.
"""

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fairwind.algorithms.ranges import AdaptiveRate, Range, Size
from fairwind.contract import Algorithm, Contribution, Report, nonnegative
from fairwind.errors import in_range, positive


class Sums(NamedTuple):
    weight: Tensor  # Σ S·I^α
    certainty: Tensor  # Σ S·I^α·C


class State(NamedTuple):
    m: Tensor  # (P,)
    v: Tensor  # (P,)
    product1: Tensor  # c_m, the product of all β₁ₜ
    product2: Tensor  # c_v, the product of all β₂ₜ
    rounds: Tensor
    certainty: Tensor  # C of the last round


def adafedadam(
    *,
    alpha: Annotated[float, Range(0.0, 4.0, log=False)] = 1.0,
    size: Size = 1.0,
    lr: AdaptiveRate = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    warmup: int | None = 6,
) -> Algorithm[State, Sums]:
    """AdaFedAdam; a larger `alpha` gives lagging clients more weight. Other defaults are Adam's.

    The paper's text steps by C·η, its Algorithm 1 by η, its authors' code by η for six rounds and then
    by C·η. `warmup` is that number of rounds: 0 is the text, None is Algorithm 1 as printed.
    """
    in_range(0, math.inf, alpha=alpha, size=size, lr=lr, warmup=warmup or 0)
    positive(eps=eps)
    in_range(0, 1, beta1=beta1, beta2=beta2)
    start = math.inf if warmup is None else warmup

    def init(x: Tensor) -> State:
        one = torch.ones((), dtype=torch.float64, device=x.device)
        return State(torch.zeros_like(x), torch.zeros_like(x), one, one, torch.zeros_like(one), one)

    def client(r: Report) -> Contribution[Sums]:
        # Without a gradient or an update, η′ is undefined: zero update, C = 1, and the weight counts.
        speaks = (r.grad_norm > 0) & (r.update_norm > 0)
        rate = torch.where(speaks, r.update_norm / r.grad_norm, r.lr)  # η′
        certainty = (torch.log(rate / r.lr) + 1).clamp(min=0)  # C_k; below 0 it would make β^C > 1
        lag = nonnegative(r.loss) / nonnegative(r.loss0)  # I_k
        lag = torch.where(r.loss0 == 0, 1.0, lag)  # the lag is undefined
        weight = r.size**size * lag**alpha
        return Contribution(torch.where(speaks, weight / rate, 0.0), Sums(weight, weight * certainty))

    def server(x: Tensor, s: State, total: Tensor, sums: Sums) -> tuple[Tensor, State]:
        g = total / sums.weight
        c = sums.certainty / sums.weight  # C
        beta1_t, beta2_t = beta1**c, beta2**c
        product1, product2 = s.product1 * beta1_t, s.product2 * beta2_t
        m = beta1_t * s.m + (1 - beta1_t) * g
        v = beta2_t * s.v + (1 - beta2_t) * g**2
        moves = c > 0  # with C = 0, moments (β = 1) and model do not change
        m_hat = m / torch.where(moves, 1 - product1, 1.0)
        v_hat = v / torch.where(moves, 1 - product2, 1.0)
        lr_t = lr * torch.where(s.rounds >= start, c, 1.0)  # ηₜ
        step = torch.where(moves, lr_t, 0.0) * m_hat / (v_hat.sqrt() + eps)
        return x - step, State(m, v, product1, product2, s.rounds + 1, c)

    return Algorithm(init, client, server, probe="gradient")
