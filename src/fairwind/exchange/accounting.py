"""The privacy loss of a training's noisy sums: ε at δ, computed by Google's dp-accounting.

A noisy sum over all clients is a plain Gaussian mechanism. T of them are exactly one whose noise is √T
times smaller, and its ε is known exactly (Balle and Wang 2018, Theorem 8). Only where clients are drawn in
secret is ε a bound by Rényi orders.
"""

import math
from collections.abc import Iterable
from typing import Any

from fairwind.errors import InputError
from fairwind.exchange.privacy import Privacy
from fairwind.runs.schema import PrivacyLoss

ADJACENCY = "replace one client"
ALL = (1, 1)  # clients drawn, of how many, if nothing is drawn in secret: all take part, or it is known who


class Accountant:
    """The releases of a training so far.

    Two trainings are neighbours if one client's data is replaced by any other. Where clients are drawn in
    secret, without replacement, ε is the smaller of two bounds that both hold: with and without the drawing.
    """

    def __init__(self, privacy: Privacy, releases: Iterable[tuple[int, int, int]] = ()):
        """`releases` are clients drawn, of how many, and how often."""
        self.privacy = privacy
        self.releases: dict[tuple[int, int], int] = {}
        self.known: tuple[int, float] = 0, 0.0  # ε after so many releases
        if privacy.noise:
            _library()
        for drawn, clients, count in releases:
            self.release((drawn, clients), count)

    def release(self, drawn: tuple[int, int] | None, count: int = 1) -> None:
        """Counts releases over sampled clients (drawn, of how many); None means no secret sampling."""
        key = ALL if drawn is None or drawn[0] >= drawn[1] else drawn
        self.releases[key] = self.releases.get(key, 0) + count

    def epsilon(self) -> float:
        """ε of all releases together."""
        rounds = sum(self.releases.values())
        if self.known[0] != rounds:
            self.known = rounds, self._epsilon(rounds)
        return self.known[1]

    def _epsilon(self, rounds: int) -> float:
        if not self.privacy.noise:
            return math.inf
        library, rdp = _library()
        noise = self.privacy.noise / 2  # a replaced client changes the sum by 2·L
        found = float(library.get_epsilon_gaussian(noise / math.sqrt(rounds), self.privacy.delta))
        if set(self.releases) == {ALL}:
            return found
        gaussian = library.GaussianDpEvent(noise)
        secret = rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
        for (drawn, clients), count in self.releases.items():
            sampled = library.SampledWithoutReplacementDpEvent(clients, drawn, gaussian)
            secret.compose(sampled, count)
        return min(found, float(secret.get_epsilon(self.privacy.delta)))

    def record(self) -> list[list[int]]:
        """The releases, as JSON can say them."""
        return [[*key, count] for key, count in self.releases.items()]

    def described(self) -> PrivacyLoss:
        """The entry on privacy in the results."""
        epsilon = self.epsilon()
        return {
            **self.privacy.described(),
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "adjacency": ADJACENCY,
            "releases": self.record(),
        }


def _library() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError:
        raise InputError(
            "privacy is accounted for by dp-accounting, which is missing: pip install 'fairwind[privacy]'"
        ) from None
    return dp_accounting, rdp
