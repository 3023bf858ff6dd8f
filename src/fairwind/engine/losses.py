"""Losses: a number for each sample, from a model's outputs and the targets."""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairwind.errors import InputError
from fairwind.scores import first_output, per_sample_mean

Loss = Callable[[Any, Any], Tensor]  # outputs (B, ...), targets (B, ...) -> (B,)


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Each sample's cross-entropy, from outputs (B, ..., C) and class labels (B, ...).

    Averaged over positions, if a sample has several; uses the first of a tuple of outputs. Written without
    a gather, whose batching rule would make the compiler fix the number of rows.
    """
    logits = first_output(outputs)
    classes = torch.arange(logits.shape[-1], device=logits.device)
    return per_sample_mean(
        logits.logsumexp(-1) - torch.where(targets[..., None] == classes, logits, 0).sum(-1)
    )


def per_sample(loss: Any) -> Loss:
    """A per-sample version of a user's loss; PyTorch's losses reduce a batch to one number."""
    if loss is F.cross_entropy or (type(loss) is nn.CrossEntropyLoss and _plain(loss)):
        return _cross_entropy
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        module: Any = copy.deepcopy(loss)
        module.reduction = "none"
        return partial(_reduced, module)
    if not callable(loss):
        raise InputError(
            f"{loss!r} is not a loss: give a function of outputs and targets, or one of PyTorch's"
        )
    name = getattr(loss, "__name__", "")
    own: Any = getattr(F, name, None)
    if own is loss:
        if "reduction" not in inspect.signature(own).parameters:
            raise InputError(f"F.{name} is not a loss: give a function of outputs and targets")
        return partial(_reduced, partial(own, reduction="none"))
    given: Loss = loss
    return given


def _plain(loss: nn.CrossEntropyLoss) -> bool:
    return loss.weight is None and loss.label_smoothing == 0 and loss.ignore_index < 0


def _cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """A PyTorch loss whose classes are the second dimension of the outputs."""
    logits = first_output(outputs)
    if targets.is_floating_point() or logits.dim() > 2:
        return per_sample_mean(F.cross_entropy(logits, targets, reduction="none"))
    return cross_entropy(logits, targets)


def _reduced(loss: Callable[..., Tensor], outputs: Any, targets: Tensor) -> Tensor:
    """The mean over all dimensions of a sample."""
    predicted = first_output(outputs)
    if targets.shape != predicted.shape and targets.numel() == predicted.numel():
        targets = targets.reshape(predicted.shape)  # (B,) beside (B, 1)
    if predicted.is_floating_point() and not targets.is_floating_point() and targets.shape == predicted.shape:
        targets = targets.to(predicted.dtype)
    return per_sample_mean(loss(predicted, targets))


def for_one_model(loss: Loss) -> Loss:
    """The same loss for one model at a time: cross-entropy by PyTorch's own kernel, which is faster there."""
    return partial(_by_kernel, loss is _cross_entropy, "none") if needs_labels(loss) else loss


def mean_of(loss: Loss) -> Loss:
    """The mean of the same loss over a batch, for one model at a time."""
    if needs_labels(loss):
        return partial(_by_kernel, loss is _cross_entropy, "mean")
    return lambda outputs, targets: loss(outputs, targets).mean()


def _by_kernel(classes_second: bool, reduction: str, outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy; the classes are the second dimension of the outputs, or the last."""
    logits = first_output(outputs)
    if logits.dim() > 2 and not classes_second:
        logits = logits.movedim(-1, 1)
    labels = targets if targets.is_floating_point() else targets.long()
    losses = F.cross_entropy(logits, labels, reduction=reduction)
    return losses if reduction == "mean" else per_sample_mean(losses)


def needs_labels(loss: Loss) -> bool:
    """Whether it compares outputs (B, C) with class labels."""
    return loss in (cross_entropy, _cross_entropy)
