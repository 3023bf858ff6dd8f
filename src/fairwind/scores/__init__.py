"""Scores: how well a model works for a client, from its outputs for the client's test samples."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fairwind.errors import InputError, unknown
from fairwind.scores.reading import Reading, class_axis, first_output, labels_of, per_sample_mean

Kind = Literal["accuracy", "higher", "lower"]
"""A share of correct predictions; another number where higher is better; or one where lower is better."""
PerSample = Callable[[Any, Any], Tensor]  # outputs (B, ...), targets (B, ...) -> (B,), or (B, S)
PerClient = Callable[[Tensor, Tensor], Tensor]  # (R, M, S) of all samples, lengths (K,) -> (R, K)

NOT_NEGATIVE = 0.0, math.inf


@dataclass(frozen=True)
class Score:
    """How a client is scored: the mean of one number per test sample, or a function of all of them."""

    name: str
    """What results call it."""
    per_sample: PerSample
    """One number for each sample, or S of them, from outputs and targets."""
    kind: Kind = "higher"
    """Which is better, "higher" or "lower"; or "accuracy": a share of right answers, shown in percent."""
    per_client: PerClient | None = None
    """Each client's score from the numbers of all samples, ordered by client; None is their mean."""
    reads: Callable[[Reading, Any, Any], Tensor] | None = None
    """`per_sample`, given how the loss reads outputs and targets; only the package's own scores have it."""
    threshold: float | None = None
    """A single output above it means class 1; None follows the loss."""
    range: tuple[float, float] = (-math.inf, math.inf)
    """The least and the largest number that it can be; of accuracies always 0 and 100."""

    @property
    def is_loss(self) -> bool:
        """Whether its numbers are those of the task's loss."""
        return self.per_sample is _unknown_loss

    @property
    def percent(self) -> bool:
        """Whether it is shown as a percentage."""
        return self.kind == "accuracy"

    @property
    def limits(self) -> tuple[float, float]:
        """Its range, as it is shown."""
        return (0.0, 100.0) if self.percent else self.range

    @property
    def sign(self) -> int:
        """1 where larger is better, else −1."""
        return -1 if self.kind == "lower" else 1

    def above(self, threshold: float) -> "Score":
        """The same score, where a single output above the threshold means class 1."""
        return replace(self, threshold=threshold).reading(Reading(threshold=threshold))

    def reading(self, reading: Reading) -> "Score":
        """The same score, which reads outputs and targets as the loss does."""
        if self.reads is None:
            return self
        if self.threshold is not None:
            reading = reading._replace(threshold=self.threshold)
        return replace(self, per_sample=partial(self.reads, reading))

    def of_clients(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Each client's score (R, K) from (R, M) or (R, M, S), NaN without samples; accuracies in percent."""
        found = (self.per_client or ratio)(values if values.dim() > 2 else values[..., None], lengths)
        shape = len(values), len(lengths)
        if not isinstance(found, Tensor) or found.shape != shape:
            given = (
                f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            )
            raise InputError(
                f"per_client of the score {self.name!r} gives {given}: let it return a tensor {shape}, with "
                "a row for each model and a number for each client"
            )
        there, found = lengths.to(values.device) > 0, found.double()
        return torch.where(there, 100 * found if self.percent else found, torch.nan)


def as_scores(given: Any) -> tuple[Score, ...]:
    """A user's scores: a score, a function or a name, or several of them; the first is the main one."""
    several = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    found = tuple(_as_score(each) for each in several)
    names = [score.name for score in found]
    if not found:
        raise InputError("give at least one score, such as fairwind.scores.accuracy")
    if len(set(names)) < len(names):
        raise InputError(f"two scores are called {next(n for n in names if names.count(n) > 1)!r}")
    return found


def _as_score(given: Any) -> Score:
    if isinstance(given, Score):
        return given
    if isinstance(given, str):
        known = {each.name: each for each in globals().values() if isinstance(each, Score)}
        if given not in known:
            raise unknown("score", given, known)
        return known[given]
    if callable(given):
        return Score(getattr(given, "__name__", type(given).__name__), given)
    raise InputError(
        f"{given!r} is not a score: give one of fairwind.scores, or a function of outputs and targets"
    )


def segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums over consecutive segments of (..., M, S), in float64 and always in the same order: (..., K, S)."""
    first = values.double().movedim(-2, 0).contiguous()
    total = torch.segment_reduce(first, "sum", lengths=lengths.to(values.device), axis=0)
    return torch.where(lengths.to(values.device)[:, None] > 0, total.movedim(0, -2), 0)


def segment_means(values: Tensor, lengths: Tensor) -> Tensor:
    """Means over consecutive segments, NaN where they are empty."""
    return segment_sums(values, lengths) / lengths.to(values.device)[:, None]


def ratio(values: Tensor, lengths: Tensor) -> Tensor:
    """The mean of samples' numbers; or, of two numbers each, the sum of the first by that of the second."""
    if values.shape[-1] == 1:
        return segment_means(values, lengths)[..., 0]
    sums, divisors = segment_sums(values, lengths).unbind(-1)
    return sums / divisors


def _right(reading: Reading, outputs: Any, targets: Any) -> Tensor:
    """The share of right positions; if not all count, the number of right ones and of those that count."""
    found, dtype = labels_of(reading, outputs, targets), first_output(outputs).dtype
    right = found.predicted == found.wanted
    if found.counted is None:
        return right.to(dtype).mean(1)
    return torch.stack([(right & found.counted).sum(1), found.counted.sum(1)], dim=-1).to(dtype)


def _counts(reading: Reading, outputs: Any, targets: Any) -> Tensor:
    """For every class: true positives, predictions, and occurrences."""
    found, dtype = labels_of(reading, outputs, targets), first_output(outputs).dtype
    classes = torch.arange(found.classes, device=found.wanted.device)
    predicted, there = (labels[..., None] == classes for labels in (found.predicted, found.wanted))
    if found.counted is not None:
        predicted = predicted & found.counted[..., None]
    return torch.cat([predicted & there, predicted, there], dim=-1).sum(1).to(dtype)


def _own(
    name: str,
    reads: Callable[[Reading, Any, Any], Tensor],
    kind: Kind = "higher",
    per_client: PerClient | None = None,
    range: tuple[float, float] = (0.0, 1.0),
) -> Score:
    """A score that reads outputs and targets as the loss does."""
    return Score(name, partial(reads, Reading()), kind, per_client, reads, range=range)


accuracy = _own("accuracy", _right, "accuracy")
"""Share of right answers, in percent; of all positions that count, if samples have several."""
multilabel_accuracy = _own("multilabel_accuracy", _right, "accuracy")
"""Share of right labels, in percent, where a sample has several labels, each 0 or 1."""


def _f1(values: Tensor, lengths: Tensor) -> Tensor:
    right, predicted, there = segment_sums(values, lengths).chunk(3, dim=-1)
    each = 2 * right / (predicted + there)
    if each.shape[-1] == 2:
        return each[..., 1].nan_to_num(0.0)  # of class 1
    return each.nanmean(-1)  # over the classes that occur


f1 = _own("f1", _counts, per_client=_f1)
"""F1 of class 1 if there are two classes, else the mean over the classes that occur or are predicted."""


def _iou(values: Tensor, lengths: Tensor) -> Tensor:
    right, predicted, there = segment_sums(values, lengths).chunk(3, dim=-1)
    return (right / (predicted + there - right)).nanmean(-1)


iou = _own("iou", _counts, per_client=_iou)
"""Intersection over union of predicted and true positions, the mean over the classes that occur."""


def _margin(reading: Reading, outputs: Any, targets: Any) -> Tensor:
    logits = first_output(outputs)
    several = logits.shape[1:].numel()
    if targets.shape[1:].numel() != 1 or several > 2:
        raise InputError(
            f"AUC is for two classes, and the model has outputs of shape {tuple(logits.shape[1:])}; take f1"
        )
    flat = logits.flatten(1) if logits.dim() > 1 else logits[:, None]
    margin = flat[:, 0] if several == 1 else flat[:, 1] - flat[:, 0]
    return torch.stack([margin, (targets.reshape(len(targets)) > 0.5).to(margin.dtype)], dim=-1)


def _auc(values: Tensor, lengths: Tensor) -> Tensor:
    """How often a sample of class 1 has a larger output than one of class 0, ties counting half, by ranks."""
    segment = torch.repeat_interleave(lengths.to(values.device))
    return torch.stack([_auc_of_run(each.double(), segment, lengths) for each in values])


def _auc_of_run(values: Tensor, segment: Tensor, lengths: Tensor) -> Tensor:
    by_value = torch.argsort(values[:, 0], stable=True)
    order = by_value[torch.argsort(segment[by_value], stable=True)]
    margin, positive, owner = values[order, 0], values[order, 1], segment[order]
    new = torch.ones(len(order), dtype=torch.bool, device=values.device)
    new[1:] = (margin[1:] != margin[:-1]) | (owner[1:] != owner[:-1])
    group = new.cumsum(0) - 1  # samples of a client with equal outputs
    size = torch.bincount(group)
    start = (lengths.cumsum(0) - lengths).to(values.device)
    rank = (size.cumsum(0) - (size - 1) / 2)[group] - start[owner]  # from 1, the mean of equal ones
    ones, ranks = segment_sums(torch.stack([positive, positive * rank], 1), lengths).unbind(-1)
    zeros = lengths.to(values.device) - ones
    return (ranks - ones * (ones + 1) / 2) / (ones * zeros)  # NaN where a client has one class only


auc = _own("auc", _margin, per_client=_auc)
"""Area under the ROC curve; undefined for a client whose test samples are all of one class."""


def _difference(outputs: Any, targets: Any) -> Tensor:
    predicted = first_output(outputs)
    if not isinstance(targets, Tensor) or predicted.numel() != targets.numel():
        wanted = tuple(targets.shape[1:]) if isinstance(targets, Tensor) else "several tensors"
        raise InputError(
            f"outputs of shape {tuple(predicted.shape[1:])} and targets of shape {wanted} per sample cannot "
            "be subtracted: take another score, such as fairwind.scores.loss"
        )
    return predicted - targets.reshape(predicted.shape)


mae = Score("mae", lambda o, t: per_sample_mean(_difference(o, t).abs()), "lower", range=NOT_NEGATIVE)
"""Mean absolute error."""
mse = Score("mse", lambda o, t: per_sample_mean(_difference(o, t).square()), "lower", range=NOT_NEGATIVE)
"""Mean squared error."""
rmse = Score("rmse", mse.per_sample, "lower", lambda v, n: ratio(v, n).sqrt(), range=NOT_NEGATIVE)
"""Root of the mean squared error."""


def _squares(outputs: Any, targets: Tensor) -> Tensor:
    predicted = first_output(outputs)
    given = targets.reshape(len(predicted), -1).to(predicted.dtype)
    if given.shape[1] > 1:
        raise InputError(f"R² is for one number, and targets have {given.shape[1]}; take mse")
    error = _difference(outputs, targets).reshape(len(predicted))
    return torch.stack([error.square(), given[:, 0], given[:, 0].square()], dim=-1)


def _r2(values: Tensor, lengths: Tensor) -> Tensor:
    error, mean, square = segment_means(values, lengths).unbind(-1)
    variance = square - mean.square()
    return torch.where(variance > 1e-12 * square, 1 - error / variance, torch.nan)


r2 = Score("r2", _squares, "higher", _r2, range=(-math.inf, 1.0))
"""R², the share of the variance of a client's targets that is explained; undefined if all are equal."""


def _surprise(reading: Reading, outputs: Any, targets: Any) -> Tensor:
    logits = first_output(outputs)
    axis = class_axis(logits, targets, second=reading.classes_second)
    logits = logits.movedim(axis, -1)
    classes = torch.arange(logits.shape[-1], device=logits.device)
    losses = logits.logsumexp(-1) - torch.where(targets[..., None] == classes, logits, 0).sum(-1)
    if reading.ignored is None:
        return per_sample_mean(losses)
    counted = targets != reading.ignored
    kept = torch.where(counted, losses, 0)
    return torch.stack([t.reshape(len(t), -1).sum(1) for t in (kept, counted.to(kept.dtype))], dim=-1)


perplexity = _own("perplexity", _surprise, "lower", lambda v, n: ratio(v, n).exp(), NOT_NEGATIVE)
"""exp of the mean cross-entropy over a client's samples, or over their positions that count."""


def _unknown_loss(outputs: Any, targets: Any) -> Tensor:
    raise InputError("the score 'loss' is known only together with a task's loss")


loss = Score("loss", _unknown_loss, "lower")
"""The task's loss."""
