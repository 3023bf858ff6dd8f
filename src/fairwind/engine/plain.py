"""A user's module, trained one model at a time with ordinary PyTorch."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fairwind.data.counter import segments
from fairwind.data.federation import Federation
from fairwind.data.samples import kind, mapped, take, tensors
from fairwind.engine import tuning
from fairwind.engine.augmentation import Augmentation
from fairwind.engine.layout import ALL_SHARED, Division, Parts, Sharing, copy_into, flattened
from fairwind.engine.losses.fitting import fit_loss, sample_weights
from fairwind.engine.losses.loss import Loss, cross_entropy
from fairwind.engine.losses.scoring import fit_scores
from fairwind.engine.machine import matmul_precision, seed_generators
from fairwind.engine.modules import (
    activations,
    call,
    changed_buffers,
    copied,
    draws,
    duplicate,
    forward_operations,
    read,
    restore_buffers,
)
from fairwind.errors import InputError, first_line
from fairwind.layers import CountedRandomness, OperationCounter, counted, key_names
from fairwind.layers.batch_norm import Masked, is_batch_norm
from fairwind.runs.schema import Part
from fairwind.scores import Score

# Tolerance of gradients relative to their norm; in float32 cuDNN may round factors to TF32.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-2}

Randomness = Literal["none", "functional", "generator"]
INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8
TABLES = nn.Embedding, nn.EmbeddingBag
MAX_PLACES = 32  # of a sample, with a table each; longer samples are sequences, whose places share a table
FITTED, AUGMENTED = 4, 8  # samples with which a loss and scores are tried, and an augmentation


class PlainModel:
    """A copy of a module, in training or in evaluation mode. The user's own module is never changed."""

    stacks = False

    loss: Loss
    judges: tuple[Score, ...]
    sample_weights: Tensor | None  # what samples add to the divisor of a mean loss, if not 1
    counts: OperationCounter  # of a local step on one sample
    per_sample: int  # activations
    flops: int  # operations of a sample's forward pass
    batch_size = 1  # of local steps
    probing = False  # whether it scores samples as probes do
    channels_last = False  # whether convolutions may put channels last in memory
    evaluated_numbers = tuning.CPU.evaluated_numbers  # of a batch of test samples

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        augmentation: Augmentation,
        sharing: Sharing = ALL_SHARED,
    ):
        """Without a loss and scores: see `fitted`."""
        self.division, self.augmentation = Division.of(model, sharing), augmentation
        self.layout, self.whole = self.division.shared, self.division.whole
        self.module = augmentation.attach(counted(copied(model, training=True)).to(device))
        # Which of its modules train; frozen normalisation does not.
        self.trains = [module.training for module in self.module.modules()]
        self.keys = key_names(self.module)
        self._find_parts()
        self.first = self.whole.flatten(model).to(device)  # x⁰, and every client's own part at first
        parts = set(self.whole.names)
        # Buffers that are no parts of the whole model, as the user gave them
        self.buffers = {name: b.clone() for name, b in self.module.named_buffers() if name not in parts}
        self.changed: list[str] = []  # those of them that a forward pass changes
        self.evaluation_randomness: Randomness = "none"
        self.randomness: Randomness = "none"
        self.replaces = False  # whether it calls functions that need other forms to be stacked
        self.mixes = False  # whether a sample's loss in evaluation depends on the others of its batch

    @classmethod
    def fitted(
        cls,
        model: nn.Module,
        federation: Federation,
        loss: Any = cross_entropy,
        score: Any = None,
        batch_size: int = 1,
        augment: Any = None,
        sharing: Sharing = ALL_SHARED,
    ) -> "PlainModel":
        """With a loss and scores, tried on a few samples; refuses a model that cannot train on these.

        `loss`, `score` and `augment` as users give them. A loss of whole batches is given batches of
        `batch_size`.
        """
        augmentation = Augmentation(augment)
        augmentation.check(federation.at(slice(0, AUGMENTED))[0])
        made, sample = cls(model, federation.device, augmentation, sharing), federation.at(slice(0, 1))
        made.batch_size = batch_size
        with explained(*sample):
            made.train(False)
            made.evaluation_randomness, _ = made._drawn(sample[0])
            made.train()
            made.randomness, made.replaces = made._drawn(sample[0])
            for clients in filter(None, (federation, federation.new_clients)):
                check_integers(made.module, clients)
            made.changed = [n for n in changed_buffers(made.module, sample[0]) if n in made.buffers]
            made._fit(federation, loss, score, batch_size)
            made.mixes = made._found_to_mix(federation)
            made.per_sample = activations(made.module, sample[0], made.dtype, made.dtype)
            made.flops = forward_operations(made.module, sample[0])
        made.channels_last = made._agrees_with_channels_last(federation)
        return made

    def _found_to_mix(self, federation: Federation) -> bool:
        if self.loss.batched or self.evaluation_randomness != "none":
            return False
        self.load(self.whole.parts(self.first))
        self.train(False)
        with torch.no_grad(), matmul_precision("float32", self.start.device):
            found = mixes(self._losses, *federation.at(slice(0, FITTED)), self.dtype)
        self.train()
        return found

    def _losses(self, inputs: Any, targets: Any) -> Tensor:
        return judged(self.loss, (), self.outputs(inputs, "none"), targets)[0]

    def put_channels_last(self) -> list[RemovableHandle]:
        """Puts channels last in memory from the first convolution on; returns what undoes it.

        Parameters keep their memory layout, and what is computed is the same up to rounding.
        """
        layers = [layer for layer in self.module.modules() if isinstance(layer, nn.Conv2d)]
        return [layer.register_forward_pre_hook(_channels_last) for layer in layers]

    def _agrees_with_channels_last(self, federation: Federation) -> bool:
        """Whether a step on two samples, and their outputs, are the same with channels last on a CPU.

        Modules fail that `view` activations.
        """
        if federation.device.type != "cpu" or not self.counts.convolutions:
            return False
        inputs, targets = federation.at(slice(0, 2))

        def computed() -> list[Tensor | None]:
            self.load(self.layout.parts(self.start))
            self.train()
            with torch.enable_grad():
                found = self.gradients([self.training_loss(inputs, targets, 0)])
            self.train(False)
            with torch.no_grad():
                return [*found, self.evaluation_loss(inputs, targets)]

        handles: list[RemovableHandle] = []
        try:
            with self.own_generators():
                expected = computed()
                handles += self.put_channels_last()
                return bool(handles) and agree(computed(), expected, TOLERANCE.get(self.dtype, 0.1))
        except Exception:  # whatever a user's module makes of this layout
            return False
        finally:
            for handle in handles:
                handle.remove()
            for weight in self.weights:
                weight.grad = None
            self.train()

    def _drawn(self, inputs: Any) -> tuple[Randomness, bool]:
        """What a forward pass draws in the current mode, and whether it calls functions to be replaced."""
        drawn = draws(self.module, inputs)
        with CountedRandomness(self.start.new_zeros((), dtype=torch.int64)) as mode:
            left = draws(self.module, inputs)
        return ("generator" if left else "functional") if drawn else "none", mode.needed

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def start(self) -> Tensor:
        """x⁰ (P,)."""
        return self.first[: self.layout.parameters]

    @property
    def own_start(self) -> Tensor:
        """The part that is a client's own, as the user gave it."""
        return self.first[self.layout.parameters :]

    @property
    def uses_generators(self) -> bool:
        """Whether it draws from PyTorch's generators, which all threads share."""
        return "generator" in (self.randomness, self.evaluation_randomness)

    def cannot_stack(self, federation: Federation) -> str:
        """What is known to keep it from being stacked; empty if nothing is."""
        buffers = set(self.whole.names[len(self.weights) :])
        norms = {n for n, layer in self.module.named_modules() if isinstance(layer, Masked)}
        if others := [name for name in buffers if name.rpartition(".")[0] not in norms]:
            return f"the buffer {min(others)!r} is personal, or of a layer that is not one of PyTorch's"
        if self.changed:
            return f"its forward pass changes the buffer {self.changed[0]!r}"
        if self.untracked or self.mixes:
            return "in evaluation, samples of a batch influence each other"
        if why := self.augmentation.cannot_stack(federation.at(slice(0, 2))[0]):
            return why
        if self.randomness == "generator":
            return "its forward pass draws random numbers that are not counted (dropout, torch.rand, … are)"
        if self.loss.batched and not self.loss.masked:
            return (
                "the loss is one number for a batch, which may be padded: let it return each sample's loss "
                "(B,), or take a third argument `mask` (B,), true for the samples that count"
            )
        return ""

    def another(self) -> "PlainModel":
        """A copy for another thread."""
        other = copy.copy(self)
        other.module = duplicate(self.module)
        for layer in other.module.modules():
            if isinstance(layer, nn.RNNBase):
                layer.flatten_parameters()  # cuDNN wants one block of memory, which a copy is not
        other._find_parts()
        return other

    def _find_parts(self) -> None:
        """Looks up what every step uses."""
        trained = len(self.layout.names) + self.division.trained
        self.weights: list[nn.Parameter] = self.whole.weights(self.module)[:trained]
        self.places = [_place(self.module, name) for name in self.whole.names]
        modules = zip(self.module.modules(), self.trains, strict=True)
        self.trained = [module for module, trains in modules if trains]
        norms = [layer for layer in self.module.modules() if is_batch_norm(layer)]
        # Batch norm that takes a batch's statistics in evaluation, too; and in probes
        self.untracked: list[Any] = [layer for layer in norms if not layer.track_running_stats]
        trained_norms: list[Any] = [layer for layer in self.trained if layer in norms]
        self.normed_by_batch = trained_norms if self.division.recomputes else self.untracked

    @property
    def tensors(self) -> list[Tensor]:
        """All parts of the whole model; a forward pass may have assigned buffers."""
        return [held[name] for held, name in self.places]

    def load(self, x: Parts) -> None:
        """Puts the parts x of a whole model into the module, and other buffers as the user gave them."""
        if self.changed:
            restore_buffers(self.module, self.buffers)
        copy_into(self.tensors, x)

    def train(self, training: bool = True) -> None:
        """Training mode, or evaluation mode."""
        for module in self.trained:
            object.__setattr__(module, "training", training)  # where PyTorch's assignment ends, sooner

    def probe(self) -> None:
        """The mode of probes: evaluation's, but batch norm that has no statistics yet takes a batch's."""
        self.train(False)
        for layer in self.normed_by_batch:
            layer.training = True

    def as_probed(self) -> "PlainModel":
        """The same model, which scores samples as probes do."""
        other = copy.copy(self)
        other.probing = True
        return other

    @property
    def probe_batch(self) -> int | None:
        """How many samples are probed together, if what is computed depends on that."""
        return self.batch_size if self.loss.batched or self.normed_by_batch or self.mixes else None

    @property
    def batch(self) -> int | None:
        """How many samples of one client are scored together, if what is computed depends on that."""
        if self.probing:
            return self.probe_batch
        return self.batch_size if self.loss.batched or self.untracked or self.mixes else None

    def gradients(self, losses: Iterable[Tensor]) -> list[Tensor | None]:
        """The gradient of the losses' sum with respect to each weight; None if they do not depend on it."""
        for loss in losses:
            torch.autograd.backward(loss)
        found = [weight.grad for weight in self.weights]
        for weight in self.weights:
            weight.grad = None
        return found

    def own_generators(self) -> AbstractContextManager[None]:
        """Within, the module may seed PyTorch's generators, whose state is restored afterwards."""
        return torch.random.fork_rng(range(torch.cuda.device_count()), enabled=self.uses_generators)

    def training_loss(self, inputs: Any, targets: Any, key: int) -> Tensor:
        """The mean loss of a batch in training mode; `key` seeds its randomness."""
        for name in self.keys:
            self.module.get_buffer(name).fill_(key)
        return self._loss(self.outputs(inputs, self.randomness, key), targets)

    def evaluation_loss(self, inputs: Any, targets: Any) -> Tensor:
        """The mean loss of a batch in the mode of evaluation, or of probes."""
        return self._loss(self.outputs(inputs, self.evaluation_randomness), targets)

    @contextmanager
    def still(self) -> Iterator[None]:
        """Afterwards, the statistics of batch norm that probes move are as they were."""
        before = [(b, b.clone()) for layer in self.normed_by_batch for b in layer.buffers()]
        yield
        for buffer, value in before:
            buffer.copy_(value)

    def _loss(self, outputs: Any, targets: Any) -> Tensor:
        return self.loss.of_batch(outputs if self.loss.own else read(outputs), targets)

    def outputs(self, inputs: Any, randomness: Randomness, key: int = 0) -> Any:
        """The module's outputs, with its randomness seeded; in evaluation it is the same every time."""
        if randomness == "functional":
            with CountedRandomness(torch.tensor(key, device=self.start.device)):
                return call(self.module, inputs)
        if randomness == "generator":
            seed_generators(self.start.device, key)
        return call(self.module, inputs)

    def scores(self, x: Tensor, inputs: Any, targets: Any) -> tuple[Tensor, ...]:
        """Each sample's loss, and the numbers of each score, (R, B) or (R, B, S) under models x (R, ·)."""
        found = []
        if self.probing:
            self.probe()
        else:
            self.train(False)
        with self.own_generators():
            for parts in zip(*self.whole.parts(x), strict=True):
                self.load(parts)
                outputs = self.outputs(inputs, self.evaluation_randomness)
                found.append(judged(self.loss, self.judges, outputs, targets))
        return tuple(torch.stack(each) for each in zip(*found, strict=True))

    def own_scores(self, x: Tensor, inputs: Any, targets: Any) -> tuple[Tensor, ...]:
        """The same with different samples for each model x (R, P): (R, B, …)."""
        rows = zip(x, *(_rows(each) for each in (inputs, targets)), strict=True)
        found = [self.scores(flat[None], *own) for flat, *own in rows]
        return tuple(torch.cat(each) for each in zip(*found, strict=True))

    def batch_statistics(self, inputs: Any) -> Tensor:
        """The averaged statistics of batch norm (·,) of one batch alone, by which it is normalised."""
        self.probe()
        momenta = [layer.momentum for layer in self.normed_by_batch]
        for layer in self.normed_by_batch:
            layer.momentum = 1.0
        with self.own_generators():
            self.outputs(inputs, self.evaluation_randomness)
        for layer, momentum in zip(self.normed_by_batch, momenta, strict=True):
            layer.momentum = momentum
        kept = len(self.layout.names) + self.division.kept
        return flattened(self.tensors[kept:], self.first)

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        """A complete state dict of the user's module that is the whole model x (·)."""
        model = duplicate(self.module)
        restore_buffers(model, self.buffers)
        self.whole.load(x, model)
        return dict(model.state_dict())

    def _fit(self, federation: Federation, loss: Any, score: Any, batch_size: int) -> None:
        """Finds the loss and the scores that fit a few samples, or refuses them; counts operations."""
        self.load(self.whole.parts(self.first))
        devices, some = range(torch.cuda.device_count()), federation.at(slice(0, FITTED))
        self.train(False)
        with torch.random.fork_rng(devices), torch.enable_grad():
            raw = call(self.module, some[0])
            self.loss = fit_loss(loss, raw, some[1], federation, batch_size)
            with torch.no_grad():
                self.judges = fit_scores(score, self.loss, raw, some[1], federation.targets)
            self.sample_weights = sample_weights(self.loss, read(raw), federation)
        self.train()
        inputs, targets = federation.at(slice(0, 1))
        self.counts = OperationCounter()
        with torch.random.fork_rng(devices), torch.enable_grad(), self.counts:
            self.gradients([self._loss(call(self.module, inputs), targets)])


def _place(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where a module holds a parameter or buffer: a dict, and its name there."""
    owner, _, leaf = name.rpartition(".")
    layer = module.get_submodule(owner)
    return (layer._parameters if leaf in layer._parameters else layer._buffers), leaf


def _channels_last(layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs of a layer, images with their channels last in memory."""
    x, *others = given
    return (x.to(memory_format=torch.channels_last) if x.dim() == 4 else x, *others)


def agree(found: Sequence[Tensor | None], exact: Sequence[Tensor | None], tolerance: float) -> bool:
    """Whether gradients are equal up to rounding; where one is not finite, the other is the same.

    None is zero.
    """
    difference, size = 0.0, 0.0
    for f, e in zip(found, exact, strict=True):
        nothing = torch.zeros((), device=next((g.device for g in (f, e) if g is not None), None))
        given = ((nothing if g is None else g.detach().to_dense()).double() for g in (f, e))
        a, b = torch.broadcast_tensors(*given)  # type: ignore[no-untyped-call]
        ill = ~(a.isfinite() & b.isfinite())
        if not torch.allclose(a[ill], b[ill], rtol=0, atol=0, equal_nan=True):
            return False
        difference += float((a - b)[~ill].square().sum())
        size += float(b[~ill].square().sum())
    return math.isfinite(size) and difference**0.5 <= tolerance * size**0.5 + 1e-12


def mixes(losses: Callable[[Any, Any], Tensor], inputs: Any, targets: Any, dtype: torch.dtype) -> bool:
    """Whether the loss of a sample depends on the others of its batch, for these samples."""
    try:
        together = losses(inputs, targets)
        each = [
            losses(*(take(part, slice(i, i + 1)) for part in (inputs, targets))) for i in range(len(together))
        ]
    except Exception:  # whatever a user's module makes of one sample
        return False
    alone = torch.cat(each)
    return bool(((together - alone).abs() > torch.finfo(dtype).eps ** 0.5 * (1 + alone.abs())).any())


def _rows(samples: Any) -> list[Any]:
    """Samples (R, B, …), row by row."""
    return [mapped(itemgetter(r), samples) for r in range(len(tensors(samples)[0]))]


def judged(loss: Loss, scores: tuple[Score, ...], outputs: Any, targets: Any) -> tuple[Tensor, ...]:
    """The numbers of the loss and of each score, for each sample."""
    predicted = read(outputs)
    losses = loss.numbers(outputs if loss.own else predicted, targets)
    return losses, *(losses if score.is_loss else score.per_sample(predicted, targets) for score in scores)


@contextmanager
def explained(inputs: Any, targets: Any, hint: str = "", *, cannot: str = "train on") -> Iterator[None]:
    """Turns errors inside a user's module into one line that names its inputs."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # whatever a user's module raises
        given = f"inputs ({kind(inputs)}) and targets ({kind(targets)})"
        raise InputError(
            f"the model cannot {cannot} {given}: {type(error).__name__}: {first_line(error)}{hint}"
        ) from error


def check_integers(module: nn.Module, federation: Federation, part: Part | None = None) -> None:
    """Refuses samples of any client with a number that a module cannot look up, such as a token's.

    Those with the least and the largest are tried; on a CPU, where an error leaves no GPU unusable.
    """
    module, chosen = duplicate(module).cpu().eval(), None
    if part is not None:
        start, sizes = federation.part(part)
        owner, place = segments(sizes)
        chosen = start[owner] + place
    tables, rows = any(isinstance(layer, TABLES) for layer in module.modules()), set[int]()
    for value in tensors(federation.inputs):
        if value.dtype in INTEGERS or (tables and value.dtype != torch.bool):
            some = value if chosen is None else value[chosen.to(value.device)]
            least = most = some.reshape(len(some), -1)
            if least.shape[1] > MAX_PLACES:
                least, most = least.amin(1, keepdim=True), most.amax(1, keepdim=True)
            rows |= {*least.argmin(0).tolist(), *most.argmax(0).tolist()}
    for row in sorted(rows) if chosen is None else chosen[sorted(rows)].tolist():
        sample = mapped(Tensor.cpu, federation.at(slice(row, row + 1))[0])
        try:
            draws(module, sample)
        except Exception as error:  # whatever a user's module raises
            numbers = torch.cat([t.double().reshape(-1) for t in tensors(sample)])
            raise InputError(
                f"{federation.whose(row)}the model cannot take a sample with numbers from "
                f"{numbers.min():g} to {numbers.max():g}: {type(error).__name__}: {first_line(error)}: "
                "an id must be from 0 to one less than the rows of its table, as of an embedding"
            ) from error
