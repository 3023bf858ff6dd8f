"""Rows of unequal length, in chunks that fit into memory and are sorted with the longest first."""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.data.counter import mixed, segments
from fairwind.engine.schedule import Order, Selection, places


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
    rows_of: dict[int, Tensor]  # which of the chunk's rows are a run's, for some runs

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
        return mixed(order.dropout_key[self.batch_entry], self.batch_step)


def chunk_of(
    rows: Tensor,
    row_run: Tensor,
    row_entry: Tensor,
    selection: Selection,
    counts: Tensor,
    batch_size: int,
    apart: Collection[int] = (),
) -> Chunk:
    """A chunk of rows with their runs and entries, and how many of the first rows take each step."""
    device = selection.entry.device
    runs = torch.unique(row_run)
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
        {r: (row_run == r).nonzero()[:, 0].to(device) for r in apart if r in runs},
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
