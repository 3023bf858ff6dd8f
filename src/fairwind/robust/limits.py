"""Limits on what one client, and several together, have in a round, relative to the median client."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

FEWEST = 3  # clients in a round; one of two has no neighbours to be compared with
FEW = 12  # to the number of clients: how many medians a quantity may be among few


class Limits(NamedTuple):
    """Of a round; `share` 1 switches off the limits on weights, infinity each of the others."""

    share: float = 0.1  # of the weight that one client has, at most; or twice an equal share
    together: float = 0.25  # what all weights exceed the median by, to what they are up to it
    norm: float = 2.0  # the length of an update, to the median length; or 12/K, which is more for K < 6
    further: float = 10.0  # any further sum to the weight, to the median


OFF = Limits(1.0, math.inf, math.inf, math.inf)


class Size(NamedTuple):
    """The quantities of a contribution that are limited."""

    weight: float
    length: float  # ‖coef·δ‖ to the weight
    further: tuple[float, ...] = ()  # each further sum to the weight


class Factors(NamedTuple):
    """What a contribution is multiplied by: all of it, then its update, then its further sums."""

    weight: float = 1.0
    update: float = 1.0
    further: tuple[float, ...] = ()


def size_of(length: float, sums: Sequence[float]) -> Size:
    """From ‖coef·δ‖ and the sums, of which the first is the weight."""
    weight, *further = map(abs, sums)
    return Size(weight, _to(length, weight), tuple(_to(each, weight) for each in further))


def ceiling(weights: Sequence[float], share: float, together: float) -> float:
    """What no weight may exceed; infinity where none does.

    Clients that are fewer than half cannot raise it without limit: it is computed from the median, and from
    what weights are up to the median.
    """
    there = sorted(weight for weight in weights if weight > 0)
    if len(there) < FEWEST or share >= 1:
        return math.inf
    equal = 2 / len(there)
    top = _jointly(there, max(together, equal))
    return min(top, _singly([min(weight, top) for weight in there], max(share, equal)))


def _jointly(ascending: list[float], together: float) -> float:
    """The T above the median m with Σ (min(w, T) − m)⁺ = together · Σ min(w, m)."""
    median = statistics.median(ascending)
    if math.isinf(median) or math.isinf(together):
        return math.inf
    units = [weight / median for weight in ascending]
    budget, added = together * sum(min(unit, 1.0) for unit in units), 0.0
    above = [unit - 1 for unit in units if unit > 1]
    for k, excess in enumerate(above):
        left = len(above) - k
        if added + left * excess > budget:
            return median * (1 + (budget - added) / left)
        added += excess
    return math.inf


def _singly(ascending: list[float], share: float) -> float:
    """The T with T = share · Σ min(w, T); infinity where no weight has more than its share."""
    if share >= 1:
        return math.inf
    below, unit = 0.0, ascending[-1]
    sums = [0.0]
    for weight in ascending:
        below += weight / unit
        sums.append(below)
    for above in range(len(ascending)):  # so many are cut down to T
        left = len(ascending) - above
        top = share * sums[left] / (1 - above * share) if above * share < 1 else 0.0
        if ascending[left - 1] <= unit * top:
            return unit * top if above else math.inf
    return math.inf


def factors(sizes: Sequence[Size], limits: Limits) -> list[Factors]:
    """What each contribution of a round is multiplied by."""
    if not sizes:
        return []
    tops = tops_of(sizes, limits)
    return [factors_of(size, tops) for size in sizes]


def tops_of(sizes: Sequence[Size], limits: Limits) -> Size:
    """The largest that each quantity may be."""
    weights, lengths, further = zip(*sizes, strict=True)
    return Size(
        ceiling(weights, limits.share, limits.together),
        _multiple(lengths, limits.norm),
        tuple(_multiple(each, limits.further) for each in zip(*further, strict=True)),
    )


def factors_of(size: Size, tops: Size) -> Factors:
    """What a contribution of this size is multiplied by."""
    further = zip(size.further, tops.further, strict=True)
    return Factors(
        _within(size.weight, tops.weight),
        _within(size.length, tops.length),
        tuple(_within(each, top) for each, top in further),
    )


def _multiple(values: Sequence[float], factor: float) -> float:
    there = [value for value in values if value > 0]
    return max(factor, FEW / len(there)) * statistics.median(there) if len(there) >= FEWEST else math.inf


def _within(value: float, top: float) -> float:
    return 1.0 if value <= top else top / value


def _to(value: float, weight: float) -> float:
    if not value:
        return 0.0
    return value / weight if weight else math.inf
