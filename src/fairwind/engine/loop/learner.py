"""A client's local training with ordinary autograd, and sums of updates."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairwind.contract import Local
from fairwind.engine import tuning
from fairwind.engine.layout import copy_into
from fairwind.engine.machine import without_cudnn
from fairwind.engine.plain import PlainModel
from fairwind.engine.solver import Solver


class Modification(NamedTuple):
    """What turns a client's gradient g into s(ℓ)·g + μ·y + w."""

    local: Local[Any] = Local()
    parts: Sequence[Tensor] = ()  # w of each weight; empty if steps are not modified
    received: Sequence[Tensor] | None = None  # x, where g is g(y) − g(x)

    def scale(self, loss: Tensor) -> float:
        s = self.local.scale
        return float(s(loss)) if callable(s) else s


class Learner:
    """A copy of the model, with which clients train one after another."""

    def __init__(self, model: PlainModel):
        self.model = model
        self.recurrent = any(isinstance(layer, nn.RNNBase) for layer in model.module.modules())

    def steps(
        self,
        solver: Solver,
        lr: float,
        batches: Iterator[Callable[[], Tensor]],
        modification: Modification,
        *,
        personal_steps: int = 0,
    ) -> None:
        """A local step on the loss of each batch, modified if the algorithm says so.

        If the solver has two phases, the first so many train the personal part alone, others the shared part.
        """
        self.model.train()
        # Plain SGD is one call for all weights; an optimizer takes several times as long.
        optimizer = None if solver.plain else solver.build(self.model.weights, lr)
        shared = len(self.model.layout.names)
        for number, loss in enumerate(batches):
            trained = slice(None)
            if solver.personal_first is not None:
                trained = slice(shared, None) if number < personal_steps else slice(0, shared)
            self._step(optimizer, lr, loss, solver, modification, trained)

    def _step(
        self,
        optimizer: torch.optim.Optimizer | None,
        lr: float,
        loss_of_batch: Callable[[], Tensor],
        solver: Solver,
        modification: Modification,
        trained: slice,
    ) -> None:
        before = None
        if modification.received is not None:
            before = self._gradients_at(modification.received, loss_of_batch)
        loss = loss_of_batch()
        gradients = self.model.gradients([loss])
        scale = modification.scale(loss.detach())
        if modification.parts:
            gradients = self._modified(gradients, before, scale, modification)
        if trained != slice(None):
            kept = range(len(gradients))[trained]
            gradients = [g if i in kept else None for i, g in enumerate(gradients)]
        if optimizer is None:
            _add(self.model.weights, gradients, -lr)
            return
        for weight, gradient in zip(self.model.weights, gradients, strict=True):
            weight.grad = gradient
        if solver.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.weights, solver.clip)
        with solver.explained():
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def _modified(
        self,
        gradients: list[Tensor | None],
        before: list[Tensor | None] | None,
        scale: float,
        modification: Modification,
    ) -> list[Tensor | None]:
        pull, shared = modification.local.pull, len(modification.parts)
        found: list[Tensor | None] = [
            pull * weight + w for weight, w in zip(self.model.weights, modification.parts, strict=False)
        ]
        found += [torch.zeros_like(weight) for weight in self.model.weights[shared:]]  # are not modified
        _add(found, gradients, scale)
        if before is not None:
            _add(found[:shared], before[:shared], -scale)
        return found

    def _gradients_at(
        self, received: Sequence[Tensor], loss_of_batch: Callable[[], Tensor]
    ) -> list[Tensor | None]:
        """The gradients at the received model; what was trained is restored afterwards."""
        trained = [tensor.detach().clone() for tensor in self.model.tensors]
        copy_into(self.model.tensors, received)
        found = self.model.gradients([loss_of_batch()])
        copy_into(self.model.tensors, trained)
        return found

    def probe(
        self, loss_of: Callable[[Tensor], Tensor], samples: Tensor, gradient: Sequence[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """The loss of samples and the norm of its gradient by the shared parameters, in the mode of probes.

        The gradient itself is written to `gradient`, if given.
        """
        self.model.probe()
        losses = []

        def parts() -> Iterator[Tensor]:
            for part, share in self._shares(samples):
                with self.model.still():  # until after the backward pass
                    loss = loss_of(part) if share == 1 else share * loss_of(part)
                    losses.append(loss.detach())
                    yield loss

        with without_cudnn(self.model.start.device) if self.recurrent else nullcontext():
            found = [_dense(g) for g in self.model.gradients(parts())[: len(self.model.layout.names)]]
        for g, place in zip(found, gradient or (), strict=gradient is not None):
            place.copy_(torch.zeros_like(place) if g is None else g)
        return torch.stack(losses).sum(dtype=torch.float64), norm([g for g in found if g is not None])

    @torch.no_grad()
    def loss(self, loss_of: Callable[[Tensor], Tensor], samples: Tensor) -> Tensor:
        """The loss of samples, in the mode of probes."""
        self.model.probe()
        losses = []
        for part, share in self._shares(samples):
            with self.model.still():
                losses.append(share * loss_of(part))
        return torch.stack(losses).sum(dtype=torch.float64)

    def _shares(self, samples: Tensor) -> list[tuple[Tensor, float]]:
        """Samples in parts that are probed at once, with the share of each in their loss."""
        loss = self.model.loss
        parts = split(samples, self.model.probe_batch or tuning.MAX_LOOP_PROBED_SAMPLES)
        return list(zip(parts, loss.shares(parts, self.model.sample_weights), strict=True))


@torch.no_grad()
def _add(tensors: Sequence[Tensor | None], gradients: Sequence[Tensor | None], alpha: float) -> None:
    """Adds alpha times the gradients to tensors, in place."""
    pairs = [(w, g) for w, g in zip(tensors, gradients, strict=True) if w is not None and g is not None]
    if pairs:
        torch._foreach_add_([w for w, _ in pairs], [g for _, g in pairs], alpha=alpha)


def _dense(gradient: Tensor | None) -> Tensor | None:
    """A gradient that may be sparse, as an embedding's."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def split(samples: Tensor, size: int) -> tuple[Tensor, ...]:
    """Samples in batches of up to this size."""
    return (samples,) if len(samples) <= size else torch.split(samples, size)


class CompensatedSum:
    """Σ coef·δ in float64, with a few terms at a time added up in the updates' own type."""

    def __init__(self, like: Tensor):
        self.total = torch.zeros_like(like, dtype=torch.float64)
        self.few: Tensor | None = None
        self.terms, self.scale = 0, 1.0

    def add(self, coef: float, update: Tensor) -> None:
        """Adds an update, which must not be used afterwards."""
        if (
            self.few is None
            or self.terms == tuning.MAX_SUMMED_UPDATES
            or not 1e-6 < abs(coef / self.scale) < 1e6
        ):
            self.flush()
            if coef:
                self.few, self.terms, self.scale = update, 1, coef
            return
        self.few.add_(update, alpha=coef / self.scale)
        self.terms += 1

    def flush(self) -> Tensor:
        """The sum of all terms so far."""
        if self.few is not None:
            # In blocks whose copies in float64 stay in the cache
            for total, few in zip(
                *(torch.split(t, tuning.MAX_CACHED_NUMBERS) for t in (self.total, self.few)), strict=True
            ):
                total.add_(few, alpha=self.scale)
        self.few = None
        return self.total


def norm(parts: Sequence[Tensor]) -> Tensor:
    """The norm of all parts together, in float64."""
    blocks = [block for part in parts for block in _blocks(part)]
    found = torch._foreach_norm(blocks) if blocks else (torch.zeros(()),)
    return found[0].double() if len(found) == 1 else _joined(found)


def _joined(norms: Sequence[Tensor]) -> Tensor:
    whole: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), dtype=torch.float64)
    return whole


def _blocks(part: Tensor) -> Sequence[Tensor]:
    """A tensor in pieces that stay in the cache."""
    part = part.detach()
    return (
        (part,)
        if part.numel() <= tuning.MAX_CACHED_NUMBERS
        else torch.split(part.reshape(-1), tuning.MAX_CACHED_NUMBERS)
    )


@torch.no_grad()
def difference(x: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The update x − after (P,) and its norm, where `before` are the parts of x."""
    if len(x) <= tuning.MAX_CACHED_NUMBERS:
        update = torch.cat([part.reshape(-1) for part in after])
        torch.sub(x, update, out=update)
        return update, norm([update])
    norms, update = [], torch.empty_like(x)
    begin = 0
    for a, b in zip(before, after, strict=True):
        places = _blocks(update[begin : begin + a.numel()])
        begin += a.numel()
        for place, *values in zip(places, _blocks(a), _blocks(b), strict=True):
            norms.append(torch.linalg.vector_norm(torch.sub(*values, out=place.view(values[0].shape))))
    return update, _joined(norms)
