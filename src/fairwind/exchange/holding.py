"""The updates of a round, held by a server that sees all clients before it weights them."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairwind.aggregation import advance_seeing
from fairwind.contract import GramAlgorithm, Report, WeighingAlgorithm
from fairwind.engine.round_updates import RoundUpdates
from fairwind.engine.tuning import CPU
from fairwind.exchange.capping import Capped, CappedSum, Term
from fairwind.robust.limits import Limits, Size, factors


class HeldReply(NamedTuple):
    """A client's reply."""

    report: Report
    update: Tensor  # (P,), which the sum overwrites
    length: float


class HeldReplies:
    """The replies of a round: as many vectors (P,) as there are clients."""

    def __init__(self, algorithm: WeighingAlgorithm, limits: Limits):
        """Servers that put their weight on few clients by intention are not limited in what these exceed the
        others by together."""
        self.algorithm, self.limits = algorithm, limits._replace(together=math.inf)
        self.replies: dict[str, HeldReply] = {}
        self.clipped: dict[str, float] = {}  # by client, what its update was multiplied by before it was seen

    def advance(
        self, x: Tensor, state: Any, numbers: dict[str, int]
    ) -> tuple[tuple[Tensor, Any, Tensor], Capped]:
        """The server's step, as of `advance_seeing`, and the capped sum; `numbers` are clients' among all."""
        clients = sorted(self.replies, key=numbers.__getitem__)
        if isinstance(self.algorithm, GramAlgorithm):
            self._clip()
        held = RoundUpdates(self.algorithm, lambda matrices: matrices[0], CPU.gram_numbers)
        for client in clients:
            reply = self.replies[client]
            report = Report(*(number[None] for number in reply.report))
            held.add(report, torch.tensor([numbers[client]]), [reply.update[None]])
        longest = max(clients, key=lambda client: self.replies[client].length)
        capped = CappedSum(len(x), 1, self.limits).finish()._replace(largest=longest)

        def summed(coef: Tensor) -> Tensor:
            nonlocal capped
            if torch.isfinite(coef).all():
                capped = self._sum(len(x), dict(zip(clients, coef.tolist(), strict=True)))
            return capped.total

        return advance_seeing(self.algorithm, x, state, held.cohort(), held.gram, summed), capped

    def _clip(self) -> None:
        """Shortens the longest updates, before a server sees their inner products."""
        sizes = {client: Size(1.0, reply.length) for client, reply in self.replies.items()}
        cut = zip(sizes, factors(list(sizes.values()), self.limits), strict=True)
        self.clipped = {client: each.update for client, each in cut if each.update < 1}
        for client, factor in self.clipped.items():
            report, update, length = self.replies[client]
            update.mul_(factor)
            report = report._replace(update_norm=report.update_norm * factor)
            self.replies[client] = HeldReply(report, update, length * factor)

    def _sum(self, parameters: int, coefs: dict[str, float]) -> Capped:
        """Σcoef·δ. What is cut off a client's weight goes to the others, so that steps are no shorter.

        Where the server sees inner products, coefficients are no weights, because they may include 1/‖δ‖: the
        norms of coef·δ are, and a client may have twice its share of these.
        """
        terms = []
        for client, coef in coefs.items():
            _, update, length = self.replies[client]
            terms.append(Term(client, coef, update, (abs(coef),), length))
        if isinstance(self.algorithm, GramAlgorithm):
            limits = self.limits._replace(share=min(1.0, 2 * self.limits.share))
            sum_ = CappedSum(parameters, 1, limits)
            for term in terms:
                sum_.add(term._replace(sums=(term.pull,)))
            capped = sum_.finish()
            return capped._replace(factors=[{}, capped.factors[0]])
        sum_ = CappedSum(parameters, 1, self.limits)
        for term in terms:
            sum_.add(term)
        capped = sum_.finish()
        if capped.factors[0] and capped.sums[0] > 0:
            weight = sum(term.sums[0] for term in terms)
            capped = capped._replace(total=capped.total * (weight / capped.sums[0]))
        return capped
