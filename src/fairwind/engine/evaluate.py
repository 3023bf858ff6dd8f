"""Every client's mean loss and score at shared weights, in large batches that ignore client borders."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from fairwind.counter import segments
from fairwind.data.federation import Federation
from fairwind.data.samples import take
from fairwind.engine.ragged import chunks
from fairwind.engine.ranks import ALONE, Ranks

# Activations of samples under all models together that are scored at once, about
NUMBERS = {"cpu": 1 << 22, "cuda": 1 << 28}

Pick = Callable[[Tensor], Tensor]  # clients -> their samples' indices, client after client


class Scorer(Protocol):
    """A model that can score samples."""

    per_sample: int  # activations

    def scores(self, x: Tensor, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Each sample's loss and score (R, B) under models x (R, P)."""
        ...


@torch.no_grad()
def client_means(
    model: Scorer, federation: Federation, x: Tensor, sizes: Tensor, pick: Pick, ranks: Ranks = ALONE
) -> tuple[Tensor, Tensor]:
    """Mean loss and mean score of each client under each model x (R, P): two (R, K) float64 tensors.

    `sizes` (K,) says how many samples each client has, `pick` which; a client with none gets NaN. Ranks share
    whole chunks, so that a client's numbers are the same bits however many ranks there are.
    """
    limit = max(16, NUMBERS.get(x.device.type, 1 << 22) // (max(64, model.per_sample) * len(x)))
    means = torch.zeros(2, len(x), len(sizes), dtype=torch.float64, device=x.device)
    for clients in chunks(sizes, limit)[ranks.rank :: ranks.world]:
        scored = [
            model.scores(x, take(federation.inputs, part), take(federation.targets, part))
            for part in torch.split(pick(clients), limit)
        ]
        lengths = sizes[clients].to(x.device)
        for mean, each in zip(means, zip(*scored, strict=True), strict=True):
            mean[:, clients.to(x.device)] = _segment_means(torch.cat(each, dim=1), lengths)
    loss, score = ranks.sum(*means)
    return loss, score


def _segment_means(values: Tensor, lengths: Tensor) -> Tensor:
    """Means of consecutive segments of (R, M), in float64: (R, K)."""
    total = torch.segment_reduce(values.double().T.contiguous(), "sum", lengths=lengths, axis=0).T
    return torch.where(lengths > 0, total / lengths, torch.nan)


def split(federation: Federation, part: str) -> tuple[Tensor, Pick]:
    """Sizes and picker of all clients' "train" or "test" samples."""
    sizes = federation.train if part == "train" else federation.test
    start = federation.start if part == "train" else federation.start + federation.train

    def pick(clients: Tensor) -> Tensor:
        owner, place = segments(sizes[clients])
        return (start[clients][owner] + place).to(federation.device)

    return sizes, pick
