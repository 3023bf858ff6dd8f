"""Every client's mean loss and score at shared weights, in large batches that ignore client borders."""

import torch
from torch import Tensor

from fairwind.counter import segments
from fairwind.data.federation import Federation
from fairwind.engine.cohort import Cohort

BATCH = 1 << 14  # samples × runs scored at once


@torch.no_grad()
def client_means(
    cohort: Cohort, federation: Federation, x: Tensor, samples: Tensor, sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean loss and mean score of each client under each model x (R, P): two (R, K) float64 tensors.

    `samples` are the clients' sample indices, client after client, `sizes` (K,) how many each has; a client
    with none gets NaN.
    """
    parts = [
        cohort.scores(x, federation.inputs[chunk], federation.targets[chunk])
        for chunk in torch.split(samples, max(1, BATCH // len(x)))
    ]
    sizes = sizes.to(samples.device)
    loss, score = (_segment_means(torch.cat(each, dim=1), sizes) for each in zip(*parts, strict=True))
    return loss, score


def _segment_means(values: Tensor, sizes: Tensor) -> Tensor:
    """Means of consecutive segments of (R, M), in float64: (R, K)."""
    total = torch.segment_reduce(values.double().T.contiguous(), "sum", lengths=sizes, axis=0).T
    return torch.where(sizes > 0, total / sizes, torch.nan).contiguous()


def split_samples(federation: Federation, part: str) -> tuple[Tensor, Tensor]:
    """All clients' "train" or "test" sample indices, and how many each client has."""
    sizes = federation.train if part == "train" else federation.test
    start = federation.start if part == "train" else federation.start + federation.train
    client, place = segments(sizes)
    return (start[client] + place).to(federation.inputs.device), sizes
