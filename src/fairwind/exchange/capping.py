"""A running sum of contributions that caps each client's share."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.engine.loop.learner import CompensatedSum

HALF = 0.5  # of any further sum, such as that of certainties, is the most that a client may have


class Term(NamedTuple):
    """One client's contribution."""

    client: str
    coef: float
    update: Tensor  # (P,) in the type it was sent in; ownership passes to the sum
    sums: tuple[float, ...]  # the first is the client's weight
    length: float  # of the update

    @property
    def sizes(self) -> tuple[float, ...]:
        """The quantities that are capped: the weight, ‖coef·δ‖, and the further sums."""
        weight, *further = self.sums
        return weight, abs(self.coef) * self.length, *map(abs, further)


class Capped(NamedTuple):
    """The sums of a round."""

    total: Tensor  # (P,) Σ coef·δ, float64
    sums: tuple[float, ...]
    clients: int
    factors: list[dict[str, float]]  # by client: what the cap multiplied its weight by, its update, and sums
    largest: str  # the client with the largest share of anything, before the cap


class CappedSum:
    """Adds contributions one at a time.

    A client's share is known only after all have contributed. Contributions that might exceed the cap are
    held separately: about 1/share at a time, whatever the number of clients.
    """

    def __init__(self, parameters: int, sums: int, share: float):
        self.total = CompensatedSum(torch.empty(parameters))
        self.share, self.clients = share, 0
        self.sums = [0.0] * sums
        self.held: list[Term] = []
        # Of what is added, by what shares are taken of: how much, and of how many clients
        self.added, self.adding = [0.0] * (1 + sums), [0] * (1 + sums)
        # Of all that came: how much, and the largest with its client
        self.came, self.largest = [0.0] * (1 + sums), [(0.0, "")] * (1 + sums)

    def add(self, term: Term) -> None:
        """Takes a contribution of finite numbers."""
        self.clients += 1
        self.came = [came + size for came, size in zip(self.came, term.sizes, strict=True)]
        both = zip(self.largest, ((size, term.client) for size in term.sizes), strict=True)
        self.largest = [max(pair) for pair in both]
        self.held.append(term)
        factors = self._factors(certain=True)
        for k in reversed(range(len(self.held))):
            if min(factors[k]) == 1:
                self._take(self.held.pop(k), factors[k])

    def finish(self) -> Capped:
        """The capped sums."""
        capped: list[dict[str, float]] = [{} for _ in self.added]
        for term, factors in zip(self.held, self._factors(), strict=True):
            for found, factor in zip(capped, factors, strict=True):
                if factor < 1:
                    found[term.client] = factor
            self._take(term, factors)
        self.held = []
        shares = [
            (size / came if 0 < came < math.inf else float(came > 0), client)
            for (size, client), came in zip(self.largest, self.came, strict=True)
        ]
        return Capped(self.total.flush(), tuple(self.sums), self.clients, capped, max(shares)[1])

    def _take(self, term: Term, factors: list[float]) -> None:
        lighter, shorter, *further = factors
        self.total.add(term.coef * lighter * shorter, term.update)
        scales = [lighter, *(lighter * each for each in further)]
        self.sums = [a + b * c for a, b, c in zip(self.sums, term.sums, scales, strict=True)]
        for i, (size, factor) in enumerate(zip(term.sizes, factors, strict=True)):
            self.added[i] += size * factor * (lighter if i else 1)
            self.adding[i] += size > 0

    def _factors(self, *, certain: bool = False) -> list[list[float]]:
        """What each held contribution is multiplied by: all of it, then its update, then its further sums.

        Where it is to be `certain`, these are the least that they can become when more contributions come.
        """
        columns: list[list[float]] = []
        for i, sizes in enumerate(zip(*(term.sizes for term in self.held), strict=True)):
            values = [s * lighter for s, lighter in zip(sizes, columns[0], strict=True)] if i else list(sizes)
            share = (self.share, min(1.0, 2 * self.share))[i] if i < 2 else max(HALF, self.share)
            if not certain:
                share = max(share, 2 / max(1, self.adding[i] + sum(size > 0 for size in sizes)))
            top = ceiling(self.added[i], values, share)
            columns.append([1.0 if value <= top else top / value for value in values])
        return [list(row) for row in zip(*columns, strict=True)]


def ceiling(rest: float, values: list[float], share: float) -> float:
    """The largest T with T = share·(rest + Σ min(value, T)); infinity where one may have all.

    Of 1/share or more large values none is cut down to the others' size: they are the whole themselves.
    """
    if share >= 1:
        return math.inf
    ascending = sorted(values)
    below = [rest]
    for value in ascending:
        below.append(below[-1] + value)
    for above in range(len(values) + 1):  # so many are cut down to T
        left = len(values) - above
        if above * share >= 1:
            break
        top = share * below[left] / (1 - above * share)
        if not left or ascending[left - 1] <= top:
            return top
    return 0.0
