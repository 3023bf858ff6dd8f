"""Sums over the rows of chunks, for each run."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairwind.aggregation import contribute, usable_clients
from fairwind.contract import AnyAlgorithm, CohortAlgorithm, GramAlgorithm, Report
from fairwind.engine.executor import RoundSums, Run
from fairwind.engine.layout import Layout
from fairwind.engine.machine import matmul_precision
from fairwind.engine.round_updates import RoundUpdates
from fairwind.engine.stacked.chunks import Chunk


class ChunkSums(NamedTuple):
    """The sums of one chunk."""

    updates: list[Tensor]  # (runs of the chunk, n) Σ coef·δ, as the layout's matrices, in float64
    sums: dict[int, Any]  # by run
    used: Tensor  # (runs of the chunk,)
    left_out: Tensor
    lowest: Tensor  # loss
    usable: Tensor  # (rows,) which rows are usable


def by_algorithm(runs: list[Run]) -> list[tuple[AnyAlgorithm, list[int]]]:
    """Each algorithm with its runs."""
    found: dict[int, list[int]] = {}
    for r, run in enumerate(runs):
        found.setdefault(id(run.algorithm), []).append(r)
    return [(runs[mine[0]].algorithm, mine) for mine in found.values()]


def contributions(
    algorithms: list[tuple[AnyAlgorithm, list[int]]],
    chunk: Chunk,
    report: Report,
    delta: list[Tensor],
    *,
    waits: bool,
) -> ChunkSums:
    """The rows' contributions, summed run by run; `delta` are their updates as the layout's matrices.

    `waits` if a number may be read: a GPU would have to be waited for, and a recorded round cannot.
    """
    member, coef, usable = chunk.member, torch.zeros_like(report.size), torch.zeros_like(report.size).bool()
    sums: dict[int, Any] = {}
    for algorithm, all_mine in algorithms:
        mine = [r for r in all_mine if r in chunk.runs]
        if not mine:
            continue
        if len(mine) == len(chunk.runs):
            rows, own, members = None, report, member
        else:
            rows = torch.cat([chunk.rows_of[r] for r in mine])
            own = Report(*(field[rows] for field in report))
            members = torch.stack([member[chunk.runs.index(r)][rows] for r in mine])
        if isinstance(algorithm, CohortAlgorithm | GramAlgorithm):
            counts = usable_clients(algorithm, own)
        else:
            part, counts = contribute(algorithm, own)
            coef = part.coef if rows is None else coef.index_copy(0, rows, part.coef)
            added = members @ torch.stack(part.sums, dim=1)
            sums |= {r: type(part.sums)(*new.unbind()) for r, new in zip(mine, added, strict=True)}
        usable = counts if rows is None else usable.index_copy(0, rows, counts)
    weights = member * coef
    scale = weights.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    scaled = (weights / scale).to(delta[0].dtype)
    # Mask: 0·NaN is NaN. If all are usable, a pass over the updates is saved.
    if sums and not (waits and usable.all()):
        for update in delta:
            update.masked_fill_(~usable[:, None], 0)
    with matmul_precision("float32", coef.device):
        updates = [
            scale * (scaled @ update).double()
            if sums  # servers that see all updates weight them later
            else torch.zeros(len(chunk.runs), update.shape[1], dtype=torch.float64, device=coef.device)
            for update in delta
        ]
    counted = (member @ usable.double()).long()
    measured = torch.where(report.loss.isnan(), torch.inf, report.loss)
    lowest = torch.where(member > 0, measured, torch.inf).amin(1)
    return ChunkSums(updates, sums, counted, member.sum(1).long() - counted, lowest, usable)


class RoundTotals:
    """The running sums of a round."""

    def __init__(self, runs: int, models: list[Tensor]):
        self.total = [torch.zeros_like(model, dtype=torch.float64) for model in models]
        device = models[0].device
        self.used, self.left_out = torch.zeros(2, runs, dtype=torch.int64, device=device)
        self.lowest = torch.full((runs,), torch.inf, dtype=torch.float64, device=device)
        self.sums: list[Any] = [None] * runs

    def add(self, chunk: Chunk, part: ChunkSums) -> None:
        there = chunk.runs_there
        for summed, update in zip(self.total, part.updates, strict=True):
            summed.index_add_(0, there, update)
        self.used.index_add_(0, there, part.used)
        self.left_out.index_add_(0, there, part.left_out)
        self.lowest[there] = torch.minimum(self.lowest[there], part.lowest)
        for r, new in part.sums.items():
            old = self.sums[r]
            self.sums[r] = new if old is None else type(new)(*map(torch.add, old, new))

    def count(self, r: int, usable: Tensor) -> None:
        """Adds rows (n,) of a run that contribute nothing else."""
        self.used[r] += usable.sum()
        self.left_out[r] += (~usable).sum()

    def outcome(self, layout: Layout, more: dict[int, Tensor], held: dict[int, RoundUpdates]) -> RoundSums:
        total = layout.from_matrices(self.total)
        return RoundSums(total, self.sums, self.used, self.left_out, self.lowest, more, held)


def norms(parts: list[Tensor]) -> Tensor:
    """Euclidean norms of rows, summed in float64."""
    found = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts]
    return torch.stack(found).square().sum(0).sqrt()
