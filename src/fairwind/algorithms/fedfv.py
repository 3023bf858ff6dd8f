"""Updates with conflicting directions are projected until they agree, then averaged.

Wang, Fan, Qi, Wen, Wang, Yu: Federated Learning with Fair Averaging. IJCAI 2021, Algorithms 1 and 2.
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from fairwind.algorithms.ranges import Range, ServerRate
from fairwind.contract import Cohort, GramAlgorithm, Stateless
from fairwind.errors import in_range

CANCELLED = 1e-5  # a direction this much shorter than its parts is rounding error


def fedfv(
    *, alpha: Annotated[float, Range(0.0, 0.9, log=False)] = 0.1, lr: ServerRate = 1.0
) -> GramAlgorithm[Stateless]:
    """FedFV with τ = 1; the share `alpha` of clients with the largest losses keep their updates."""
    in_range(0, 1, alpha=alpha)
    in_range(0, math.inf, lr=lr)

    def weigh(s: Stateless, cohort: Cohort, gram: Tensor) -> tuple[Tensor, Stateless]:
        coef = _projected(alpha, cohort.report.loss, gram).mean(0)  # of δ₁, δ₂, … in g
        against = (gram @ coef < 0).to(gram.dtype)  # conflicts that remain
        dot = against @ gram @ coef
        coef = coef - torch.where(dot < 0, dot / (against @ gram @ against), 0) * against
        length = (coef @ gram @ coef).clamp(min=0).sqrt()
        left = length > CANCELLED * (coef.abs() @ gram.diagonal().sqrt())
        mean = gram.mean().clamp(min=0).sqrt()  # ‖mean δ‖
        return torch.where(left, coef * mean / length, 0), s

    def server(x: Tensor, s: Stateless, total: Tensor) -> tuple[Tensor, Stateless]:
        return x - lr * total, s

    return GramAlgorithm(lambda x, clients: Stateless(), weigh, server, "loss")


def _projected(alpha: float, loss: Tensor, gram: Tensor) -> Tensor:
    """Each client's projected update, as coefficients of all clients' updates (n, n)."""
    order, n = loss.argsort(stable=True), len(loss)
    kept = torch.zeros_like(loss, dtype=torch.bool)
    if alpha > 0:
        kept[order[math.ceil(round((n - 1) * (1 - alpha), 9)) :]] = True
    coefs = torch.eye(n, dtype=gram.dtype, device=gram.device)
    for j in order.tolist():
        dot = coefs @ gram[j]  # of each with δ_j
        against = (dot < 0) & ~kept
        against[j] = False
        coefs[:, j] -= torch.where(against, dot / gram[j, j], 0)
    return coefs
