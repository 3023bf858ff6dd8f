"""Rows at work: the tensors of a chunk of rows, and the step that they take together.

Everything stays in its place from chunk to chunk, so that on a GPU a step is recorded once for each number
of rows and then replayed as a whole (a CUDA graph): launched one by one, its kernels wait for the host.
"""

import warnings
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.engine.cohort import Cohort, Parts
from fairwind.engine.solver import Solver
from fairwind.errors import first_line

COUNTS = 128  # numbers of rows that are recorded, at most: others are rounded up to these


class Rows(NamedTuple):
    """What belongs to rows: one tensor (rows, *shape) for each parameter, or none."""

    weights: Parts
    carried: Parts  # from step to step: momenta, or the summed gradient
    cast: Parts  # the weights in the type of the computation, where that is another
    loss: Tensor  # (rows,) summed

    def first(self, n: int) -> "Rows":
        weights, carried, cast = (tuple(part[:n] for part in parts) for parts in self[:3])
        return Rows(weights, carried, cast, self.loss[:n])

    def tensors(self) -> Sequence[Tensor]:
        return *self.weights, *self.carried, *self.cast, self.loss


Step = Callable[
    [Rows, Tensor, Tensor, Tensor, Tensor], None
]  # rows, samples, keys, inputs, targets; in place


def train_step(cohort: Cohort, solver: Solver) -> Step:
    """One local step of every row, in place."""

    def step(rows: Rows, samples: Tensor, keys: Tensor, inputs: Tensor, targets: Tensor) -> None:
        # samples (rows, B), of which negative ones are padding; keys (rows,)
        mask, index = samples >= 0, torch.where(samples >= 0, samples, ~samples)
        gradients = cohort.gradients(rows.cast or rows.weights, inputs[index], targets[index], mask, keys)
        for i, (weight, g) in enumerate(zip(rows.weights, gradients, strict=True)):
            momentum = rows.carried[i] if rows.carried else None
            change, momenta = solver.update(weight, g.to(weight.dtype), momentum)
            training = mask[:, 0].view(-1, *[1] * (weight.ndim - 1))  # a row that has finished stays
            weight.add_(torch.where(training, change, 0))
            if rows.cast:
                rows.cast[i].copy_(weight)
            if momentum is not None and momenta is not None:
                momentum.copy_(momenta)

    return step


def probe_step(cohort: Cohort) -> Step:
    """Adds a block of every row's samples to its summed gradient and loss, in place."""

    def step(rows: Rows, samples: Tensor, keys: Tensor, inputs: Tensor, targets: Tensor) -> None:
        mask, index = samples >= 0, torch.where(samples >= 0, samples, ~samples)
        gradients, losses = cohort.probes(rows.weights, inputs[index], targets[index], mask)
        for summed, g in zip(rows.carried, gradients, strict=True):
            summed.add_(g)
        rows.loss.add_(losses)

    return step


class Bench:
    """Where the rows of one chunk after another take their steps."""

    def __init__(
        self, step: Step, cohort: Cohort, data: tuple[Tensor, Tensor], *, carries: bool, casts: bool
    ):
        self.step, self.cohort, self.data = step, cohort, data
        self.carries, self.casts = carries, casts and cohort.compute != cohort.dtype
        self.device = data[0].device
        self.recording = self.device.type == "cuda"
        self.clear()

    def clear(self) -> None:
        """Gives all memory back."""
        self.graphs: dict[int, torch.cuda.CUDAGraph | None] = {}  # None: taken once, not recorded yet
        self.pool = torch.cuda.graph_pool_handle() if self.recording else None
        self.rows: Rows | None = None
        self.table = self.keys = self.at = torch.empty(0)

    def compile(self) -> None:
        """Compiles the step when it is first taken."""
        self.step = _compile(self.step)

    def seat(self, x: Tensor, run: Tensor) -> Rows:
        """Gives every row its run's model of x (R, P)."""
        rows = self._room(len(run), x).first(len(run))
        for seat, part in zip(rows.weights, self.cohort.parts(x), strict=True):
            torch.index_select(part, 0, run, out=seat)
        for tensor in (*rows.carried, rows.loss):
            tensor.zero_()
        for cast, weight in zip(rows.cast, rows.weights, strict=False):
            cast.copy_(weight)
        return rows

    def _room(self, rows: int, x: Tensor) -> Rows:
        if self.rows is None or len(self.rows.loss) < rows:
            self.clear()

            def parts(needed: bool, dtype: torch.dtype) -> Parts:
                # Every row is laid out as its parameter is: a channels-last kernel stays one.
                layouts = zip(self.cohort.shapes, self.cohort.strides, strict=True) if needed else ()
                return tuple(
                    torch.empty_strided(
                        (rows, *shape), (shape.numel(), *stride), dtype=dtype, device=self.device
                    )
                    for shape, stride in layouts
                )

            carried, cast = parts(self.carries, x.dtype), parts(self.casts, self.cohort.compute)
            loss = torch.empty(rows, dtype=x.dtype, device=self.device)
            self.rows = Rows(parts(True, x.dtype), carried, cast, loss)
        return self.rows

    def work(self, counts: list[int], table: Tensor, keys: Tensor) -> None:
        """Takes steps, each by the first so many rows, with the next of the table's (Σ counts, B) batches.

        Where a count was rounded up, batches of a row that has finished are all padding.
        """
        assert self.rows is not None
        if not self.recording:
            batches = zip(counts, torch.split(table, counts), torch.split(keys, counts), strict=True)
            for n, samples, key in batches:
                self.step(self.rows.first(n), samples, key, *self.data)
            return
        if len(self.table) < len(table):
            self.graphs.clear()
            self.table, self.keys = torch.empty_like(table), torch.empty_like(keys)
            self.at = torch.zeros((), dtype=torch.int64, device=self.device)
        self.table[: len(table)] = table
        self.keys[: len(keys)] = keys
        self.at.zero_()
        for n in counts:
            self._replay(n)

    def _replay(self, n: int) -> None:
        graph = self.graphs.get(n)
        if graph is None and n in self.graphs and self.recording:
            graph = self.graphs[n] = self._record(n)
        if graph is not None:
            graph.replay()
        else:  # the first time as it is, which compiles and chooses kernels
            self._next(n)
            self.graphs[n] = None

    def _next(self, n: int) -> None:
        assert self.rows is not None
        here = self.at + torch.arange(n, device=self.device)
        self.step(self.rows.first(n), self.table[here], self.keys[here], *self.data)
        self.at.add_(n)

    def _record(self, n: int) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self.pool)
                try:
                    self._next(n)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            warnings.warn(f"steps are launched kernel by kernel: {first_line(error)}", stacklevel=2)
            self.recording = False
            return None
        torch.cuda.current_stream().wait_stream(stream)
        return graph

    def rounded(self, active: Tensor) -> Tensor:
        """Numbers of active rows as they are taken: a few more where too many would have to be recorded."""
        most = int(active[0])
        if self.recording:
            multiple = -(-most // COUNTS)
            active = -(-active // multiple) * multiple
        # Compiled code treats a size of one apart.
        return active.clamp(min=min(2, most), max=most)


def out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _compile(step: Step) -> Step:
    """Compiles a step for any number of rows."""
    assert isinstance(step, FunctionType)
    # Compiled code is cached, and its number limited, by code object: each engine gets its own.
    step.__code__ = step.__code__.replace()
    compiled = torch.compile(step)
    chosen: Step | None = None

    def call(rows: Rows, samples: Tensor, keys: Tensor, inputs: Tensor, targets: Tensor) -> None:
        nonlocal chosen
        if chosen is not None:
            return chosen(rows, samples, keys, inputs, targets)
        if len(samples) > 1:
            for tensor in (*rows.tensors(), samples, keys):
                torch._dynamo.mark_dynamic(tensor, 0)
        try:
            compiled(rows, samples, keys, inputs, targets)
            chosen = compiled
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            if isinstance(error, RuntimeError) and out_of_memory(error):
                raise
            warnings.warn(f"the local step runs uncompiled, and slower: {first_line(error)}", stacklevel=2)
            chosen = step
            step(rows, samples, keys, inputs, targets)

    return call
