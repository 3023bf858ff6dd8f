"""Attacks of clients that lie: what they train on, and what they send instead of what they have trained.

Which clients lie is a hash of the attack's `draw` and the client, the same under every seed of a comparison.
So all runs are judged by the same honest clients.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.contract import Report
from fairwind.data.counter import LIARS, NOISE, fold, mix
from fairwind.data.federation import Federation
from fairwind.errors import InputError, in_range, whole
from fairwind.runs.spec import call

Tell = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From honest updates (h, P), the liars' own (f, P), and a hash of each liar: the updates that they send."""


class Attack(NamedTuple):
    """What the liars of a federation do."""

    share: float  # of the clients that lie
    draw: int
    tell: Tell | None = None  # what they send
    factors: Mapping[str, float] = {}  # by field of the report, what they multiply it by
    relabel: Callable[[Tensor, int], Tensor] | None = None  # training labels, and how many classes there are

    def liars(self, clients: int) -> Tensor:
        """Which of the clients lie, (K,)."""
        order = torch.argsort(mix(fold(LIARS, self.draw), torch.arange(clients)), stable=True)
        found = torch.zeros(clients, dtype=torch.bool)
        found[order[: round(self.share * clients)]] = True
        return found

    def poisoned(self, federation: Federation) -> Federation:
        """The federation with the liars' labels; none of their samples is for tests."""
        liars, targets = self.liars(len(federation)), federation.targets
        if self.relabel is not None:
            if federation.classes is None or not isinstance(targets, Tensor) or targets.dim() != 1:
                raise InputError("this attack changes class labels, and the targets are none: take another")
            places = [
                torch.arange(int(federation.start[k]), int(federation.start[k] + federation.train[k]))
                for k in liars.nonzero()[:, 0].tolist()
            ]
            mine = torch.cat([*places, torch.empty(0, dtype=torch.int64)]).to(targets.device)
            before, classes = targets[mine], federation.classes
            labels = (before >= 0) & (before < classes)  # others are ignored, such as −100
            targets = targets.index_put((mine,), torch.where(labels, self.relabel(before, classes), before))
        if not federation.test[~liars].any():
            raise InputError("no client that is honest has test samples: give a smaller share of liars")
        honest = {name: getattr(federation, name) * ~liars for name in ("test", "validation")}
        return replace(federation, targets=targets, **honest)

    def lied(
        self, clients: Tensor, report: Report, update: Tensor, key: int, of: int
    ) -> tuple[Report, Tensor]:
        """Reports and updates (n, P) as they are sent, of some of `of` clients; `key` is the round's hash.

        Reports are of the update that is sent. A client whose update is longer than what it trained claims
        a gradient that is longer by as much, so that its training seems worth as many steps as it was.
        """
        lies = self.liars(of)[clients.cpu()].to(update.device)
        if not lies.any():
            return report, update
        told = update
        if self.tell is not None:
            keys = mix(key, clients[lies].cpu())
            seen = update if lies.all() else update[~lies]
            told = update.clone()
            told[lies] = self.tell(seen, update[lies], keys).to(update.dtype)
        norm = torch.where(
            lies, torch.linalg.vector_norm(told, dim=1, dtype=torch.float64), report.update_norm
        )
        longer = torch.where(lies & (report.update_norm > 0), norm / report.update_norm, 1.0)
        report = report._replace(update_norm=norm, grad_norm=report.grad_norm * longer)
        claimed = {
            name: torch.where(lies, getattr(report, name) * factor, getattr(report, name))
            for name, factor in self.factors.items()
        }
        return report._replace(**claimed), told


def signflip(*, share: float = 0.2, draw: int = 0) -> Attack:
    """Liars send the opposite of their update."""
    return _attack(share, draw, tell=lambda honest, own, keys: -own)


def inflated(*, share: float = 0.2, draw: int = 0, factor: float = 10.0, claim: float = 50.0) -> Attack:
    """Liars collude: each sends −`factor` times the honest mean, and `claim` times its size and loss."""
    in_range(0, math.inf, factor=factor, claim=claim)

    def tell(honest: Tensor, own: Tensor, keys: Tensor) -> Tensor:
        return (-factor * honest.double().mean(0)).expand(own.shape)

    return _attack(share, draw, tell=tell, factors={"size": claim, "loss": claim})


def noise(*, share: float = 0.2, draw: int = 0, factor: float = 1.0) -> Attack:
    """Liars send Gaussian noise, `factor` times as long as the honest updates' median."""
    in_range(0, math.inf, factor=factor)

    def tell(honest: Tensor, own: Tensor, keys: Tensor) -> Tensor:
        length = factor * torch.linalg.vector_norm(honest, dim=1, dtype=torch.float64).median()
        rows = []
        for key in keys.tolist():
            generator = torch.Generator().manual_seed(fold(NOISE, key))
            row = torch.randn(own.shape[1], generator=generator, dtype=torch.float64).to(own.device)
            rows.append(row * (length / torch.linalg.vector_norm(row)))
        return torch.stack(rows)

    return _attack(share, draw, tell=tell)


def alie(*, share: float = 0.2, draw: int = 0) -> Attack:
    """A little is enough: liars send the honest mean less z standard deviations of each coordinate.

    Baruch, Baruch, Goldberg: A Little Is Enough. NeurIPS 2019. z is the largest for which as many honest
    clients as the liars need for a majority are further from the mean than they are.
    """

    def tell(honest: Tensor, own: Tensor, keys: Tensor) -> Tensor:
        clients, liars = len(honest) + len(own), len(own)
        needed = clients // 2 + 1 - liars
        quantile = min(max((clients - liars - needed) / (clients - liars), 0.5), 1 - 1e-6)
        z = statistics.NormalDist().inv_cdf(quantile)
        exact = honest.double()
        return (exact.mean(0) - z * exact.std(0, correction=0)).expand(own.shape)

    return _attack(share, draw, tell=tell)


def labelflip(*, share: float = 0.2, draw: int = 0, source: int | None = None, target: int = 0) -> Attack:
    """Liars train on wrong labels: c becomes C − 1 − c, or `source` alone becomes `target`."""
    whole(0, target=target)
    if source is not None:
        whole(0, source=source)

    def relabel(labels: Tensor, classes: int) -> Tensor:
        if source is None:
            return classes - 1 - labels
        if max(source, target) >= classes:
            raise InputError(f"source={source}, target={target}: there are {classes} classes, from 0")
        return torch.where(labels == source, target, labels)

    return _attack(share, draw, relabel=relabel)


def _attack(
    share: float,
    draw: int,
    *,
    tell: Tell | None = None,
    factors: Mapping[str, float] = {},
    relabel: Callable[[Tensor, int], Tensor] | None = None,
) -> Attack:
    in_range(0, 1, share=share)
    whole(0, draw=draw)
    return Attack(share, draw, tell, factors, relabel)


ATTACKS = {each.__name__: each for each in (signflip, inflated, noise, alie, labelflip)}


def build_attack(spec: str) -> Attack:
    """The attack of a spec such as "signflip:share=0.3"."""
    return call("attack", spec, ATTACKS)
