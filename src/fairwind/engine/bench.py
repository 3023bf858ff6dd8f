"""Rows at work: the tensors of a chunk of rows, and the step that they take together.

Everything stays in its place from chunk to chunk, so that on a GPU a step is recorded once for each number
of rows, and replayed.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairwind.engine.cohort import Cohort, Parts
from fairwind.engine.factors import Factors
from fairwind.engine.record import Recorder, out_of_memory
from fairwind.engine.solver import Solver
from fairwind.errors import first_line

COUNTS = 128  # numbers of rows that are recorded, at most: others are rounded up to these


class Rows(NamedTuple):
    """What belongs to rows: tensors (rows, *shape) for each parameter, or none."""

    weights: Parts
    carried: Parts  # from step to step: momenta, or the summed gradient
    cast: Parts  # the weights in the type of the computation, where that is another
    loss: Tensor  # (rows,) summed

    def first(self, n: int) -> "Rows":
        weights, carried, cast = (tuple(part[:n] for part in parts) for parts in self[:3])
        return Rows(weights, carried, cast, self.loss[:n])

    def tensors(self) -> Sequence[Tensor]:
        return *self.weights, *self.carried, *self.cast, self.loss


class Batches(NamedTuple):
    """What rows train on: a table of batches that the rows of one step after another take from."""

    samples: Tensor  # (many, B), negative is padding
    keys: Tensor  # (many,)
    at: Tensor  # () where the next step's batches begin

    def take(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """The next n rows' samples, which of them count, and keys."""
        here = self.at + torch.arange(n, device=self.at.device)
        samples = self.samples[here]
        mask = samples >= 0
        return torch.where(mask, samples, ~samples), mask, self.keys[here]


# With inputs and targets; in place, but for gradients left as factors, which are still to be added to parts.
Left = dict[int, Factors]
Step = Callable[[Rows, Batches, Tensor, Tensor], Left]


def train_step(cohort: Cohort, solver: Solver) -> Step:
    """One local step of every row."""

    def step(rows: Rows, batches: Batches, inputs: Tensor, targets: Tensor) -> Left:
        index, mask, keys = batches.take(len(rows.loss))
        gradients = cohort.gradients(rows.cast or rows.weights, inputs[index], targets[index], mask, keys)
        training = mask[:, 0]  # a row that has finished stays
        here = training[:, None, None]
        # Copies, before any weight changes: a layer may have seen a weight.
        left = {
            i: Factors(torch.where(here, -solver.lr * g.back, 0), torch.where(here, g.seen, 0))
            for i, g in enumerate(gradients)
            if isinstance(g, Factors)
        }
        for i, (weight, g) in enumerate(zip(rows.weights, gradients, strict=True)):
            if isinstance(g, Factors):
                continue
            momentum = rows.carried[i] if rows.carried else None
            change, momenta = solver.update(weight, g.to(weight.dtype), momentum)
            weight.add_(torch.where(training.view(-1, *[1] * (weight.ndim - 1)), change, 0))
            if rows.cast:
                rows.cast[i].copy_(weight)
            if momentum is not None and momenta is not None:
                momentum.copy_(momenta)
        batches.at.add_(len(mask))
        return left

    return step


def gradient_step(cohort: Cohort) -> Step:
    """Adds the next batch of every row to its summed gradient and loss."""

    def step(rows: Rows, batches: Batches, inputs: Tensor, targets: Tensor) -> Left:
        index, mask, _ = batches.take(len(rows.loss))
        gradients, losses = cohort.probes(rows.cast or rows.weights, inputs[index], targets[index], mask)
        for summed, g in zip(rows.carried, gradients, strict=True):
            if isinstance(g, Tensor):
                summed.add_(g)
        rows.loss.add_(losses)
        batches.at.add_(len(mask))
        return {i: g for i, g in enumerate(gradients) if isinstance(g, Factors)}

    return step


def loss_step(cohort: Cohort) -> Step:
    """Adds the next batch of every row to its summed loss."""

    def step(rows: Rows, batches: Batches, inputs: Tensor, targets: Tensor) -> Left:
        index, mask, _ = batches.take(len(rows.loss))
        rows.loss.add_(cohort.losses(rows.weights, inputs[index], targets[index], mask))
        batches.at.add_(len(mask))
        return {}

    return step


class Bench:
    """Where the rows of one chunk after another take their steps."""

    def __init__(
        self,
        step: Step,
        cohort: Cohort,
        data: tuple[Tensor, Tensor],
        recorder: Recorder,
        batch_size: int,
        *,
        carries: bool = False,
        casts: bool = False,
    ):
        self.step, self.cohort, self.data, self.batch_size = step, cohort, data, batch_size
        self.carries, self.casts = carries, casts and cohort.compute != cohort.dtype
        self.device, self.recorder = data[0].device, recorder
        self.clear()

    def clear(self) -> None:
        """Gives all memory back."""
        self.recorder.forget()
        self.rows: Rows | None = None
        self.batches: Batches | None = None

    def compile(self) -> None:
        """Compiles the step when it is first taken."""
        self.step = _compile(self.step)

    def seat(self, models: list[Tensor], run: Tensor) -> Rows:
        """Gives every row its run's model, of those laid out by the cohort."""
        if self.rows is None or len(self.rows.loss) < len(run):
            self.clear()
            make, own, n = self.cohort.empty, self.cohort.dtype, len(run)
            carried = make(n, own, self.device) if self.carries else ()
            cast = make(n, self.cohort.compute, self.device) if self.casts else ()
            self.rows = Rows(make(n, own, self.device), carried, cast, models[0].new_empty(n))
        rows = self.rows.first(len(run))
        for seat, model in zip(self.cohort.laid(rows.weights), models, strict=True):
            torch.index_select(model, 0, run, out=seat)
        for tensor in (*rows.carried, rows.loss):
            tensor.zero_()
        if rows.cast:
            for half, weight in zip(rows.cast, rows.weights, strict=True):
                half.copy_(weight)
        return rows

    def work(self, counts: list[int], samples: Tensor, keys: Tensor) -> None:
        """Lets the seated rows take steps, each by the first so many, on the next of (Σ counts, B) samples.

        Where a count was rounded up, the samples of a row that has finished are all padding.
        """
        if self.batches is None or len(self.batches.keys) < len(keys):
            self.recorder.forget()
            room = 1 << (len(keys) - 1).bit_length()  # more than needed, so as not to grow again and again
            places = samples.new_empty(room, self.batch_size), keys.new_empty(room), keys.new_empty(())
            self.batches = Batches(*places)
        self.batches.samples[: len(keys)] = samples
        self.batches.keys[: len(keys)] = keys
        self.batches.at.zero_()
        for n in counts:
            self.recorder.do((self, n), partial(self._step, n))

    def _step(self, n: int) -> None:
        assert self.rows is not None
        assert self.batches is not None
        rows = self.rows.first(n)
        for i, factors in self.step(rows, self.batches, *self.data).items():
            factors.add_to((rows.carried or rows.weights)[i])

    def rounded(self, active: Tensor) -> Tensor:
        """Numbers of active rows as they are taken: a few more where too many would have to be recorded."""
        most = int(active[0])
        if self.recorder.on:
            multiple = -(-most // COUNTS)
            active = -(-active // multiple) * multiple
        # Compiled code treats a size of one apart.
        return active.clamp(min=min(2, most), max=most)


def _compile(step: Step) -> Step:
    """Compiles a step for any number of rows and samples."""
    # Compiled code is cached, and its number limited, by code object: each engine gets its own.
    assert isinstance(step, FunctionType)
    step.__code__ = step.__code__.replace()
    plain: Step = step
    compiled: Step = torch.compile(plain)
    chosen: Step | None = None

    def unchecked(*arguments: Any) -> Left:
        # Calls differ only in the number of rows, for any of which there is code, or will be. To check all
        # else every time takes as long as a small step.
        try:
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                return compiled(*arguments)
        except RuntimeError as error:
            if "Recompilation triggered" not in str(error):
                raise
            return compiled(*arguments)

    def call(rows: Rows, batches: Batches, inputs: Tensor, targets: Tensor) -> Left:
        nonlocal chosen
        if chosen is not None:
            return chosen(rows, batches, inputs, targets)
        for tensor in (*rows.tensors(), *batches[:2], inputs, targets):
            if len(tensor) > 1:
                torch._dynamo.mark_dynamic(tensor, 0)
        try:
            left = compiled(rows, batches, inputs, targets)
            chosen = unchecked
            return left
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            if isinstance(error, RuntimeError) and out_of_memory(error):
                raise
            warnings.warn(f"the local step runs uncompiled, and slower: {first_line(error)}", stacklevel=2)
            chosen = plain
            return plain(rows, batches, inputs, targets)

    return call
