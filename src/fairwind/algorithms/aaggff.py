"""The server learns clients' weights by online portfolio selection, with losses as returns.

Hahn, Kim, Lee: Pursuing Overall Welfare in Federated Learning through Sequential Decision Making.
ICML 2024, Algorithms 2 (AAggFF-S, all clients in each round) and 3 (AAggFF-D, some).
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fairwind.algorithms.ranges import ServerRate
from fairwind.algorithms.simplex import least
from fairwind.contract import Cohort, CohortAlgorithm, nonnegative
from fairwind.errors import in_range, unknown

Form = Literal["silo", "device"]
Cdf = Literal["weibull", "exponential", "frechet", "normal", "gumbel", "logistic"]

CDFS: dict[Cdf, Callable[[Tensor], Tensor]] = {
    "weibull": lambda v: 1 - torch.exp(-(v**2)),
    "exponential": lambda v: 1 - torch.exp(-v),
    "frechet": lambda v: torch.exp(-1 / v),
    "normal": lambda v: (1 + torch.erf((v - 1) / math.sqrt(2))) / 2,
    "gumbel": lambda v: torch.exp(-torch.exp(1 - v)),
    "logistic": lambda v: torch.sigmoid(v - 1),
}


class State(NamedTuple):
    p: Tensor  # (K,) the weights decided last
    linear: Tensor  # (K,) linear term of the next decision: Σg; with −β·⟨g, p⟩·g for "silo"
    square: Tensor  # (K, K) Σg·gᵀ for "silo", else (0, 0)
    rounds: Tensor


def aaggff(*, form: Form = "silo", cdf: Cdf = "weibull", lr: ServerRate = 1.0) -> CohortAlgorithm[State]:
    """AAggFF: weights by online Newton steps ("silo"), or by linearised FTRL for sampled clients ("device").

    `cdf` turns losses, as multiples of their mean, into returns between 0 and 1.
    """
    if form not in get_args(Form):
        raise unknown("form", form, get_args(Form))
    if cdf not in CDFS:
        raise unknown("cdf", cdf, CDFS)
    in_range(0, math.inf, lr=lr)
    decide = _newton if form == "silo" else _leader

    def init(x: Tensor, clients: int) -> State:
        zero = torch.zeros(clients, dtype=torch.float64, device=x.device)
        kept = clients if form == "silo" else 0
        return State(zero + 1 / clients, zero, zero.new_zeros(kept, kept), zero.new_zeros(()))

    def weigh(s: State, cohort: Cohort) -> tuple[Tensor, State]:
        loss = nonnegative(cohort.report.loss.double())
        multiple = loss / torch.where(loss.max() > 0, loss.max(), 1)
        mean = multiple.mean()
        returns = CDFS[cdf](torch.where(mean == 0, 1, multiple / mean))
        new = decide(s, cohort.client, returns)
        present = new.p[cohort.client]
        return present / present.sum(), new

    def server(x: Tensor, s: State, total: Tensor) -> tuple[Tensor, State]:
        return x - lr * total, s

    return CohortAlgorithm(init, weigh, server, "loss")


def _newton(s: State, client: Tensor, returns: Tensor) -> State:
    """Minimises Σ⟨g, p⟩ + α/2·‖p‖² + β/2·Σ⟨g, p − p_τ⟩²; absent clients' returns are the others' mean."""
    clients = len(s.p)
    bound = 1 / clients  # L∞, of returns and gradients
    alpha, beta = 4 * clients * bound, 1 / (4 * bound)
    r = (returns.mean() * bound).expand_as(s.p).index_copy(0, client, returns * bound)
    g = -r / (1 + s.p @ r)
    linear = s.linear + g - beta * (g @ s.p) * g
    square = s.square + torch.outer(g, g)
    uniform = torch.full_like(s.p, bound)
    quadratic = alpha * torch.eye(clients, dtype=g.dtype, device=g.device) + beta * square
    p = least(quadratic, linear, torch.zeros_like(g), torch.full_like(g, 2), uniform)
    return State(p, linear, square, s.rounds + 1)


def _leader(s: State, client: Tensor, returns: Tensor) -> State:
    """Minimises Σ⟨g, p⟩ + L∞·√(t + 1)/√log K·Σp·log p, with g from doubly robust returns.

    The gradient is that of −log(1 + ⟨p, r⟩), linearised around the mean return. A part that is the same for
    all clients is omitted: it does not change p.
    """
    clients = len(s.p)
    share = len(client) / clients  # C, the share of sampled clients
    r = returns * share
    mean = r.mean()
    robust = mean.expand_as(s.p).index_copy(0, client, mean + (r - mean) / share)
    linear = s.linear - robust / (1 + mean)
    rounds = s.rounds + 1
    bound = 2 + share  # L∞
    rate = math.sqrt(math.log(clients)) / (bound * torch.sqrt(rounds + 1))
    return State(torch.softmax(-rate * linear, 0), linear, s.square, rounds)
