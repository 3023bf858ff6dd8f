"""Scores: how well a model works for a client, from its outputs for the client's test samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fairwind.errors import InputError

Kind = Literal["accuracy", "higher", "lower"]
"""A share of correct predictions; another number where higher is better; or one where lower is better."""
PerSample = Callable[[Any, Any], Tensor]  # outputs (B, ...), targets (B, ...) -> (B,), or (B, S)
PerClient = Callable[[Tensor, Tensor], Tensor]  # (R, M, S) of all samples, lengths (K,) -> (R, K)


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

    @property
    def percent(self) -> bool:
        """Whether it is shown as a percentage."""
        return self.kind == "accuracy"

    @property
    def sign(self) -> int:
        """1 where larger is better, else −1."""
        return -1 if self.kind == "lower" else 1

    def of_clients(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Each client's score (R, K) from (R, M) or (R, M, S), NaN without samples; accuracies in percent."""
        found = (self.per_client or _mean)(values if values.dim() > 2 else values[..., None], lengths)
        there = lengths.to(values.device) > 0
        return torch.where(there, 100 * found if self.percent else found, torch.nan)


def as_scores(given: Any) -> tuple[Score, ...]:
    """A user's scores: a score or a function, or several of them; the first is the main one."""
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


def _mean(values: Tensor, lengths: Tensor) -> Tensor:
    return segment_means(values, lengths)[..., 0]


def first_output(outputs: Any) -> Tensor:
    """The tensor that is compared with the targets: the first of several outputs."""
    first: Tensor = outputs[0] if isinstance(outputs, tuple | list) else outputs
    return first


def per_sample_mean(values: Tensor) -> Tensor:
    """The mean over all but the first dimension."""
    return values if values.ndim == 1 else values.flatten(1).mean(1)


def _predicted(outputs: Any) -> Tensor:
    """The class of the largest output, or that of the sign where there is one output."""
    logits = first_output(outputs)
    return logits.argmax(-1) if logits.shape[-1] > 1 else (logits[..., 0] > 0).long()


def _right(outputs: Any, targets: Tensor) -> Tensor:
    """1 where the largest output is the target's; outputs that are not finite count as wrong."""
    logits = first_output(outputs)
    right = (logits.argmax(-1) == targets) & torch.isfinite(logits).all(-1)
    return per_sample_mean(right.to(logits.dtype))


accuracy = Score("accuracy", _right, "accuracy")
"""Share of right answers, in percent."""


def _counts(outputs: Any, targets: Tensor) -> Tensor:
    """For every class: true positives, predictions, and occurrences."""
    logits = first_output(outputs)
    classes = torch.arange(max(2, logits.shape[-1]), device=logits.device)
    predicted, there = (t[:, None] == classes for t in (_predicted(outputs), targets.view(len(targets))))
    return torch.cat([predicted & there, predicted, there], dim=-1).to(logits.dtype)


def _f1(values: Tensor, lengths: Tensor) -> Tensor:
    right, predicted, there = segment_sums(values, lengths).chunk(3, dim=-1)
    each = 2 * right / (predicted + there)
    if each.shape[-1] == 2:
        return each[..., 1].nan_to_num(0.0)  # of class 1
    return each.nanmean(-1)  # over the classes that occur


f1 = Score("f1", _counts, "higher", _f1)
"""F1 of class 1 if there are two classes, else the mean over the classes that a client has."""


def _margin(outputs: Any, targets: Tensor) -> Tensor:
    logits = first_output(outputs)
    if logits.shape[-1] > 2:
        raise InputError(f"AUC is for two classes, and the model has {logits.shape[-1]} outputs; take f1")
    margin = logits[..., 0] if logits.shape[-1] == 1 else logits[..., 1] - logits[..., 0]
    return torch.stack([margin, targets.view(len(targets)).to(margin.dtype)], dim=-1)


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


auc = Score("auc", _margin, "higher", _auc)
"""Area under the ROC curve; undefined for a client whose test samples are all of one class."""


def _difference(outputs: Any, targets: Tensor) -> Tensor:
    predicted = first_output(outputs)
    return predicted - targets.reshape(predicted.shape)


mae = Score("mae", lambda o, t: per_sample_mean(_difference(o, t).abs()), "lower")
"""Mean absolute error."""
mse = Score("mse", lambda o, t: per_sample_mean(_difference(o, t).square()), "lower")
"""Mean squared error."""
rmse = Score("rmse", mse.per_sample, "lower", lambda v, n: _mean(v, n).sqrt())
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


r2 = Score("r2", _squares, "higher", _r2)
"""R², the share of the variance of a client's targets that is explained; undefined if all are equal."""


def _surprise(outputs: Any, targets: Tensor) -> Tensor:
    logits = first_output(outputs)
    classes = torch.arange(logits.shape[-1], device=logits.device)
    losses = logits.logsumexp(-1) - torch.where(targets[..., None] == classes, logits, 0).sum(-1)
    return per_sample_mean(losses)


perplexity = Score("perplexity", _surprise, "lower", lambda v, n: _mean(v, n).exp())
"""exp of the mean cross-entropy over a client's samples."""
