"""The simplex p ≥ 0, Σp = 1: projection onto it, and the minimum of a quadratic function on it."""

from typing import NamedTuple

import torch
from torch import Tensor

GAP = 1e-15  # tolerance of the minimum, for entries of about 1
STEPS = 60  # some 10 to 15 are needed
TINY = 1e-30


def project(v: Tensor) -> Tensor:
    """The point of the simplex nearest to v (n,)."""
    v = v - v.max()  # does not change the projection, and keeps sums of large numbers exact
    largest = v.sort(descending=True).values
    count = torch.arange(1, len(v) + 1, dtype=v.dtype, device=v.device)
    threshold = (largest.cumsum(0) - 1) / count  # if so many are above it
    return (v - threshold[(largest > threshold).sum() - 1]).clamp(min=0)


def least(quadratic: Tensor, linear: Tensor, low: Tensor, high: Tensor, start: Tensor) -> Tensor:
    """The p with Σp = 1, low ≤ p ≤ high that minimises ½·pᵀQp + c·p, from a `start` strictly inside.

    Mehrotra's interior-point method in float64, to a gap below 1e-15 of the largest entry. To make p unique,
    Q's diagonal is raised by 1e-12 of that entry, or more if Q is positive semidefinite only up to rounding.
    """
    scale = torch.maximum(quadratic.abs().max(), linear.abs().max())
    if not (torch.isfinite(scale) and (high > low).all()):
        return start + 0 * scale  # there is no room; or NaN
    scale = torch.where(scale > 0, scale, 1)
    q, c = _raised(quadratic.double() / scale), linear.double() / scale
    some = torch.full_like(start, 1 / len(start))
    at = _Point(start, some.new_zeros(()), some, some)
    for _ in range(STEPS):
        if (at.p - low) @ at.z + (high - at.p) @ at.w < GAP:
            break
        at = _step(at, q, c, low, high)
    return at.p


class _Point(NamedTuple):
    p: Tensor
    y: Tensor  # multiplier of Σp = 1
    z: Tensor  # of p ≥ low
    w: Tensor  # of p ≤ high


def _step(at: _Point, q: Tensor, c: Tensor, low: Tensor, high: Tensor) -> _Point:
    p, y, z, w = at
    s, t = (p - low).clamp(min=TINY), (high - p).clamp(min=TINY)
    factor = torch.linalg.cholesky_ex(q + torch.diag(z / s + w / t)).L
    unit = torch.cholesky_solve(torch.ones_like(p)[:, None], factor)[:, 0]

    def newton(lower: Tensor, upper: Tensor) -> _Point:
        """The step to where s·z = lower and t·w = upper, if all were linear."""
        right = y - q @ p - c + lower / s - upper / t
        dp = torch.cholesky_solve(right[:, None], factor)[:, 0]
        dy = (1 - p.sum() - dp.sum()) / unit.sum()
        dp = dp + dy * unit
        return _Point(dp, dy, (lower - z * dp) / s - z, (upper + w * dp) / t - w)

    def longest(d: _Point) -> Tensor:
        """How much of a step keeps all positive."""
        now, change = torch.cat([s, t, z, w]), torch.cat([d.p, -d.p, d.z, d.w])
        return torch.where(change < 0, -now / change, torch.inf).min().clamp(max=1)

    gap, zero = s @ z + t @ w, torch.zeros_like(p)
    d = newton(zero, zero)  # the predictor: straight to the gap's end
    a = longest(d)
    left = (s + a * d.p) @ (z + a * d.z) + (t - a * d.p) @ (w + a * d.w)
    aim = (left / gap) ** 3 * gap / (2 * len(p))
    d = newton(aim - d.p * d.z, aim + d.p * d.w)  # the corrector
    a = 0.995 * longest(d)
    return _Point(p + a * d.p, y + a * d.y, z + a * d.z, w + a * d.w)


def _raised(q: Tensor) -> Tensor:
    """q, its diagonal raised until it is positive definite."""
    ridge, one = 1e-12, torch.eye(len(q), dtype=q.dtype, device=q.device)
    while torch.linalg.cholesky_ex(q + ridge * one).info and ridge < 1:
        ridge *= 10
    return q + ridge * one
