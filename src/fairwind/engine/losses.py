"""What a model's outputs are worth: a number for each sample."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Loss = Callable[[Any, Any], Tensor]  # outputs (B, ...), targets (B, ...) -> (B,)


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Each sample's cross-entropy, from outputs (B, ..., C) and class labels (B, ...).

    The mean over positions, where a sample has several. Of a tuple of outputs the first counts. Written
    without a gather, whose batching rule makes the compiler fix the number of rows.
    """
    logits = first_output(outputs)
    classes = torch.arange(logits.shape[-1], device=logits.device)
    losses = logits.logsumexp(-1) - torch.where(targets[..., None] == classes, logits, 0).sum(-1)
    return losses if losses.ndim == 1 else losses.flatten(1).mean(1)


def accuracy(outputs: Any, targets: Tensor) -> Tensor:
    """1 where the largest output is the target's; outputs that are not finite predict nothing."""
    logits = first_output(outputs)
    right = ((logits.argmax(-1) == targets) & torch.isfinite(logits).all(-1)).to(logits.dtype)
    return right if right.ndim == 1 else right.flatten(1).mean(1)


def first_output(outputs: Any) -> Tensor:
    """The tensor that is compared with the targets."""
    first: Tensor = outputs[0] if isinstance(outputs, tuple | list) else outputs
    return first
