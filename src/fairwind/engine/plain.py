"""A user's module, trained one model at a time with ordinary PyTorch."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fairwind.data.federation import Federation
from fairwind.data.samples import kind, mapped, tensors
from fairwind.engine.layout import Layout
from fairwind.engine.losses import Loss, cross_entropy, needs_labels
from fairwind.engine.modules import (
    activations,
    call,
    changes_buffers,
    copied,
    draws,
    forward_operations,
    restore_buffers,
)
from fairwind.errors import InputError, first_line
from fairwind.layers import CountedRandomness, counted, key_names
from fairwind.scores import Score, accuracy, first_output

Randomness = Literal["none", "functional", "generator"]
HEAVY = 5e7  # floating-point operations: a millisecond or two of a core


class PlainModel:
    """A copy of a module, in training or in evaluation mode. The user's own module is never changed."""

    stacks = False

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        loss: Loss = cross_entropy,
        scores: tuple[Score, ...] = (accuracy,),
    ):
        """Refuses a model that cannot train on the federation's samples."""
        self.layout = Layout.of(model)
        self.loss, self.judges = loss, scores
        self.module = counted(copied(model, training=True)).to(federation.device)
        # Which of its modules train; frozen normalisation does not.
        self.trains = [module.training for module in self.module.modules()]
        self.start = self.layout.flatten(model).to(federation.device)  # x⁰ (P,)
        self.buffers = {name: b.clone() for name, b in self.module.named_buffers()}
        sample = federation.at(slice(0, 1))
        self.randomness: Randomness = "none"
        self.changed_buffer = ""
        with explained(*sample):
            drawn = draws(self.module, sample[0])
            with CountedRandomness(self.start.new_zeros((), dtype=torch.int64)) as mode:
                left = draws(self.module, sample[0])
            self.replaces = mode.needed  # whether it calls functions that need other forms to be stacked
            if drawn:
                self.randomness = "generator" if left else "functional"
            self.changed_buffer = changes_buffers(self.module, sample[0])
            self._check(federation, *sample)
            self.per_sample = activations(self.module, sample[0], self.dtype, self.dtype)
            self.flops = forward_operations(self.module, sample[0])  # operations of a sample's forward pass

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    def fills_a_core(self, batch_size: int) -> bool:
        """Whether a local step on a CPU is mostly arithmetic, not the overhead of small kernels."""
        return self.operations(batch_size) >= HEAVY

    def operations(self, batch_size: int) -> int:
        """Floating-point operations of a local step, about: forward, and twice as much backward."""
        return 3 * self.flops * batch_size

    def another(self) -> "PlainModel":
        """A copy for another thread."""
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module)
        for layer in other.module.modules():
            if isinstance(layer, nn.RNNBase):
                layer.flatten_parameters()  # cuDNN wants one block of memory, which a copy is not
        return other

    def load(self, x: Tensor) -> list[nn.Parameter]:
        """Puts parameters x (P,) into the module, and buffers as the user gave them."""
        if self.changed_buffer:
            restore_buffers(self.module, self.buffers)
        return self.layout.load(x, self.module)

    def train(self, training: bool = True) -> None:
        """Training mode, or evaluation mode."""
        for module, trains in zip(self.module.modules(), self.trains, strict=True):
            module.training = training and trains

    def training_losses(self, inputs: Any, targets: Any, key: int) -> Tensor:
        """Each sample's loss in training mode; `key` seeds its randomness."""
        for name in key_names(self.module):
            self.module.get_buffer(name).fill_(key)
        mode: AbstractContextManager[Any] = nullcontext()
        if self.randomness == "functional":
            mode = CountedRandomness(torch.tensor(key, device=self.start.device))
        elif self.randomness == "generator":
            torch.manual_seed(key)
        with mode:
            return self.loss(call(self.module, inputs), targets)

    def losses(self, inputs: Any, targets: Any) -> Tensor:
        """Each sample's loss in the module's current mode."""
        return self.loss(call(self.module, inputs), targets)

    def scores(self, x: Tensor, inputs: Any, targets: Any) -> tuple[Tensor, ...]:
        """Each sample's loss, and the numbers of each score, (R, B) or (R, B, S) under models x (R, P)."""
        found = []
        self.train(False)
        for flat in x:
            self.load(flat)
            found.append(judged(self.loss, self.judges, call(self.module, inputs), targets))
        return tuple(torch.stack(each) for each in zip(*found, strict=True))

    def own_scores(self, x: Tensor, inputs: Any, targets: Any) -> tuple[Tensor, ...]:
        """The same with different samples for each model x (R, P): (R, B, …)."""
        rows = zip(x, *(_rows(each) for each in (inputs, targets)), strict=True)
        found = [self.scores(flat[None], *own) for flat, *own in rows]
        return tuple(torch.cat(each) for each in zip(*found, strict=True))

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        """A complete state dict of the user's module with parameters x (P,)."""
        model = copy.deepcopy(self.module)
        restore_buffers(model, self.buffers)
        self.layout.load(x, model)
        return dict(model.state_dict())

    def _check(self, federation: Federation, inputs: Any, targets: Any) -> None:
        """Refuses labels without an output, and a loss or score that is not one number per sample."""
        weights = self.load(self.start)
        with torch.random.fork_rng(range(torch.cuda.device_count())), torch.enable_grad():
            outputs = call(self.module, inputs)
            if needs_labels(self.loss):
                check_labels(federation, first_output(outputs))
            losses = self.loss(outputs, targets)
            if losses.shape == (1,):
                torch.autograd.grad(losses.sum(), weights, allow_unused=True)
        self.train(False)
        if losses.shape != (1,):
            raise InputError(
                f"the loss is not one number per sample but {tuple(losses.shape)} for one; let it return the "
                "losses of a batch (B,), as with reduction='none'"
            )
        with torch.no_grad():
            outputs = call(self.module, inputs)
            for score in self.judges:
                shape = tuple(score.per_sample(outputs, targets).shape)
                if shape[:1] != (1,) or len(shape) > (2 if score.per_client else 1):
                    raise InputError(
                        f"the score {score.name!r} is not one number per sample but {shape} for one"
                    )
        self.train()


def _rows(samples: Any) -> list[Any]:
    """Samples (R, B, …), row by row."""
    return [mapped(itemgetter(r), samples) for r in range(len(tensors(samples)[0]))]


def judged(loss: Loss, scores: tuple[Score, ...], outputs: Any, targets: Any) -> tuple[Tensor, ...]:
    """Each sample's loss, and the numbers of each score."""
    return loss(outputs, targets), *(score.per_sample(outputs, targets) for score in scores)


@contextmanager
def explained(inputs: Any, targets: Any, hint: str = "") -> Iterator[None]:
    """Turns errors inside a user's module into one line that names its inputs."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # whatever a user's module raises
        given = f"inputs ({kind(inputs)}) and targets ({kind(targets)})"
        raise InputError(
            f"the model cannot train on {given}: {type(error).__name__}: {first_line(error)}{hint}"
        ) from error


def check_labels(federation: Federation, logits: Any) -> None:
    """Refuses labels that cross-entropy cannot compare with the outputs."""
    labels = federation.targets
    if not isinstance(labels, Tensor):
        raise InputError(
            "targets are several tensors; cross-entropy needs class labels (or give another loss)"
        )
    if labels.is_floating_point():
        raise InputError("targets are not integers; cross-entropy needs class labels (or give another loss)")
    if not isinstance(logits, Tensor):
        raise InputError(f"the model's output is a {type(logits).__name__}; give a loss that reads it")
    if logits.shape[1:-1] != labels.shape[1:]:
        raise InputError(
            f"outputs of shape {tuple(logits.shape[1:])} and labels of shape {tuple(labels.shape[1:])} per "
            "sample do not fit; cross-entropy needs one more dimension, the classes (or give another loss)"
        )
    classes = logits.shape[-1]
    wrong = ((labels < 0) | (labels >= classes)).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        client = federation.names[int((federation.start <= at[0]).sum()) - 1]
        raise InputError(
            f"client {client!r} has label {int(labels[at])}, but the model has {classes} outputs: "
            f"labels must be 0 to {classes - 1}"
        )
