"""The rows of a round in chunks that fit into memory, sorted with the longest first."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fairwind.data.counter import mix, segments
from fairwind.engine import tuning
from fairwind.engine.executor import Run
from fairwind.engine.local import PASSES, trains
from fairwind.engine.plan import ExecutionPlan, chunk_numbers
from fairwind.engine.ranks import Ranks
from fairwind.engine.schedule import Order, Plan, Planner, Selection, places
from fairwind.engine.solver import Solver
from fairwind.engine.stacked.model import StackedModel


class Chunk(NamedTuple):
    """Rows that train together, the longest first: everything that is known before shuffling."""

    rows: Tensor  # (n,) which of the round's rows
    row_run: Tensor  # (n,)
    row_entry: Tensor  # (n,) which of the selection's entries
    client: Tensor  # (n,)
    size: Tensor  # (n,) samples, in float64
    steps: Tensor  # (n,) τ, in float64
    runs: list[int]  # the runs among the rows, here
    runs_there: Tensor  # and on the device
    member: Tensor  # (runs, n) 1 where a row is the run's, else 0
    selection: Selection
    counts: list[int]  # number of rows that take each step
    batch_step: Tensor  # (Σ counts,) each batch's step
    batch_entry: Tensor  # (Σ counts,) which of the selection's entries it belongs to
    batch_places: Tensor  # (Σ counts, B) which of the ordered samples it takes
    padding: Tensor  # (Σ counts, B) −1 for padding, else 0
    rows_of: dict[int, Tensor]  # by run, which of the chunk's rows are its

    def clients(self, rows: Tensor) -> Tensor:
        """The clients of some of the chunk's rows."""
        return self.client[rows]

    def samples(self, order: Order) -> Tensor:
        """The batches' samples (Σ counts, B), with all bits inverted, and thus negative, for padding."""
        return order.samples[self.batch_places] ^ self.padding

    def sums(self, values: Tensor, order: Order) -> Tensor:
        """Sums over the samples of each row (n,), given a value of every sample."""
        taken = values[order.samples]
        owner, _ = segments(self.selection.size, len(taken))
        return taken.new_zeros(len(self.selection.size)).index_add_(0, owner, taken)[self.row_entry]

    def dropout_keys(self, order: Order) -> Tensor:
        """The random keys of the batches' dropout (Σ counts,)."""
        return mix(order.dropout_key[self.batch_entry], self.batch_step)


def chunk_of(
    rows: Tensor,
    row_run: Tensor,
    row_entry: Tensor,
    selection: Selection,
    counts: Tensor,
    batch_size: int,
) -> Chunk:
    """A chunk of rows with their runs and entries, and how many of the first rows take each step."""
    device = selection.entry.device
    runs, rows_each = torch.unique(row_run, return_counts=True)
    by_run = torch.split(torch.argsort(row_run, stable=True).to(device), rows_each.tolist())
    row_entry, active = row_entry.to(device), counts.tolist()
    batch_step, batch_row = segments(counts.to(device), sum(active))
    batch_entry = row_entry[batch_row]
    return Chunk(
        rows.to(device),
        row_run.to(device),
        row_entry,
        selection.client[row_entry],
        selection.size[row_entry].double(),
        selection.steps[row_entry].double(),
        runs.tolist(),
        runs.to(device),
        (runs[:, None] == row_run).double().to(device),
        selection,
        active,
        batch_step,
        batch_entry,
        *places(selection, batch_entry, batch_step, batch_size),
        dict(zip(runs.tolist(), by_run, strict=True)),
    )


def active_rows(steps: Tensor, multiple: int = 1) -> Tensor:
    """How many of n rows, sorted by their steps (n,), take each step, rounded up to a multiple."""
    finished = torch.bincount(steps).cumsum(0)[:-1]
    active = -(-(len(steps) - finished) // multiple) * multiple
    # The compiler specialises a size of one.
    return active.clamp(min=min(2, len(steps)), max=len(steps))


def chunks(costs: Tensor, limit: int) -> tuple[Tensor, ...]:
    """Indices in consecutive chunks whose costs sum to about the limit, or a single cost above it."""
    _, counts = torch.unique_consecutive(costs.cumsum(0) // limit, return_counts=True)
    return torch.split(torch.arange(len(costs)), counts.tolist())


def evenly(costs: Tensor, budget: int) -> list[Tensor]:
    """Indices in few chunks of equal size, up to one, within the budget if possible."""
    parts = -(-int(costs.sum()) // budget)
    while True:
        cut = list(torch.arange(len(costs)).tensor_split(min(parts, len(costs))))
        if parts >= len(costs) or max(int(costs[part].sum()) for part in cut) <= budget:
            return cut
        parts += 1 + parts // 8


def round_robin(count: int, parts: int) -> list[Tensor]:
    """Indices 0 to count, distributed round-robin: every part has some of the first and of the last."""
    return [torch.arange(count)[k::parts] for k in range(min(parts, count))]


def row_numbers(model: StackedModel, solver: Solver, batch_size: int, vectors: int) -> int:
    """How many numbers a row holds, apart from its samples, with this many further vectors."""
    # Its parameters, received ones, gradient, moments and a temporary; the activations of a batch, and
    # their gradients.
    kept, activations = max(1, solver.moments), 2 * batch_size * model.per_sample
    return (4 + kept + vectors) * model.layout.parameters + model.per_row + activations


# What rows are used for: kinds of training, and probes
Kind = Literal["training", "corrected", "personal", "gradient", "loss"]
PROBES: tuple[Kind, ...] = ("gradient", "loss")


class Cutter:
    """The rows of a round: one for each client of each run."""

    def __init__(
        self,
        model: StackedModel,
        planner: Planner,
        runs: list[Run],
        plan: ExecutionPlan,
        *,
        vectors: int = 0,
    ):
        """Rows have so many further `vectors`."""
        self.vectors = vectors
        self.model, self.planner, self.runs = model, planner, runs
        self.workers, self.even = plan.workers.value, plan.sizes.even_chunks
        # How many numbers the rows of a chunk may hold together; and with how many launching costs little
        self.budget = chunk_numbers(plan.memory.value, model.dtype.itemsize)
        self.launched = tuning.MIN_NUMBERS_PER_LAUNCH * model.operations if plan.steps.value == "eager" else 0
        self.seeds = sorted({run.seed for run in runs})
        self.run_seed = torch.tensor([self.seeds.index(run.seed) for run in runs])  # (R,)
        # Samples of a client per probe batch: more are faster, but clients with fewer samples are padded.
        sizes = planner.probed(planner.federation.train)
        typical, largest = int(sizes.double().mean()), max(1, int(sizes.max()))
        probed = min(plan.sizes.probed_samples, max(32, 1 << typical.bit_length() - 1), largest)
        if model.probe_batch is not None:
            probed = model.probe_batch
        self.batch_sizes: dict[Kind, int] = dict.fromkeys(PROBES, probed)
        self.batch_sizes |= dict.fromkeys(PASSES, planner.solver.batch_size)
        self.plan: Plan | None = None
        self.steps = 0  # of a round, in all

    def begin(self, round: int, ranks: Ranks) -> int:
        """Prepares a round and this rank's rows; returns the number of local steps of all ranks."""
        if self.planner.repeats and self.plan is not None:  # only the keys change
            self.plan = self.planner.with_keys(self.plan, self.seeds, round)
            return self.steps
        self.plan = self.planner.plan(self.seeds, round)
        # Every run has a row for each client its seed chose.
        per_seed = self.planner.participants
        row_run = torch.arange(len(self.runs)).repeat_interleave(per_seed)
        row_entry = (self.run_seed[row_run].view(-1, per_seed) * per_seed + torch.arange(per_seed)).view(-1)
        steps = self.plan.steps[row_entry]
        # Ranks share the rows so that all have about the same work.
        passes = torch.tensor([1 + (r.algorithm.probe == "gradient") for r in self.runs])
        mine = ranks.share(steps * passes[row_run])
        self.row_run, self.row_entry = row_run[mine], row_entry[mine]
        self.steps = int(steps.sum())
        return self.steps

    def clients(self, r: int) -> tuple[Tensor, Tensor]:
        """The clients of a run (n,) in the round, and which of them this rank has."""
        assert self.plan is not None
        first, count = int(self.run_seed[r]) * self.planner.participants, self.planner.participants
        mine = torch.zeros(count, dtype=torch.bool)
        mine[self.row_entry[self.row_run == r] - first] = True
        return self.plan.client[first : first + count], mine

    def rows(self, kind: Kind) -> Tensor:
        """The rows for a purpose, sorted so that rows of the same chunk are adjacent."""
        asking = [trains(run, kind) if kind in PASSES else run.algorithm.probe == kind for run in self.runs]
        rows = torch.tensor(asking)[self.row_run].nonzero()[:, 0]
        rows = rows[torch.argsort(self._steps(kind, rows), descending=True, stable=True)]
        # Rows with equal numbers of steps waste the least; but a chunk pays for the sums of all its runs,
        # which is expensive if it has few rows.
        if self.budget < 4 * len(self.runs) * self.fixed(kind):
            rows = rows[torch.argsort(self.row_run[rows], stable=True)]
        return rows

    def cut(self, kind: Kind, rows: Tensor) -> list[Tensor]:
        """Rows in chunks within the budget, in each the longest first."""
        if not len(rows):
            return []
        costs = self._costs(kind, rows)
        if self.even:  # of one size, so that all reuse the same memory
            parts = evenly(costs, self.budget)
        else:
            parts = list(chunks(costs, self.budget))
            # Few rows: each worker gets equally many, of all lengths, if there is enough work to wake it up
            # (and if workers would not mostly wait for the GIL).
            work = int(self._steps(kind, rows).sum()) * self.fixed(kind)
            enough = work >= tuning.MIN_SHARED_NUMBERS and int(costs.sum()) >= self.launched
            if len(parts) < 8 * self.workers and (len(parts) > 1 or enough):
                parts = round_robin(len(rows), -(-len(parts) // self.workers) * self.workers)
        if len(parts) > 1 and len(parts[-1]) == 1 < len(parts[-2]):  # the compiler specialises one row
            parts[-2:] = [torch.cat(parts[-2:])]
        cut = [rows[part] for part in parts]
        return [part[torch.argsort(self._steps(kind, part), descending=True, stable=True)] for part in cut]

    def halved(self, kind: Kind, rows: Tensor, left: Tensor) -> list[Tensor]:
        """The remaining rows, in chunks of half the size of these rows; so are later chunks."""
        self.budget = max(1, min(self.budget, int(self._costs(kind, rows).sum())) // 2)
        return self.cut(kind, left)

    def chunk(self, kind: Kind, rows: Tensor, most_counts: int | None) -> Chunk:
        """The rows as a chunk, whose numbers of active rows are rounded up to at most this many values."""
        assert self.plan is not None
        entries, row_entry = torch.unique(self.row_entry[rows], return_inverse=True)
        bring = self.planner.federation.compute_device is not None
        if kind in PASSES:
            selection = self.planner.training(self.plan, entries, bring=bring)
        else:
            selection = self.planner.probing(self.plan, entries, self.batch_sizes[kind], bring=bring)
        multiple = 1 if most_counts is None else -(-len(rows) // most_counts)
        counts = active_rows(self._steps(kind, rows), multiple)
        return chunk_of(rows, self.row_run[rows], row_entry, selection, counts, self.batch_sizes[kind])

    def fixed(self, kind: Kind) -> int:
        """How many numbers a row holds, apart from its samples."""
        return row_numbers(self.model, self.planner.solver, self.batch_sizes[kind], self.vectors)

    def _steps(self, kind: Kind, rows: Tensor) -> Tensor:
        assert self.plan is not None
        entry = self.row_entry[rows]
        if kind in PASSES:
            return self.plan.steps[entry]
        return -(-self.planner.probed(self.plan.size[entry]) // self.batch_sizes[kind])

    def _costs(self, kind: Kind, rows: Tensor) -> Tensor:
        """Approximately how many numbers each row holds."""
        # Besides the fixed part, about a dozen int64 numbers per sample while the order is computed; and the
        # samples themselves, if they are copied to the device.
        assert self.plan is not None
        federation = self.planner.federation
        own = 24
        if federation.compute_device is not None:
            own += federation.bytes // (4 * max(1, federation.samples))
        samples = self.batch_sizes[kind] * self._steps(kind, rows)
        if kind in PASSES:  # an epoch is shuffled as a whole, even if few of its steps are taken
            samples = samples.maximum((self.plan.size * self.plan.epochs)[self.row_entry[rows]])
        return self.fixed(kind) + own * samples
