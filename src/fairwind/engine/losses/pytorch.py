"""PyTorch's losses, each sample by itself: what they are given, what they divide by, and how they read."""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairwind import scores
from fairwind.engine.losses.loss import Loss, entropies
from fairwind.errors import InputError
from fairwind.scores import Score
from fairwind.scores.reading import Reading, class_axis, first_output, per_sample_mean

Arguments = tuple[Any, ...]


class Form(NamedTuple):
    """How a loss of PyTorch is called, and how it reads outputs."""

    arrange: Callable[[Any, Any], Arguments]
    score: Score | None = None
    threshold: float | None = None


def _same_shape(outputs: Any, targets: Any) -> Arguments:
    """One output tensor, and targets of its shape and type; (B,) beside (B, 1) are the same."""
    predicted = first_output(outputs)
    return predicted, _like(predicted, targets)


def _like(predicted: Tensor, targets: Tensor) -> Tensor:
    if targets.shape != predicted.shape:
        if targets.numel() != predicted.numel():
            raise InputError(
                f"outputs of shape {tuple(predicted.shape[1:])} and targets of shape "
                f"{tuple(targets.shape[1:])} per sample do not fit: this loss needs equal shapes"
            )
        targets = targets.reshape(predicted.shape)
    return targets.to(predicted.dtype)


def _as_given(outputs: Any, targets: Any) -> Arguments:
    return first_output(outputs), targets


def _mean_and_variance(outputs: Any, targets: Any) -> Arguments:
    mean, variance = _several(outputs, 2, "the mean and the variance")
    return mean, _like(mean, targets), variance


def _pair(outputs: Any, targets: Any) -> Arguments:
    one, two = _several(outputs, 2, "the two that are compared")
    same = targets.numel() == one.numel()
    return one, two, targets.reshape(one.shape) if same else targets


def _triple(outputs: Any, targets: Any) -> Arguments:
    return _several(outputs, 3, "anchor, positive and negative")


def _sequences(outputs: Any, targets: Any) -> Arguments:
    labels, inputs, lengths = _several(
        targets, 3, "labels, lengths of inputs and lengths of labels", "targets"
    )
    return first_output(outputs), labels, inputs, lengths


def _several(given: Any, count: int, what: str, whose: str = "outputs") -> Arguments:
    if not isinstance(given, tuple | list) or len(given) != count:
        raise InputError(f"this loss needs {count} tensors as {whose}: {what}")
    return tuple(given)


FORMS: dict[type[nn.Module], Form] = {
    nn.L1Loss: Form(_same_shape, scores.mae),
    nn.MSELoss: Form(_same_shape, scores.rmse),
    nn.HuberLoss: Form(_same_shape, scores.rmse),
    nn.SmoothL1Loss: Form(_same_shape, scores.rmse),
    nn.GaussianNLLLoss: Form(_mean_and_variance, scores.rmse),
    nn.PoissonNLLLoss: Form(_same_shape),
    nn.KLDivLoss: Form(_same_shape),
    nn.BCELoss: Form(_same_shape, scores.accuracy, 0.5),
    nn.BCEWithLogitsLoss: Form(_same_shape, scores.accuracy, 0.0),
    nn.SoftMarginLoss: Form(_same_shape, scores.accuracy, 0.0),
    nn.MultiLabelSoftMarginLoss: Form(_same_shape, scores.accuracy, 0.0),
    nn.HingeEmbeddingLoss: Form(_same_shape),
    nn.MultiMarginLoss: Form(_as_given, scores.accuracy),
    nn.MultiLabelMarginLoss: Form(_as_given),
    nn.CosineEmbeddingLoss: Form(_pair),
    nn.MarginRankingLoss: Form(_pair),
    nn.TripletMarginLoss: Form(_triple),
    nn.TripletMarginWithDistanceLoss: Form(_triple),
    nn.CTCLoss: Form(_sequences),
}
CLASSES = nn.CrossEntropyLoss, nn.NLLLoss, nn.NLLLoss2d
FUNCTIONS: dict[Any, type[nn.Module]] = {
    F.l1_loss: nn.L1Loss,
    F.mse_loss: nn.MSELoss,
    F.huber_loss: nn.HuberLoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.gaussian_nll_loss: nn.GaussianNLLLoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.kl_div: nn.KLDivLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.soft_margin_loss: nn.SoftMarginLoss,
    F.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
    F.hinge_embedding_loss: nn.HingeEmbeddingLoss,
    F.multi_margin_loss: nn.MultiMarginLoss,
    F.multilabel_margin_loss: nn.MultiLabelMarginLoss,
    F.cosine_embedding_loss: nn.CosineEmbeddingLoss,
    F.margin_ranking_loss: nn.MarginRankingLoss,
    F.triplet_margin_loss: nn.TripletMarginLoss,
    F.triplet_margin_with_distance_loss: nn.TripletMarginWithDistanceLoss,
    F.ctc_loss: nn.CTCLoss,
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
}


def as_module(loss: Any) -> Any:
    """The module of one of PyTorch's functions, with the options that a `functools.partial` gives it."""
    function, options = loss, {}
    if isinstance(loss, partial) and not loss.args:
        function, options = loss.func, loss.keywords
    known = inspect.isfunction(function) or inspect.isbuiltin(function)
    if known and function in FUNCTIONS:
        return FUNCTIONS[function](**options)
    name = getattr(function, "__name__", "")
    if known and getattr(F, name, None) is function:
        raise InputError(f"F.{name} is not a loss: give a function of outputs and targets")
    return loss


def is_known(loss: Any) -> bool:
    """Whether it is one of PyTorch's losses, and no class derived from them."""
    return type(loss) in FORMS or type(loss) in CLASSES


def fitted(loss: Any, outputs: Any, targets: Any, device: torch.device) -> Loss:
    """One of PyTorch's losses, for outputs of some samples and the targets of all."""
    module = copy.deepcopy(loss).to(device)
    if isinstance(module, CLASSES) and not targets.is_floating_point():
        return entropy_loss(module, first_output(outputs), targets, name=type(module).__name__, second=True)
    return _elementwise(module, targets)


def entropy_loss(module: Any, outputs: Tensor, targets: Tensor, *, name: str, second: bool) -> Loss:
    """Cross-entropy or negative log-likelihood of class labels, with the options of a module.

    Where it is plain, one model takes PyTorch's own kernel, which is faster.
    """
    axis = class_axis(outputs, targets[: len(outputs)], second=second)
    ignored = module.ignore_index if bool((targets == module.ignore_index).any()) else None
    smoothing: float = getattr(module, "label_smoothing", 0.0)
    logarithms = not isinstance(module, nn.CrossEntropyLoss)
    summed, weighted = module.reduction == "sum", module.weight is not None or ignored is not None
    weighted &= module.reduction == "mean"

    def function(outputs: Any, targets: Tensor) -> Any:
        losses, weights = entropies(
            first_output(outputs),
            targets,
            axis=axis,
            weight=module.weight,
            ignored=ignored,
            smoothing=smoothing,
            logarithms=logarithms,
        )
        if weighted and weights is not None:
            return _sums(losses), _sums(weights)
        return _sums(losses) if summed else per_sample_mean(losses)

    plain = not (module.weight is not None or ignored is not None or smoothing or logarithms or summed)
    kernel = partial(_by_kernel, axis) if plain else None
    return Loss(
        name,
        function,
        "sum" if summed else "mean",
        weighted,
        fused=partial(kernel, "mean") if kernel else None,
        kernel=partial(kernel, "none") if kernel else None,
        reading=Reading(classes_second=second, ignored=ignored),
        score=scores.iou if targets.dim() > 2 else scores.accuracy,
        classifies=plain and targets.dim() == 1,
    )


def _sums(values: Tensor) -> Tensor:
    """The sum over all but the first dimension."""
    return values if values.ndim == 1 else values.flatten(1).sum(1)


def _by_kernel(axis: int, reduction: str, outputs: Any, targets: Tensor) -> Tensor:
    """Plain cross-entropy by PyTorch's own kernel."""
    logits = first_output(outputs)
    if logits.dim() > 2:
        logits = logits.movedim(axis, 1)
    losses = F.cross_entropy(logits, targets.long(), reduction=reduction)
    return losses if reduction == "mean" else per_sample_mean(losses)


def _elementwise(module: Any, targets: Any) -> Loss:
    """A loss whose mean is over all numbers, all samples counting the same."""
    reduction = module.reduction
    single = copy.deepcopy(module)
    single.reduction = "none"
    soft = isinstance(module, CLASSES)  # probabilities of classes
    form = FORMS.get(type(module), Form(_as_given, scores.accuracy))
    lengths = isinstance(module, nn.CTCLoss) and reduction == "mean"

    def function(outputs: Any, targets: Any) -> Tensor:
        given = form.arrange(outputs, targets)
        losses: Tensor = single(*given)
        if lengths:
            losses = losses / given[3].clamp(min=1)
        return _sums(losses) if reduction in ("sum", "batchmean") else per_sample_mean(losses)

    fused = None if reduction == "none" else lambda outputs, targets: module(*form.arrange(outputs, targets))
    how: Any = "sum" if reduction == "sum" else "mean"
    reading = Reading(classes_second=True, threshold=form.threshold, soft=soft)
    score = _score(form, targets)
    return Loss(type(module).__name__, function, how, fused=fused, reading=reading, score=score)


def _score(form: Form, targets: Any) -> Score | None:
    """The score that fits the loss; of two classes only if all targets are one of them."""
    if form.threshold is None or not isinstance(targets, Tensor):
        return form.score
    if not bool(((targets == 0) | (targets == 1) | (targets == -1)).all()):
        return None
    if targets[0].numel() == 1:
        return form.score
    return scores.iou if targets.dim() > 2 else scores.multilabel_accuracy
