"""The steps of stacked rows: pure arithmetic that updates tensors in place."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairwind.data.samples import take
from fairwind.engine.layout import Parts
from fairwind.engine.local import PLAIN, Rules
from fairwind.engine.solver import Solver, wide_type
from fairwind.engine.stacked.gradients import Dense, Gradient, Product
from fairwind.engine.stacked.model import StackedModel


class Rows(NamedTuple):
    """The tensors of rows: (rows, *shape) for each parameter, or none."""

    weights: Parts
    kept: tuple[Parts, ...]  # from step to step: the solver's moments, or the summed gradient
    cast: Parts  # the weights in the type of the computation, where that is another
    loss: Tensor  # (rows,) summed
    states: Parts = ()  # statistics of batch norm
    received: Parts = ()  # x in the type of the computation, where steps are corrected
    # (rows,) each, if steps are modified: μ, the index of the scale s, and the index of w
    rule: tuple[Tensor, ...] = ()
    offset: Parts = ()  # w, (any number, *shape) for each parameter

    def first(self, n: int) -> "Rows":
        kept = tuple(tuple(part[:n] for part in parts) for parts in self.kept)
        each = self.weights, self.cast, self.states, self.received, self.rule
        weights, cast, states, received, rule = (tuple(part[:n] for part in parts) for parts in each)
        return Rows(weights, kept, cast, self.loss[:n], states, received, rule, self.offset)

    def tensors(self) -> Sequence[Tensor]:
        """All but `offset`."""
        kept = (part for parts in self.kept for part in parts)
        return *self.weights, *kept, *self.cast, self.loss, *self.states, *self.received, *self.rule

    def computed(self) -> Parts:
        """The whole model of the rows, in the type of the computation."""
        return (*(self.cast or self.weights), *self.states)


class Batches(NamedTuple):
    """A table of batches, from which each step takes those of its rows."""

    samples: Tensor  # (many, B), negative is padding
    keys: Tensor  # (many,) for dropout
    at: Tensor  # () where the next step's batches start
    step: Tensor  # () steps taken, as a number of the type of η
    lr: Tensor  # () η, in float32 at least

    # Sizes below come from shapes: `len` would fix the number of rows in compiled code.

    def next(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """The samples of the next n batches, their mask, and random keys."""
        here = self.at + torch.arange(n, device=self.at.device)
        samples = self.samples[here]
        mask = samples >= 0
        return torch.where(mask, samples, ~samples), mask, self.keys[here]

    def advance(self, n: int) -> None:
        self.at.add_(n)
        self.step.add_(1)


# Updates rows in place; returns pending products, by the indices of parts.
Step = Callable[[Rows, Batches, Any, Any], dict[int, Product]]


def train_step(model: StackedModel, solver: Solver, rules: Rules = PLAIN) -> Step:
    """One local step of every row."""

    def step(rows: Rows, batches: Batches, inputs: Any, targets: Any) -> dict[int, Product]:
        index, mask, keys = batches.next(rows.loss.shape[0])
        batch = take(inputs, index), take(targets, index), mask, keys
        gradients, losses, moved = model.gradients(rows.computed(), *batch)
        if rules.corrected:
            before, _, _ = model.gradients(rows.received, *batch)
            shared = len(model.shared.names)
            pairs = zip(gradients[:shared], before[:shared], strict=True)
            gradients = [*(g.minus(b) for g, b in pairs), *gradients[shared:]]
        for state, new in zip(rows.states, moved, strict=True):  # a finished row's do not move
            state.copy_(new)
        active = mask[:, 0]  # a finished row does not change
        batches.advance(mask.shape[0])
        scale = rules.scale(losses, rows.rule[1]) if rules.scales else None
        added = {
            i: _wide(rows.rule[0], weight) * weight + rows.offset[i][rows.rule[2]]
            for i, weight in enumerate(rows.weights[: len(rows.offset)])
        }
        if solver.plain:
            rate = -batches.lr if scale is None else -batches.lr * scale
            left = _add(gradients, rows.weights, rate, active, () if rules.adds else rows.cast)
            for i, term in added.items():
                weight = rows.weights[i]
                weight.sub_(torch.where(_wide(active, weight), batches.lr * term, 0))
        else:
            left, dense = {}, _dense(gradients, rows.weights)
            if scale is not None:
                dense = [_wide(scale, g) * g for g in dense]
            if rules.adds:
                dense = [g + added[i] if i in added else g for i, g in enumerate(dense)]
            _update(solver, rows, dense, batches, active)
        if rules.adds or not solver.plain:
            for half, weight in zip(rows.cast, rows.weights, strict=bool(rows.cast)):
                half.copy_(weight)
        return left

    return step


def _wide(numbers: Tensor, part: Tensor) -> Tensor:
    """Values of rows (rows,), reshaped to multiply a part (rows, *shape)."""
    return numbers.view(-1, *[1] * (part.ndim - 1))


def gradient_step(model: StackedModel) -> Step:
    """Adds the next batch of every row to its summed gradient and loss."""

    def step(rows: Rows, batches: Batches, inputs: Any, targets: Any) -> dict[int, Product]:
        index, mask, _ = batches.next(rows.loss.shape[0])
        batch = take(inputs, index), take(targets, index)
        gradients, losses = model.probes(rows.computed(), *batch, mask)
        rows.loss.add_(losses)
        batches.advance(mask.shape[0])
        return _add(gradients, rows.kept[0], None, None)  # 0 for a finished row

    return step


def loss_step(model: StackedModel) -> Step:
    """Adds the next batch of every row to its summed loss."""

    def step(rows: Rows, batches: Batches, inputs: Any, targets: Any) -> dict[int, Product]:
        index, mask, _ = batches.next(rows.loss.shape[0])
        parts = (*rows.weights, *rows.states)
        rows.loss.add_(model.losses(parts, take(inputs, index), take(targets, index), mask))
        batches.advance(mask.shape[0])
        return {}

    return step


def _add(
    gradients: list[Gradient], parts: Parts, scale: Tensor | None, active: Tensor | None, copies: Parts = ()
) -> dict[int, Product]:
    """Adds gradients to parts; returns the pending products of factored ones."""
    left = {}
    # Factored gradients first, before any weight changes: a layer's input may be a weight.
    for i in sorted(range(len(parts)), key=lambda i: isinstance(gradients[i], Dense)):
        product = gradients[i].add_to(parts[i], scale, active)
        if product is not None:
            left[i] = product
        if copies:  # in one loop: the compiler does not fuse operations that are far apart
            copies[i].copy_(parts[i])
    return left


def _dense(gradients: list[Gradient], weights: Parts) -> list[Tensor]:
    values = [g.value for g in gradients if isinstance(g, Dense)]
    return [value.to(wide_type(weight.dtype)) for value, weight in zip(values, weights, strict=True)]


def _update(solver: Solver, rows: Rows, gradients: list[Tensor], batches: Batches, active: Tensor) -> None:
    """The solver's step of the active rows."""
    if solver.clip is not None:
        squares = [g.square().reshape(g.shape[0], -1).sum(1) for g in gradients]
        norm = torch.stack(squares).sum(0).sqrt()
        scale = (solver.clip / (norm + 1e-6)).clamp(max=1)  # as torch.nn.utils.clip_grad_norm_ does
        gradients = [g * _wide(scale, g) for g in gradients]
    for i, (weight, g) in enumerate(zip(rows.weights, gradients, strict=True)):
        moments = tuple(parts[i] for parts in rows.kept)
        change, new = solver.update(weight.to(g.dtype), g, moments, batches.lr, batches.step)
        weight.add_(torch.where(_wide(active, weight), change, 0))
        for old, value in zip(moments, new, strict=True):
            old.copy_(value)
