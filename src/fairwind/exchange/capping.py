"""Sums of contributions that limit what each client has in them: a running one, and robust ones."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.engine.loop.learner import CompensatedSum
from fairwind.robust.defence import Defence, robust_sum
from fairwind.robust.limits import OFF, Factors, Limits, Size, factors_of, size_of, tops_of

ROOM = 2**30  # bytes of contributions that are held
FEWEST = 16  # contributions that are held, however large they are


class Term(NamedTuple):
    """One client's contribution."""

    client: str
    coef: float
    update: Tensor  # (P,) in the type it was sent in; ownership passes to the sum
    sums: tuple[float, ...]  # the first is the client's weight
    length: float  # of the update

    @property
    def pull(self) -> float:
        """‖coef·δ‖."""
        return abs(self.coef) * self.length

    @property
    def size(self) -> Size:
        return size_of(self.pull, self.sums)


class Capped(NamedTuple):
    """The sums of a round."""

    total: Tensor  # (P,) Σ coef·δ, float64
    sums: tuple[float, ...]
    clients: int
    factors: list[dict[str, float]]  # by client: what the cap multiplied its weight by, its update, and sums
    largest: str  # the client with the largest share of anything, before the cap


class CappedSum:
    """Adds contributions one at a time.

    What a client may have is known only after all have contributed. Until then the largest contributions are
    held: as many as fit into a GiB, and not fewer than 16. A round of no more clients is limited as a whole;
    in a larger one, the others are added as soon as they are among the smaller ones.
    """

    def __init__(self, parameters: int, sums: int, limits: Limits):
        self.total = CompensatedSum(torch.empty(parameters))
        self.limits, self.clients = limits, 0
        self.sums = [0.0] * sums
        self.held: list[Term] = []
        self.sizes: list[Size] = []  # of all that came
        self.came, self.largest = [0.0] * (1 + sums), [(0.0, "")] * (1 + sums)
        self.factors: list[dict[str, float]] = [{} for _ in range(1 + sums)]

    def add(self, term: Term) -> None:
        """Takes a contribution of finite numbers."""
        self.clients += 1
        self.sizes.append(term.size)
        parts = [term.pull, *map(abs, term.sums)]
        self.came = [came + part for came, part in zip(self.came, parts, strict=True)]
        both = zip(self.largest, ((part, term.client) for part in parts), strict=True)
        self.largest = [max(pair) for pair in both]
        if self.limits == OFF:
            return self._take(term, Factors(further=(1.0,) * (len(self.sums) - 1)))
        self.held.append(term)
        if len(self.held) > max(FEWEST, ROOM // max(1, term.update.nbytes)):
            self._release(tops_of(self.sizes, self.limits))
        return None

    def finish(self) -> Capped:
        """The capped sums."""
        if self.held:
            tops = tops_of(self.sizes, self.limits)
            for term in self.held:
                self._take(term, factors_of(term.size, tops))
        self.held = []
        shares = [
            (part / came if 0 < came < math.inf else float(came > 0), client)
            for (part, client), came in zip(self.largest, self.came, strict=True)
        ]
        return Capped(self.total.flush(), tuple(self.sums), self.clients, self.factors, max(shares)[1])

    def _release(self, tops: Size) -> None:
        """Adds the held contribution that is furthest from being cut."""

        def nearness(k: int) -> float:
            size = self.held[k].size
            pairs = zip(size[:2] + size.further, tops[:2] + tops.further, strict=True)
            return max(value / top if top else float(value > 0) for value, top in pairs)

        term = self.held.pop(min(range(len(self.held)), key=nearness))
        self._take(term, factors_of(term.size, tops))

    def _take(self, term: Term, factors: Factors) -> None:
        lighter, shorter, further = factors
        for found, factor in zip(self.factors, (lighter, shorter, *further), strict=True):
            if factor < 1:
                found[term.client] = factor
        self.total.add(term.coef * lighter * shorter, term.update)
        scales = [lighter, *(lighter * each for each in further)]
        self.sums = [a + b * c for a, b, c in zip(self.sums, term.sums, scales, strict=True)]


class DefendedSum:
    """A robust sum of contributions, which are all held."""

    def __init__(self, parameters: int, sums: int, limits: Limits, defence: Defence, last: Tensor):
        """`last` is the mean (P,) of the round before, or zero."""
        self.parameters, self.sums = parameters, sums
        self.limits, self.defence, self.mean = limits, defence, last
        self.terms: dict[str, Term] = {}

    def add(self, term: Term) -> None:
        """Takes a contribution of finite numbers."""
        self.terms[term.client] = term

    def finish(self) -> Capped:
        """The robust sums, which do not depend on the order of clients."""
        factors: list[dict[str, float]] = [{} for _ in range(1 + self.sums)]
        if not self.terms:
            empty = torch.zeros(self.parameters, dtype=torch.float64)
            return Capped(empty, (0.0,) * self.sums, 0, factors, "")
        terms = [self.terms[client] for client in sorted(self.terms)]
        coef = torch.tensor([term.coef for term in terms], dtype=torch.float64)
        sums = torch.tensor([term.sums for term in terms], dtype=torch.float64).T
        update = torch.stack([term.update for term in terms])
        found = robust_sum(self.defence, self.limits, coef, sums, update, self.mean)
        self.mean = found.mean
        for term, each in zip(terms, found.factors, strict=True):
            for cut, factor in zip(factors, (each.weight, each.update, *each.further), strict=True):
                if factor < 1:
                    cut[term.client] = factor
        largest = max(terms, key=lambda term: term.pull).client
        return Capped(found.total, tuple(map(float, found.sums)), len(terms), factors, largest)
