"""How outputs and targets are read: which dimension counts classes, and which classes they mean."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairwind.errors import InputError


class Reading(NamedTuple):
    """How a loss reads outputs and targets; scores read them in the same way."""

    classes_second: bool = False
    """Whether the classes are the second dimension of outputs, where both the second and the last fit."""
    threshold: float | None = None
    """A single output above it means class 1: 0 for logits, 0.5 for probabilities; None if not known."""
    ignored: int | None = None
    """The label of positions that do not count, if there are any."""
    soft: bool = False
    """Whether targets are probabilities of classes."""


def first_output(outputs: Any) -> Tensor:
    """The tensor that is compared with the targets: the first of several outputs."""
    first = outputs[0] if isinstance(outputs, tuple | list) else outputs
    if not isinstance(first, Tensor):
        raise InputError(
            f"the model's output is a {type(first).__name__}, which no loss or score of PyTorch or Fairwind "
            "reads: give a loss and a score of your own, or let the model return a tensor"
        )
    return first


def per_sample_mean(values: Tensor) -> Tensor:
    """The mean over all but the first dimension."""
    return values if values.ndim == 1 else values.flatten(1).mean(1)


def class_axis(outputs: Tensor, labels: Tensor, *, second: bool) -> int:
    """The dimension of outputs that counts classes: the last or the second, preferred if both fit."""
    one, all_labels = tuple(outputs.shape[1:]), tuple(labels.shape[1:])
    fit = {-1: one[:-1] == all_labels, 1: one[1:] == all_labels}
    if len(one) != len(all_labels) + 1 or not any(fit.values()):
        raise InputError(
            f"outputs of shape {one} and labels of shape {all_labels} per sample do not fit: outputs need "
            "one more dimension, the classes"
        )
    return next(axis for axis in ((1, -1) if second else (-1, 1)) if fit[axis])


class Labels(NamedTuple):
    """Predicted and true classes of all positions of samples, (B, N) each."""

    predicted: Tensor  # −1 where outputs are not finite
    wanted: Tensor
    counted: Tensor | None  # which positions count, if not all do
    classes: int


def labels_of(reading: Reading, outputs: Any, targets: Any) -> Labels:
    """Classes, from outputs with a number for every class, or with one number: how likely class 1 is."""
    logits = first_output(outputs)
    if not isinstance(targets, Tensor):
        raise InputError("targets are several tensors: give a score of your own that reads them")
    if reading.soft:
        axis = 1 if reading.classes_second else -1
        predicted, wanted, classes = logits.argmax(axis), targets.argmax(axis), logits.shape[axis]
        whole = torch.isfinite(logits).all(axis)
    elif logits.shape[1:].numel() == targets.shape[1:].numel():
        if reading.threshold is None:
            raise InputError(
                "the model has one output per label, a logit or a probability, and the loss does not say "
                "which: give scores.accuracy.above(0) for logits, or .above(0.5) for probabilities"
            )
        predicted, wanted, classes = logits > reading.threshold, targets > 0.5, 2
        whole = torch.isfinite(logits)
    else:
        if targets.is_floating_point():
            raise InputError("targets are not class labels, but decimal numbers: take another score")
        axis = class_axis(logits, targets, second=reading.classes_second)
        predicted, wanted, classes = logits.argmax(axis), targets, logits.shape[axis]
        whole = torch.isfinite(logits).all(axis)
    positions = targets.shape[1:].numel() if not reading.soft else wanted.shape[1:].numel()
    predicted = torch.where(whole, predicted.long(), -1).reshape(len(logits), positions)
    wanted = wanted.long().reshape(predicted.shape)
    counted = None if reading.ignored is None else wanted != reading.ignored
    return Labels(predicted, wanted, counted, classes)
