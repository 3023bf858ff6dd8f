"""References for tests, by trying all cases: exact where clients are few."""

from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def minimax(centres: Floats, offsets: Floats) -> tuple[Floats, Floats, float]:
    """The w where the largest F_k(w) = ½‖w − c_k‖² + b_k is least; its mixture λ, and that loss.

    The clients whose losses are largest there have equal ones, and w = Σλc lies between their centres: for
    each set of clients that is a system of linear equations.
    """
    target = (centres**2).sum(1) / 2 + offsets
    for m in range(1, len(centres) + 1):
        for chosen in map(list, combinations(range(len(centres)), m)):
            c, one = centres[chosen], np.ones((m, 1))
            system = np.block([[c @ c.T, one], [one.T, np.zeros((1, 1))]])
            share = np.linalg.lstsq(system, np.append(target[chosen], 1), rcond=None)[0][:-1]
            w = share @ c
            losses = ((w - centres) ** 2).sum(1) / 2 + offsets
            if (
                (share >= -1e-12).all()
                and np.ptp(losses[chosen]) < 1e-9
                and losses.max() < losses[chosen].max() + 1e-9
            ):
                mixture = np.zeros(len(centres))
                mixture[chosen] = share
                return w, mixture, float(losses.max())
    raise AssertionError("every set of quadratics has a minimax point")


def least_quadratic(q: Floats, c: Floats, low: Floats, high: Floats) -> Floats:
    """The p with Σp = 1, low ≤ p ≤ high where ½·pᵀQp + c·p is least: the best of all sets of bounds held."""
    best, found = np.inf, low
    for held in product((-1, 0, 1), repeat=len(c)):
        free = np.array(held) == 0
        p = np.where(np.array(held) < 0, low, high)
        if not np.isfinite(p[~free]).all():
            continue
        m = int(free.sum())
        if m:
            one = np.ones((m, 1))
            system = np.block([[q[np.ix_(free, free)], -one], [one.T, np.zeros((1, 1))]])
            right = np.append(-c[free] - q[np.ix_(free, ~free)] @ p[~free], 1 - p[~free].sum())
            p[free] = np.linalg.lstsq(system, right, rcond=None)[0][:-1]
        inside = (p >= low - 1e-12).all() and (p <= high + 1e-12).all() and abs(p.sum() - 1) < 1e-12
        if inside and (value := p @ q @ p / 2 + c @ p) < best - 1e-15:
            best, found = float(value), p
    assert np.isfinite(best)
    return found
