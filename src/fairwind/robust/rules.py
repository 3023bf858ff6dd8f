"""Robust means of K clients' vectors (K, P), weighted by w (K,): pure functions, in float64.

With equal weights each is the rule of its paper.
"""

import torch
from torch import Tensor

HALF = 0.5 - 1e-6  # of the weight is cut off on either side for a median: what is left is its middle
COLUMNS = 1 << 16  # sorted at once
STEPS, CLOSE = 100, 1e-10  # of the geometric median: how many, and the relative change at which they end
NEAR = 1e-9  # the relative distance below which a vector pulls no harder


def mean(d: Tensor, w: Tensor) -> Tensor:
    """The weighted mean (P,)."""
    return (w / w.sum()) @ d


def trimmed_mean(d: Tensor, w: Tensor, cut: float) -> Tensor:
    """Of each coordinate, without the share `cut` of the weight at either end.

    Yin, Chen, Kannan, Bartlett: Byzantine-Robust Distributed Learning. ICML 2018.
    """
    blocks = torch.split(d, max(1, COLUMNS // len(d)), dim=1)
    return torch.cat([_trimmed(block, w / w.sum(), cut) for block in blocks])


def _trimmed(d: Tensor, share: Tensor, cut: float) -> Tensor:
    values, order = d.sort(0)
    upper = share[order].cumsum(0)  # (K, P), to 1
    lower = torch.cat([torch.zeros_like(upper[:1]), upper[:-1]])
    kept = (upper.clamp(max=1 - cut) - lower.clamp(min=cut)).clamp(min=0)
    return (kept * values).sum(0) / kept.sum(0)


def median(d: Tensor, w: Tensor) -> Tensor:
    """Of each coordinate; the mean of the middle two where half of the weight lies on either side."""
    return trimmed_mean(d, w, HALF)


def multikrum(d: Tensor, w: Tensor, liars: int, keep: int) -> Tensor:
    """The weighted mean of the `keep` vectors that are closest to their nearest K − liars − 2 others.

    Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries. NeurIPS 2017.
    """
    nearest = max(1, len(d) - liars - 2)
    squares = torch.stack([(d - row).square().sum(1) for row in d])
    scores = squares.sort(1).values[:, 1 : nearest + 1].sum(1)
    chosen = torch.argsort(scores, stable=True)[: max(1, keep)]
    return mean(d[chosen], w[chosen])


def geometric_median(d: Tensor, w: Tensor) -> Tensor:
    """The point with the least weighted sum of distances, by Weiszfeld's smoothed steps.

    Pillutla, Kakade, Harchaoui: Robust Aggregation for Federated Learning. IEEE TSP 2022.
    """
    found = median(d, w)
    scale = float(torch.linalg.vector_norm(d - found, dim=1).median())
    if not scale:
        return found
    for _ in range(STEPS):
        distance = torch.linalg.vector_norm(d - found, dim=1)
        before, found = found, mean(d, w / distance.clamp(min=NEAR * scale))
        if torch.linalg.vector_norm(found - before) <= CLOSE * scale:
            break
    return found


def centred_clipping(d: Tensor, w: Tensor, centre: Tensor) -> Tensor:
    """The centre (P,), and the weighted mean of the differences from it, clipped to their median length.

    Karimireddy, He, Jaggi: Learning from History for Byzantine Robust Optimization. ICML 2021. Its clipping
    length is a constant; the median of the lengths needs no tuning.
    """
    away = d - centre
    length = torch.linalg.vector_norm(away, dim=1)
    top = length.median()
    shorter = torch.where(length > top, top / length, 1.0)
    return centre + mean(away * shorter[:, None], w)
