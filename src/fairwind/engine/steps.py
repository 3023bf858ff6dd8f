"""The steps that rows take together: pure arithmetic on tensors that stay in their place."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairwind.data.samples import take
from fairwind.engine.gradients import Dense, Gradient, Product
from fairwind.engine.layout import Parts
from fairwind.engine.model import StackedModel
from fairwind.engine.solver import Solver


class Rows(NamedTuple):
    """What belongs to rows: tensors (rows, *shape) for each parameter, or none."""

    weights: Parts
    kept: tuple[Parts, ...]  # from step to step: the solver's moments, or the summed gradient
    cast: Parts  # the weights in the type of the computation, where that is another
    loss: Tensor  # (rows,) summed

    def first(self, n: int) -> "Rows":
        kept = tuple(tuple(part[:n] for part in parts) for parts in self.kept)
        weights, cast = (tuple(part[:n] for part in parts) for parts in (self.weights, self.cast))
        return Rows(weights, kept, cast, self.loss[:n])

    def tensors(self) -> Sequence[Tensor]:
        return *self.weights, *(part for parts in self.kept for part in parts), *self.cast, self.loss


class Batches(NamedTuple):
    """What rows train on: a table of batches that the rows of one step after another take from."""

    samples: Tensor  # (many, B), negative is padding
    keys: Tensor  # (many,) for dropout
    at: Tensor  # () where the next step's batches begin
    step: Tensor  # () steps taken, as a number of the type of η
    lr: Tensor  # () η

    # Sizes below are taken from shapes: `len` would fix the number of rows in compiled code.

    def next(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """The next n rows' samples, which of them count, and keys."""
        here = self.at + torch.arange(n, device=self.at.device)
        samples = self.samples[here]
        mask = samples >= 0
        return torch.where(mask, samples, ~samples), mask, self.keys[here]

    def advance(self, n: int) -> None:
        self.at.add_(n)
        self.step.add_(1)


# With inputs and targets, in place; what is returned is still to be added to parts, by their numbers.
Step = Callable[[Rows, Batches, Any, Any], dict[int, Product]]


def train_step(model: StackedModel, solver: Solver) -> Step:
    """One local step of every row."""

    def step(rows: Rows, batches: Batches, inputs: Any, targets: Any) -> dict[int, Product]:
        index, mask, keys = batches.next(rows.loss.shape[0])
        batch = take(inputs, index), take(targets, index)
        gradients = model.gradients(rows.cast or rows.weights, *batch, mask, keys)
        active = mask[:, 0]  # a row that has finished stays
        batches.advance(mask.shape[0])
        if solver.plain:
            left = _add(gradients, rows.weights, -batches.lr, active)
        else:
            left = {}
            _update(solver, rows, _dense(gradients, rows.weights), batches, active)
        for half, weight in zip(rows.cast, rows.weights, strict=bool(rows.cast)):
            half.copy_(weight)
        return left

    return step


def gradient_step(model: StackedModel) -> Step:
    """Adds the next batch of every row to its summed gradient and loss."""

    def step(rows: Rows, batches: Batches, inputs: Any, targets: Any) -> dict[int, Product]:
        index, mask, _ = batches.next(rows.loss.shape[0])
        batch = take(inputs, index), take(targets, index)
        gradients, losses = model.probes(rows.cast or rows.weights, *batch, mask)
        rows.loss.add_(losses)
        batches.advance(mask.shape[0])
        return _add(gradients, rows.kept[0], None, None)  # of a row that has finished they are 0

    return step


def loss_step(model: StackedModel) -> Step:
    """Adds the next batch of every row to its summed loss."""

    def step(rows: Rows, batches: Batches, inputs: Any, targets: Any) -> dict[int, Product]:
        index, mask, _ = batches.next(rows.loss.shape[0])
        rows.loss.add_(model.losses(rows.weights, take(inputs, index), take(targets, index), mask))
        batches.advance(mask.shape[0])
        return {}

    return step


def _add(
    gradients: list[Gradient], parts: Parts, scale: Tensor | None, active: Tensor | None
) -> dict[int, Product]:
    """Adds gradients to parts, as their `add_to` says; what is left of those in factors."""
    # Factors first, before any weight changes: a layer's input may be one.
    order = sorted(range(len(parts)), key=lambda i: isinstance(gradients[i], Dense))
    found = {i: gradients[i].add_to(parts[i], scale, active) for i in order}
    return {i: product for i, product in found.items() if product is not None}


def _dense(gradients: list[Gradient], weights: Parts) -> list[Tensor]:
    values = [g.value for g in gradients if isinstance(g, Dense)]
    return [value.to(weight.dtype) for value, weight in zip(values, weights, strict=True)]


def _update(solver: Solver, rows: Rows, gradients: list[Tensor], batches: Batches, active: Tensor) -> None:
    """The solver's step of the rows that are active."""
    if solver.clip is not None:
        norm = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
        scale = (solver.clip / (norm + 1e-6)).clamp(max=1)  # as torch.nn.utils.clip_grad_norm_ does
        gradients = [g * scale.view(-1, *[1] * (g.ndim - 1)) for g in gradients]
    for i, (weight, g) in enumerate(zip(rows.weights, gradients, strict=True)):
        moments = tuple(parts[i] for parts in rows.kept)
        change, new = solver.update(weight, g, moments, batches.lr, batches.step)
        weight.add_(torch.where(active.view(-1, *[1] * (weight.ndim - 1)), change, 0))
        for old, value in zip(moments, new, strict=True):
            old.copy_(value)
