"""Fits scores to a loss, a model's outputs and the targets, or refuses them."""

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairwind.data.samples import kind, tensors
from fairwind.engine.losses.loss import IGNORED, Loss, entropies
from fairwind.engine.modules import read
from fairwind.errors import InputError, first_line, shown
from fairwind.scores import Score, accuracy, as_scores, auc, f1, iou, multilabel_accuracy, perplexity
from fairwind.scores import loss as loss_score
from fairwind.scores.reading import Reading, class_axis, first_output

OF_LABELS = {score.name for score in (accuracy, multilabel_accuracy, f1, iou, auc)}


def fit_scores(score: Any, loss: Loss, raw: Any, targets: Any, every_target: Any) -> tuple[Score, ...]:
    """The scores that are asked for, or the one that follows from the loss, reading outputs as it does.

    `raw` outputs and `targets` are those of a few samples, `every_target` those of all.
    """
    outputs = read(raw)
    aligned = not loss.own or _aligned(loss, raw, targets)
    asked = as_scores(score if score is not None else loss.score or _default(loss, outputs, targets, aligned))
    found = []
    for each in asked:
        if each is loss_score:
            found.append(loss.as_score)
        elif each is perplexity and loss.own:
            found.append(replace(loss.as_score, name=each.name, per_client=each.per_client))
        elif each.reads is not None and not aligned:
            raise InputError(
                f"the score {each.name!r} does not fit: the model's own loss is not the cross-entropy of its "
                "outputs and the targets (are they shifted by one?); take 'loss' or 'perplexity', or give a "
                "score of your own"
            )
        else:
            found.append(each.reading(loss.reading))
            _check(found[-1], loss, outputs, targets, every_target)
    return tuple(found)


def _default(loss: Loss, outputs: Any, targets: Any, aligned: bool) -> Score:
    """Accuracy, if targets are labels of the classes of outputs; else the loss itself."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or targets.is_floating_point():
        return loss_score
    if loss.own and outputs.dim() == 3:
        return perplexity  # of a language model
    labels = targets.dim() == 1 and outputs.dim() == 2 and outputs.shape[1] > 1
    return accuracy if labels and aligned else loss_score


def _aligned(loss: Loss, raw: Any, targets: Any) -> bool:
    """Whether a model's outputs are for the targets at the same places: with several, its own loss tells."""
    if isinstance(targets, Tensor) and targets.dim() == 1:
        return True
    try:
        logits = first_output(read(raw))
        axis = class_axis(logits, targets, second=False)
        losses, counted = entropies(logits, targets, axis=axis, ignored=IGNORED)
        assert counted is not None
        return torch.allclose(losses.sum() / counted.sum(), loss.function(raw, targets).mean(), rtol=1e-3)
    except (InputError, AttributeError, RuntimeError):  # whatever else is compared
        return False


def _check(score: Score, loss: Loss, outputs: Any, targets: Any, every_target: Any) -> None:
    """Refuses a score without one number per sample, or that right outputs do not bring to its best value."""
    samples = len(tensors(targets)[0])
    try:
        found = score.per_sample(outputs, targets)
        if not isinstance(found, Tensor):
            raise InputError(f"it returns {shown(found)}, and not a tensor (B,)")
        if score.per_client is not None:
            score.of_clients(found[None], torch.tensor([samples]))
        if score.reads is not None and score.name in OF_LABELS:
            _check_two_classes(first_output(outputs), targets, every_target)
    except InputError as error:
        raise InputError(f"the score {score.name!r} does not fit: {first_line(error)}") from error
    except Exception as error:  # whatever a user's score raises
        given = f"outputs ({kind(outputs)}) and targets ({kind(targets)})"
        raise InputError(
            f"the score {score.name!r} fails on {given}: {type(error).__name__}: {first_line(error)}; give "
            "another score, such as score='loss'"
        ) from error
    shape = tuple(found.shape)
    if shape[:1] != (samples,) or len(shape) > (2 if score.per_client or score.reads else 1):
        raise InputError(f"the score {score.name!r} is not one number per sample but {shape} for {samples}")
    if score.kind == "accuracy" or score.name in OF_LABELS:
        _check_best(score, loss.reading, outputs, targets, found)


def _check_two_classes(outputs: Tensor, targets: Any, every_target: Any) -> None:
    """Refuses numbers other than 0 and 1 (or −1 and 1) as labels of single outputs."""
    if not isinstance(targets, Tensor) or outputs[0].numel() != targets[0].numel():
        return
    if targets.shape == outputs.shape and targets.is_floating_point() and outputs.dim() > 1:
        sums = every_target.sum(1)  # probabilities of classes are read by cross-entropy
        if outputs.shape[1] > 1 and torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
            return
    other = every_target[(every_target != 0) & (every_target.abs() != 1)]
    if len(other):
        raise InputError(f"single outputs are for labels 0 and 1, and a target is {float(other[0]):g}")


def _check_best(score: Score, reading: Reading, outputs: Any, targets: Any, found: Tensor) -> None:
    """Whether right outputs, made from the targets, are scored as right: in the loss's reading, or in any."""
    logits, own = outputs[0] if isinstance(outputs, tuple | list) else outputs, score.reads is None
    if not (isinstance(logits, Tensor) and isinstance(targets, Tensor)):
        return
    numbers, reached = [found], []
    for right in _right_outputs(logits, targets, reading, only=not own):
        try:
            values = score.per_sample((right, *outputs[1:]) if logits is not outputs else right, targets)
        except Exception:  # whatever a user's score makes of outputs of that kind
            continue
        numbers.append(values)
        reached.append(score.of_clients(values[None].cpu(), torch.tensor([len(targets)])).item())
    largest = max(values.max().item() for values in numbers)
    if own and score.percent and largest > 1:
        raise InputError(
            f"the score {score.name!r} is an accuracy, but gives {largest:.4g} for a sample: it must be from "
            "0 to 1"
        )
    best = 100 if score.percent else 1
    if not reached or any(value != value or value > 0.999 * best for value in reached):
        return
    what = f"the score {score.name!r} is {max(reached):.4g} for outputs that are right, and not {best}"
    given = f"outputs ({kind(outputs)}) and targets ({kind(targets)})"
    if not own:
        raise InputError(f"{what}, on {given}: take another score")
    warnings.warn(f"{what}: does it read {given} as the loss does?", stacklevel=2)


def _right_outputs(logits: Tensor, targets: Tensor, reading: Reading, *, only: bool) -> list[Tensor]:
    """Outputs that predict the targets: in the reading of the loss, or (unless `only`) in all readings."""
    if logits.shape == targets.shape and (reading.soft or not only):
        found = [targets.to(logits.dtype)]
        if only:
            return found
    else:
        found = []
    if logits.numel() == targets.numel():
        middle = (0.0, 0.5) if reading.threshold is None or not only else (reading.threshold,)
        signs = torch.where(targets > 0.5, 1, -1).reshape(logits.shape).to(logits.dtype)
        return [*found, *(at + 0.5 * signs for at in middle)]
    if targets.is_floating_point():
        return found
    for second in (reading.classes_second,) if only else (False, True):
        try:
            axis = class_axis(logits, targets, second=second)
        except InputError:
            continue
        classes = torch.arange(logits.shape[axis], device=targets.device)
        found.append((targets[..., None] == classes).to(logits.dtype).movedim(-1, axis))
    return found
