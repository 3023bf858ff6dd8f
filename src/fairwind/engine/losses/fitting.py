"""Fits a user's loss to a model's outputs and the targets, or refuses it."""

import copy
import hashlib
import inspect
import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fairwind.data.federation import Federation
from fairwind.data.samples import hash_into, mapped, refuse_rounded, take, tensors
from fairwind.engine import tuning
from fairwind.engine.losses.loss import IGNORED, Loss, cross_entropy
from fairwind.engine.losses.pytorch import CLASSES, as_module, entropy_loss, fitted, is_known
from fairwind.engine.modules import read
from fairwind.errors import InputError, first_line
from fairwind.scores.reading import class_axis, first_output

BINARY = nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss
SIGNS = nn.SoftMarginLoss, nn.HingeEmbeddingLoss, nn.CosineEmbeddingLoss, nn.MarginRankingLoss


def check_loss(loss: Any) -> None:
    """Refuses what cannot be a loss, whatever the model."""
    if loss == "model":
        return
    if not callable(loss):
        raise InputError(
            f"{loss!r} is not a loss: give a function of outputs and targets, one of PyTorch's, or 'model' "
            "for a model that computes its own"
        )
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise InputError(
            f"the loss {type(loss).__name__} has parameters, which would not be trained: make it a part of "
            "the model, and let the model return the loss (loss='model')"
        )
    as_module(loss)


def loss_name(loss: Any) -> str:
    """The name of a loss, with options that are not PyTorch's defaults."""
    if isinstance(loss, str):
        return loss
    module = as_module(loss)
    if not is_known(module):
        return getattr(loss, "__name__", type(loss).__name__)
    usual = type(module)()
    options = [
        f"{name}={getattr(value, '__name__', value)}"
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and value != getattr(usual, name)
    ]
    options += [f"{name}={_digest(value)}" for name, value in module.named_buffers()]
    return f"{type(module).__name__}({', '.join(options)})" if options else type(module).__name__


def _digest(value: Tensor) -> str:
    seen = hashlib.sha256()
    hash_into(seen, [value])
    return seen.hexdigest()[:12]


def fit_loss(loss: Any, raw: Any, targets: Any, federation: Federation, batch_size: int) -> Loss:
    """The loss for this model, given its outputs for a few samples and their targets."""
    check_loss(loss)
    if loss == "model":
        _own_loss(raw, targets)
        return Loss("model", _own_loss, "batch", batch_size=batch_size, own=True)
    outputs, given = read(raw), as_module(loss)
    known = is_known(given)
    for clients in filter(None, (federation, federation.new_clients)):
        if loss is cross_entropy or (known and isinstance(given, CLASSES)):
            check_labels(clients, outputs, given)
        elif known and isinstance(given, (*BINARY, *SIGNS)):
            check_values(clients, given)
        elif known and isinstance(clients.targets, Tensor):
            refuse_rounded(clients.targets, first_output(outputs).dtype, "targets", clients.whose)
    if loss is cross_entropy:
        assert isinstance(federation.targets, Tensor)
        usual, first = nn.CrossEntropyLoss(), first_output(outputs)
        return entropy_loss(usual, first, federation.targets, name="cross_entropy", second=False)
    if known:
        return fitted(given, outputs, federation.targets, federation.device)
    if isinstance(given, nn.Module):  # its buffers go along
        given = copy.deepcopy(given).to(federation.device)
    return _of_user(given, outputs, targets, batch_size)


def _own_loss(raw: Any, targets: Any) -> Tensor:
    loss = getattr(raw, "loss", None)
    if not isinstance(loss, Tensor):
        raise InputError(
            f"loss='model', but the model's output, a {type(raw).__name__}, has no loss: let it return an "
            "object with `loss` and `logits` (give it the labels as an input), or give another loss"
        )
    return loss


def _of_user(loss: Any, outputs: Any, targets: Any, batch_size: int) -> Loss:
    """A user's function: it returns losses of samples (B,), a pair of those and weights, or one number."""
    name, samples = loss_name(loss), len(tensors(targets)[0])
    masked = _takes_mask(loss)
    every = torch.ones(samples, dtype=torch.bool, device=tensors(targets)[0].device)
    with _Broadcasts() as broadcasts:
        found = loss(outputs, targets, mask=every) if masked else loss(outputs, targets)
    broadcasts.refuse()
    if masked:
        _check_mask(loss, outputs, targets, every)
        return Loss(name, loss, "batch", masked=True, batch_size=batch_size)
    if isinstance(found, tuple | list) and len(found) == 2:
        shapes = [tuple(each.shape) for each in found]
        if shapes != [(samples,)] * 2:
            raise InputError(
                f"the loss returns a pair of shapes {shapes} for {samples} samples: give each sample's sum "
                "(B,) and what it adds to the divisor (B,)"
            )
        _check_weights(loss, outputs, targets, found[1])
        return Loss(name, loss, weighted=True, score=None)
    if not isinstance(found, Tensor):
        raise InputError(f"the loss returns a {type(found).__name__}, not a tensor")
    if found.dim() == 0:
        return Loss(name, loss, "batch", batch_size=batch_size)
    if tuple(found.shape) != (samples,):
        raise InputError(
            f"the loss is not one number per sample but {tuple(found.shape)} for {samples}; let it return "
            "the losses of a batch (B,), as with reduction='none', or one number for the batch"
        )
    if _mixes(loss, outputs, targets, found):
        return Loss(name, loss, "batch", batch_size=batch_size)
    return Loss(name, loss)


def _takes_mask(loss: Any) -> bool:
    try:
        return "mask" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # of a builtin
        return False


def _mixes(loss: Any, outputs: Any, targets: Any, together: Tensor) -> bool:
    """Whether a sample's loss depends on the others of its batch."""
    count = len(together)
    if any(len(t) != count for t in tensors(outputs)):
        return False  # outputs that are not (B, …) cannot be divided
    for i in range(count):
        one = slice(i, i + 1)
        alone = loss(take(outputs, one), take(targets, one))
        if not torch.allclose(together[one], alone.reshape(1), rtol=1e-3, atol=1e-5, equal_nan=True):
            return True
    return False


def _check_mask(loss: Any, outputs: Any, targets: Any, every: Tensor) -> None:
    """Refuses a function that does not leave out the samples that are masked."""
    if len(every) < 2:
        return
    some, but_last = every.clone(), slice(0, len(every) - 1)
    some[-1] = False
    left_out = loss(outputs, targets, mask=some).mean()
    without = loss(take(outputs, but_last), take(targets, but_last), mask=every[but_last]).mean()
    if not torch.allclose(left_out, without, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise InputError(
            f"the loss takes a mask, but is {left_out.item():.4g} with a sample masked and "
            f"{without.item():.4g} without that sample: it must leave out samples whose mask is false"
        )


class _Broadcasts(TorchFunctionMode):
    """Notices outputs (B, 1) beside targets (B,), which broadcast to (B, B)."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [each for each in args if isinstance(each, Tensor)]
        for pair in itertools.pairwise(given):
            # Only what comes from outputs has a gradient.
            outputs, targets = sorted(pair, key=lambda t: not t.requires_grad)
            unlike = outputs.requires_grad and not targets.requires_grad and outputs.shape != targets.shape
            if unlike and outputs.numel() == targets.numel() and _enlarged(outputs, targets):
                self.shapes = [str(("B", *t.shape[1:])).replace("'", "") for t in (outputs, targets)]
        return func(*args, **(kwargs or {}))

    def refuse(self) -> None:
        if self.shapes:
            raise InputError(
                f"the loss broadcasts outputs {self.shapes[0]} with targets {self.shapes[1]}, and so "
                "compares every output with every target. Let both have one shape: outputs.squeeze(-1) in "
                "the model or in the loss, or targets of shape (B, 1)"
            )


def _enlarged(one: Tensor, other: Tensor) -> bool:
    try:
        return math.prod(np.broadcast_shapes(one.shape, other.shape)) > one.numel()
    except ValueError:  # they do not broadcast
        return False


def _check_weights(loss: Any, outputs: Any, targets: Any, weights: Tensor) -> None:
    """Refuses divisors that depend on the outputs: a client's are added up before it trains."""
    moved = mapped(lambda t: t.detach() + 1 if t.is_floating_point() else t, outputs)
    if weights.requires_grad or not torch.equal(loss(moved, targets)[1], weights):
        raise InputError("the loss returns sums and divisors, but its divisors depend on the outputs")


def sample_weights(loss: Loss, outputs: Any, federation: Federation) -> Tensor | None:
    """What every sample (M,) adds to the divisor of a mean loss, if samples count differently."""
    if not loss.weighted:
        return None
    parts = []
    numbers = sum(t[0].numel() for t in tensors(outputs))
    step = max(1, tuning.MAX_FITTED_NUMBERS // numbers)
    for begin in range(0, federation.samples, step):
        _, targets = federation.at(slice(begin, min(begin + step, federation.samples)))
        count = len(tensors(targets)[0])
        # A divisor depends on the targets only: any outputs of the right shape serve.
        like = take(outputs, torch.zeros(count, dtype=torch.int64))
        parts.append(loss.function(like, targets)[1].detach())
    return torch.cat(parts).double()


def check_values(federation: Federation, module: nn.Module) -> None:
    """Refuses targets that PyTorch's losses of two classes take without a word, and cannot mean."""
    targets, name = federation.targets, type(module).__name__
    if not isinstance(targets, Tensor):
        raise InputError(f"targets are several tensors; {name} needs one (or give another loss)")
    if isinstance(module, BINARY):
        wrong, needed = (targets < 0) | (targets > 1), "targets from 0 to 1"
    else:
        wrong, needed = (targets != 1) & (targets != -1), "targets −1 and 1, as 2 * targets - 1 of 0 and 1"
    places = wrong.nonzero()
    if len(places):
        at = tuple(places[0].tolist())
        value = targets[at].item()
        raise InputError(
            f"client {federation.client_of(at[0])!r} has target {value:g}, but {name} needs {needed}"
        )


def check_labels(federation: Federation, outputs: Any, module: Any) -> None:
    """Refuses labels that cross-entropy cannot compare with the outputs."""
    labels = federation.targets
    if not isinstance(labels, Tensor):
        raise InputError(
            "targets are several tensors; cross-entropy needs class labels (or give another loss)"
        )
    logits = first_output(outputs)
    if labels.is_floating_point():
        if isinstance(module, nn.CrossEntropyLoss) and labels.shape[1:] == logits.shape[1:]:
            return  # probabilities of classes
        soft = labels.shape[1:] == logits.shape[1:]
        remedy = "for probabilities take nn.CrossEntropyLoss()" if soft else "give targets.long()"
        raise InputError(
            f"targets are not integers; cross-entropy needs class labels: {remedy}, or another loss"
        )
    try:
        axis = class_axis(logits, labels[: len(logits)], second=isinstance(module, CLASSES))
    except InputError as error:
        remedy = "or give another loss"
        if labels.dim() > 1 and labels.shape[1:] == logits.shape[1:]:
            remedy = "of one-hot labels targets.argmax(1); for one output per label nn.BCEWithLogitsLoss()"
        elif logits.shape[1:].numel() == labels.shape[1:].numel():
            remedy = "for one output per label take nn.BCEWithLogitsLoss()"
        elif labels.shape[1:].numel() == 1:
            remedy = "give targets.squeeze(1)"
        raise InputError(f"{first_line(error)} ({remedy})") from None
    classes, ignored = logits.shape[axis], getattr(module, "ignore_index", IGNORED)
    wrong = (((labels < 0) | (labels >= classes)) & (labels != ignored)).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        client = federation.client_of(at[0])
        one = "; for one output take nn.BCEWithLogitsLoss()" if classes == 1 else ""
        raise InputError(
            f"client {client!r} has label {int(labels[at])}, but the model has {classes} outputs: "
            f"labels must be 0 to {classes - 1}{one}"
        )
