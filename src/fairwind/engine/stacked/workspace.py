"""Preallocated tensors of the rows in training, at fixed addresses for CUDA graphs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fairwind.data.counter import segments
from fairwind.data.federation import Federation
from fairwind.data.samples import mapped, tensors
from fairwind.engine.backends.graphs import Graphs
from fairwind.engine.local import PLAIN, Modifications, Rules
from fairwind.engine.solver import wide_type
from fairwind.engine.stacked.model import StackedModel
from fairwind.engine.stacked.steps import Batches, Rows, Step

# Step s updates the first counts[s] rows.
TakeSteps = Callable[[Rows, Batches, Any, Any, list[int]], None]


class Workspace:
    """The memory in which the rows of one chunk after another train."""

    def __init__(
        self,
        step: Step,
        model: StackedModel,
        data: tuple[Any, Any],
        batch_size: int,
        graphs: Graphs,
        *,
        kept: int = 0,
        casts: bool = False,
        rules: Rules = PLAIN,
    ):
        """Rows have this many numbers of optimizer state per parameter; `casts` allows another type."""
        self.rules = rules
        self.step, self.model, self.data, self.batch_size = step, model, data, batch_size
        self.kept, self.casts = kept, casts and model.compute != model.dtype
        self.wide = wide_type(model.dtype)
        self.graphs = graphs
        self.compiled: TakeSteps | None = None
        self.there: Tensor | None = None  # clients whose samples were copied to the device
        self.clear()

    @property
    def device(self) -> torch.device:
        return tensors(self.data)[0].device

    def clear(self) -> None:
        """Frees all memory."""
        self.graphs.forget()
        self.rows: Rows | None = None
        self.batches: Batches | None = None

    def bring(self, federation: Federation, clients: Tensor) -> None:
        """Copies the training samples of these clients from the host to the device."""
        if clients is self.there:
            return
        owner, place = segments(federation.train[clients])
        brought = federation.at(federation.start[clients][owner] + place)
        count = len(owner)
        if self.there is None or len(tensors(self.data)[0]) < count:
            self.graphs.forget()
            room = 1 << (count - 1).bit_length()
            self.data = mapped(lambda t: t.new_empty(room, *t.shape[1:]), brought)
        for room_there, value in zip(tensors(self.data), tensors(brought), strict=True):
            room_there[:count] = value
        self.there = clients

    def example(self) -> tuple[Rows, Batches, Any, Any]:
        """Example arguments of a step, with a few rows."""
        device = self.device
        table = torch.zeros(2, self.batch_size, dtype=torch.int64, device=device)
        number = torch.zeros((), dtype=self.wide, device=device)
        counters = torch.zeros_like(table[0, 0]), number, number
        return self._rows(2, 2, device), Batches(table, table[:, 0].contiguous(), *counters), *self.data

    def _rows(self, n: int, runs: int, device: torch.device) -> Rows:
        """Allocates memory for n rows of this many runs."""
        layout, own = self.model.layout, self.model.dtype
        compute = self.model.compute if self.casts else own
        loss = torch.zeros(n, dtype=self.wide, device=device)
        states = self.model.states.empty(n, own, device)
        adds, corrected = self.rules.adds, self.rules.corrected
        return Rows(
            layout.empty(n, own, device),
            tuple(layout.empty(n, self.wide, device) for _ in range(self.kept)),
            layout.empty(n, compute, device) if self.casts else (),
            loss,
            states,
            (*layout.empty(n, compute, device), *(s.clone() for s in states)) if corrected else (),
            (loss.clone(), loss.long(), torch.arange(n, device=device)) if adds or self.rules.scales else (),
            self.model.shared.empty(n if self.rules.own else runs, self.wide, device) if adds else (),
        )

    def load(self, models: list[Tensor], row_run: Tensor, modifications: Modifications | None = None) -> Rows:
        """Loads its run's model, given as matrices (R, n), and step modification into every row."""
        layout, n = self.model.layout, len(row_run)
        if self.rows is None or len(self.rows.loss) < n:
            self.clear()
            self.rows = self._rows(n, len(models[0]), models[0].device)
        rows = self.rows.first(n)
        _spread(models, row_run, layout.as_matrices(rows.weights)[: len(models)])
        for tensor in (*(part for parts in rows.kept for part in parts), rows.loss):
            tensor.zero_()
        if modifications is not None and rows.rule:
            for place, numbers in zip(rows.rule[:2], modifications.rule, strict=True):
                torch.index_select(numbers, 0, row_run, out=place)
            vectors = self.model.shared.as_matrices(rows.offset) if rows.offset else []
            if self.rules.own:
                _spread(modifications.vectors, row_run, [matrix[:n] for matrix in vectors])
            else:
                rows.rule[2].copy_(row_run)
                for place, matrix in zip(vectors, modifications.vectors, strict=True):
                    place.copy_(matrix)
        return rows

    def begin(self, rows: Rows) -> None:
        """Copies what rows begin from, once all of it is loaded."""
        begun = (*rows.weights, *rows.states)
        for copies in (rows.cast, rows.received):
            for half, part in zip(copies, begun, strict=False):
                half.copy_(part)

    def work(self, counts: list[int], samples: Tensor, keys: Tensor | None, lr: Tensor) -> None:
        """Takes steps, each with the given number of first rows, on the next of (Σ counts, B) samples.

        If a count was rounded up, the samples of a finished row are all padding.
        """
        assert self.rows is not None
        if self.batches is None or len(self.batches.samples) < len(samples):
            self.graphs.forget()
            room = 1 << (len(samples) - 1).bit_length()  # more than needed, to avoid repeated growth
            tables = samples.new_empty(room, self.batch_size), samples.new_zeros(room)
            step, rate = torch.zeros(2, dtype=self.wide, device=samples.device)
            self.batches = Batches(*tables, samples.new_zeros(()), step, rate)
        self.batches.samples[: len(samples)] = samples
        if keys is not None:
            self.batches.keys[: len(keys)] = keys
        self.batches.lr.copy_(lr)
        for counter in (self.batches.at, self.batches.step):
            counter.zero_()
        if self.compiled is not None:
            return self.compiled(self.rows, self.batches, *self.data, counts)
        for n in counts:
            self.graphs.do((self, n), partial(self._step, n))
        return None

    def _step(self, n: int) -> None:
        assert self.rows is not None
        assert self.batches is not None
        rows = self.rows.first(n)
        targets = rows.kept[0] if rows.kept else rows.weights
        for i, product in self.step(rows, self.batches, *self.data).items():
            product.add_to(targets[i])


def _spread(of_runs: list[Tensor], row_run: Tensor, places: list[Tensor]) -> None:
    """Copies each run's row to the rows of its clients."""
    for place, matrix in zip(places, of_runs, strict=True):
        torch.index_select(matrix, 0, row_run, out=place)
