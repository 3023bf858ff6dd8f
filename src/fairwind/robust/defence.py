"""Defences against clients that lie: robust replacements of a round's sums.

An algorithm's server divides Σ coef·δ by a sum of weights. So a client's contribution is a weight, a vector
for each unit of weight (d = coef·δ / weight), and further sums for each unit of weight. A defence limits each
of these (`limits`), and replaces the weighted mean of the vectors by a robust one (`rules`). The server is
given that mean times the sum of the limited weights, and sums in the limited weights. So its formulas hold,
and its file does not change.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairwind.contract import Algorithm, AnyAlgorithm, LocalAlgorithm, PersonalAlgorithm
from fairwind.errors import InputError, in_range
from fairwind.robust import rules
from fairwind.robust.limits import Factors, Limits, factors_of, size_of, tops_of
from fairwind.runs.spec import call

# From vectors d (K, P), weights (K,) and the mean (P,) of the last round: a mean (P,)
Rule = Callable[[Tensor, Tensor, Tensor], Tensor]

TINY = 1e-300  # so that nothing is divided by zero


class Defence(NamedTuple):
    """What takes the place of a sum over clients."""

    rule: Rule
    follows: bool = False  # whether the rule needs the mean of the last round
    clips: bool = False  # whether long vectors are shortened before: rules must see how far off they are


class RobustSum(NamedTuple):
    """The sums of a round."""

    total: Tensor  # (P,) in the place of Σ coef·δ
    sums: tuple[Tensor, ...]
    mean: Tensor  # (P,) total to the weight
    factors: list[Factors]  # of each client


def bounds() -> Defence:
    """Limits alone: what a real federation does by default."""
    return Defence(lambda d, w, _: rules.mean(d, w), clips=True)


def trimmed(*, cut: float = 0.2) -> Defence:
    """The mean of each coordinate without the largest and smallest, each of the share `cut` of the weight."""
    in_range(0, 0.5, cut=cut)
    return Defence(lambda d, w, _: rules.trimmed_mean(d, w, cut))


def median() -> Defence:
    """The median of each coordinate."""
    return Defence(lambda d, w, _: rules.median(d, w))


def multikrum(*, liars: float = 0.3) -> Defence:
    """The mean of the clients that have the closest neighbours, without the share `liars` of the clients."""
    in_range(0, 0.5, liars=liars)

    def rule(d: Tensor, w: Tensor, _: Tensor) -> Tensor:
        count = round(liars * len(d))
        return rules.multikrum(d, w, count, len(d) - count)

    return Defence(rule)


def geometric() -> Defence:
    """The geometric median."""
    return Defence(lambda d, w, _: rules.geometric_median(d, w))


def clipping() -> Defence:
    """The mean of what differs from the last round's mean, clipped to the median length."""
    return Defence(rules.centred_clipping, follows=True)


DEFENCES = {each.__name__: each for each in (bounds, trimmed, median, multikrum, geometric, clipping)}


def build_defence(spec: str) -> Defence:
    """The defence of a spec such as "median" or "trimmed:cut=0.3"."""
    return call("defence", spec, DEFENCES)


def defended(algorithm: AnyAlgorithm, spec: str) -> Defence:
    """The same for an algorithm, which is refused if it needs more of the clients than one sum."""
    check_one_vector(algorithm, "a defence")
    return build_defence(spec)


def check_one_vector(algorithm: AnyAlgorithm, what: str) -> None:
    """Refuses algorithms whose server gets more than one sum of vectors."""
    if not isinstance(algorithm, Algorithm | LocalAlgorithm | PersonalAlgorithm):
        name = algorithm.name or "this one"
        raise InputError(
            f"{what} is for algorithms of one sum, and {name} needs more: take another algorithm"
        )


def robust_sum(
    defence: Defence, limits: Limits, coef: Tensor, sums: Any, update: Tensor, last: Tensor
) -> RobustSum:
    """From coefficients (K,), sums of (K,), updates (K, P), and the mean (P,) of the last round, or zeros.

    Whatever the defence, the mean is no longer than one client's vector may be.
    """
    numbers = torch.stack(list(sums)).double()  # (sums, K)
    lengths = coef.double().abs() * torch.linalg.vector_norm(update, dim=1, dtype=torch.float64)
    sizes = [size_of(length, own) for length, own in zip(lengths.tolist(), numbers.T.tolist(), strict=True)]
    tops = tops_of(sizes, limits)
    cut = [factors_of(size, tops) for size in sizes]
    if not defence.clips:
        cut = [each._replace(update=1.0) for each in cut]
    lighter = numbers.new_tensor([each.weight for each in cut])
    shorter = numbers.new_tensor([each.update for each in cut])
    fewer = numbers.new_tensor([each.further for each in cut]).T
    weight = numbers[0] * lighter
    own = torch.where(numbers[0] > 0, coef.double() * shorter / numbers[0], 0.0)
    d, last = update.double() * own[:, None], last.double()
    mean = defence.rule(d, weight, last) if bool((weight > 0).any()) else torch.zeros_like(last)
    mean = mean * min(1.0, tops.length / max(float(torch.linalg.vector_norm(mean)), TINY))
    further = (numbers[1:] * lighter * fewer).sum(1)
    return RobustSum(weight.sum() * mean, (weight.sum(), *further.unbind()), mean, cut)
