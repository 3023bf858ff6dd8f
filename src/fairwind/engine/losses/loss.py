"""Losses: what a batch's loss is, from a model's outputs and the targets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fairwind.scores import Score, ratio, segment_sums
from fairwind.scores import loss as loss_score
from fairwind.scores.reading import Reading, class_axis, first_output, per_sample_mean

READING = Reading()
IGNORED = -100  # PyTorch's label of positions that do not count

Terms = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Loss:
    """A loss that fits a model and its data.

    The loss of a batch is a mean over its samples, a mean with other divisors (class weights, labels that
    are ignored), a sum, or whatever a function of the whole batch returns. Padding never counts.
    """

    name: str
    function: Callable[..., Any]
    """Of outputs and targets: each sample's loss (B,); if `weighted`, also what it adds to the divisor (B,);
    for a whole batch, one number."""
    reduction: Literal["mean", "sum", "batch"] = "mean"
    weighted: bool = False
    """Whether samples count differently in the mean."""
    masked: bool = False
    """Whether a function of a whole batch takes a mask of its samples."""
    fused: Callable[[Any, Any], Tensor] | None = None
    """The loss of a batch without padding, faster."""
    kernel: Callable[[Any, Any], Tensor] | None = None
    """Each sample's loss for one model at a time, faster."""
    batch_size: int = 1
    """Samples of a local step, which a function of a whole batch is given in probes and evaluations, too."""
    reading: Reading = READING
    score: Score | None = None
    """By which clients are scored, unless something else is asked for; None if the loss does not tell."""
    own: bool = False
    """Whether the model computes it: `function` reads the model's own output object."""
    classifies: bool = False
    """Whether it is plain cross-entropy with one label per sample."""

    @property
    def batched(self) -> bool:
        return self.reduction == "batch"

    def of_batch(self, outputs: Any, targets: Any, mask: Tensor | None = None) -> Tensor:
        """The loss of a batch, as PyTorch computes it without the samples that are masked."""
        if mask is None and self.fused is not None:
            return self.fused(outputs, targets)
        if self.batched:
            return self._whole(outputs, targets, mask)
        sums, weights = self._terms(outputs, targets)
        if self.reduction == "sum":
            return _total(sums, mask)
        if weights is None:
            return sums.mean() if mask is None else _total(sums, mask) / mask.sum().clamp(min=1)
        divisor = _total(weights, mask)  # 0 if no label counts: then the loss is 0 as well
        return _total(sums, mask) / torch.where(divisor > 0, divisor, 1)

    def part(self, outputs: Any, targets: Any, mask: Tensor) -> Tensor:
        """What a batch adds to the sum of a client's losses."""
        if self.batched:
            return mask.sum() * self._whole(outputs, targets, mask)
        return _total(self._terms(outputs, targets)[0], mask)

    def numbers(self, outputs: Any, targets: Any) -> Tensor:
        """Each sample's numbers (B,) or (B, 2), of which `of_clients` computes the loss of clients."""
        if self.kernel is not None:
            return self.kernel(outputs, targets)
        if self.batched:
            return self._whole(outputs, targets, None).expand(self._samples(targets))
        sums, weights = self._terms(outputs, targets)
        return sums if weights is None else torch.stack([sums, weights], dim=-1)

    @property
    def as_score(self) -> Score:
        """The loss of each client, as a score."""
        return replace(loss_score, per_client=_sum if self.reduction == "sum" else ratio)

    def shares(self, parts: Sequence[Tensor], weights: Tensor | None) -> list[float]:
        """What the losses of parts of a client's samples are multiplied by; `weights` are of all samples."""
        if self.reduction == "sum":
            return [1.0] * len(parts)
        if weights is None:
            total = sum(map(len, parts))
            return [len(part) / total for part in parts]
        sums = [float(weights[part].sum()) for part in parts]
        return [each / (sum(sums) or 1) for each in sums]

    def divisors(self, sizes: Tensor, weights: Tensor | None) -> Tensor:
        """What the summed losses of clients are divided by; `weights` are the sums of their samples'."""
        if self.reduction == "sum":
            return torch.ones_like(sizes)
        return sizes if weights is None else torch.where(weights > 0, weights, 1)

    def _whole(self, outputs: Any, targets: Any, mask: Tensor | None) -> Tensor:
        if not self.masked:
            found: Tensor = self.function(outputs, targets)
            return found.mean()
        if mask is None:
            device = first_tensor(targets).device
            mask = torch.ones(self._samples(targets), dtype=torch.bool, device=device)
        # Without any sample, a user's function may divide by zero, and its gradient would not be finite.
        some = mask.any()
        return torch.where(some, self.function(outputs, targets, mask=mask | ~some).mean(), 0)

    def _terms(self, outputs: Any, targets: Any) -> Terms:
        found = self.function(outputs, targets)
        return (found[0], found[1]) if self.weighted else (found, None)

    def _samples(self, targets: Any) -> int:
        return int(first_tensor(targets).shape[0])


def first_tensor(samples: Any) -> Tensor:
    """The first of the tensors of samples."""
    while not isinstance(samples, Tensor):
        samples = next(iter(samples.values() if isinstance(samples, dict) else samples))
    return samples


def _total(values: Tensor, mask: Tensor | None) -> Tensor:
    return (values if mask is None else torch.where(mask, values, 0)).sum()


def _sum(values: Tensor, lengths: Tensor) -> Tensor:
    return segment_sums(values, lengths)[..., 0]


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Each sample's cross-entropy (B,), from outputs (B, ..., C) or (B, C, ...) and class labels (B, ...).

    Averaged over positions, if a sample has several; uses the first of a tuple of outputs.
    """
    logits = first_output(outputs)
    return per_sample_mean(entropies(logits, targets, axis=class_axis(logits, targets, second=False))[0])


def entropies(
    logits: Tensor,
    targets: Tensor,
    *,
    axis: int,
    weight: Tensor | None = None,
    ignored: int | None = None,
    smoothing: float = 0.0,
    logarithms: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Each position's cross-entropy and weight, (B, ...) each, from class labels (B, ...).

    The `axis` counts classes. Outputs are logits, or `logarithms` of probabilities. No weights are those of
    equal positions. Written without a gather, whose batching rule would make the compiler fix the number of
    rows.
    """
    if axis != -1 and logits.dim() > 2:
        logits = logits.movedim(axis, -1)
    here = targets[..., None] == torch.arange(logits.shape[-1], device=logits.device)
    picked = torch.where(here, logits, 0).sum(-1)
    total = None if logarithms else logits.logsumexp(-1)
    losses = -picked if total is None else total - picked
    weights = None if weight is None else torch.where(here, weight, 0).sum(-1)
    if weights is not None:
        losses = losses * weights
    if smoothing:
        surprises = -logits if total is None else total[..., None] - logits
        each = (surprises if weight is None else surprises * weight).mean(-1)
        losses = (1 - smoothing) * losses + smoothing * each
    if ignored is not None:
        counted = targets != ignored
        losses = torch.where(counted, losses, 0)
        weights = torch.where(counted, torch.ones_like(losses) if weights is None else weights, 0)
    return losses, weights
