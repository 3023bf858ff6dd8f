"""What some types of algorithm need besides one sum: client memory, gradients, held updates."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.contract import GradientAlgorithm, MemoryAlgorithm, Report
from fairwind.data.federation import Federation
from fairwind.engine.executor import Run, seeing
from fairwind.engine.layout import Layout, Parts
from fairwind.engine.local import Locals, Modifications, trains_alone
from fairwind.engine.memory import Memories, changed
from fairwind.engine.plan import ExecutionPlan
from fairwind.engine.ranks import Ranks
from fairwind.engine.round_updates import RoundUpdates
from fairwind.engine.stacked.chunks import Chunk
from fairwind.engine.stacked.steps import Rows
from fairwind.engine.stacked.sums import ChunkSums
from fairwind.engine.workers import Workers


class Trained(NamedTuple):
    """The results of a chunk of rows."""

    part: ChunkSums | None  # none for personal models
    usable: dict[int, Tensor]  # by run whose clients train alone: which of its rows (n,) are usable
    changes: dict[int, Tensor]  # by run, Σ of the changes of its clients' memories (P,)
    held: dict[int, tuple[Report, Tensor, list[Tensor]]]  # by run: reports, clients and updates
    remembered: list[tuple[int, Tensor, Tensor]]  # runs, clients, and their memories' changes or new models


class MeanGradient:
    """The mean (1/ΣS)·Σ S_k·∇F_k(x) over a run's clients, accumulated chunk by chunk."""

    def __init__(self, like: Tensor):
        self.total = torch.zeros_like(like, dtype=torch.float64)
        self.weight = torch.zeros((), dtype=torch.float64, device=like.device)

    def add(self, total: Tensor, weight: Tensor) -> None:
        self.total, self.weight = self.total + total, self.weight + weight

    def mean(self, ranks: Ranks) -> Tensor:
        """Over all ranks."""
        self.total, self.weight = ranks.sum(self.total, self.weight)
        return self.total / self.weight.clamp(min=1)


class AlgorithmExtras:
    """Handles these for chunks of stacked rows."""

    def __init__(
        self,
        layout: Layout,
        memories: Memories,
        runs: Sequence[Run],
        federation: Federation,
        plan: ExecutionPlan,
    ):
        self.layout, self.memories, self.runs = layout, memories, runs
        self.sizes = federation.train.to(federation.device).double()
        self.seeing = seeing(runs)
        self.workers = Workers([None] * (plan.workers.value if self.seeing else 1))
        self.gram_numbers = plan.sizes.gram_numbers
        self.summing = [r for r, run in enumerate(runs) if isinstance(run.algorithm, GradientAlgorithm)]

    def held(self) -> dict[int, RoundUpdates]:
        """Where updates are held in a round, for the runs whose servers see them."""
        how = self.layout.from_matrices, self.gram_numbers, self.workers
        return {r: RoundUpdates(algorithm, *how) for r, algorithm in self.seeing.items()}

    def begin(self, local: Locals, chunk: Chunk, rows: Rows) -> None:
        """Loads the clients' memories into rows: as part of their modified steps, or as initial weights."""
        for r, here in chunk.rows_of.items():
            if r not in self.memories.values:
                continue
            kept = self.memories.take(r, chunk.clients(here))
            if local.way == "personal":
                for parts in filter(None, (rows.weights, rows.cast)):
                    for place, matrix in self._pairs(parts, kept):
                        place.index_copy_(0, here, matrix.to(place.dtype))
            elif r in local.memories:
                factor = local.memories[r].factor
                for place, matrix in self._pairs(
                    tuple(part[: len(chunk.rows)] for part in rows.offset), kept
                ):
                    if len(here) == len(place):
                        place.add_(matrix, alpha=factor)
                    else:
                        place.index_add_(0, here, matrix, alpha=factor)

    def _pairs(self, parts: Parts, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of rows and flat vectors (n, P), both as matrices."""
        matrices = self.layout.as_matrices(self.layout.parts(flat))
        return zip(self.layout.as_matrices(parts), matrices, strict=True)

    def keep_models(self, chunk: Chunk, weights: list[Tensor]) -> Trained:
        """The trained personal models that are finite."""
        kept, counted = [], {}
        for r, here in chunk.rows_of.items():
            new, client = self.layout.from_matrices([matrix[here] for matrix in weights]), chunk.clients(here)
            usable = torch.isfinite(new).all(1, keepdim=True)
            kept.append((r, client, torch.where(usable, new, self.memories.take(r, client))))
            if trains_alone(self.runs[r]):
                counted[r] = usable[:, 0]
        return Trained(None, counted, {}, {}, kept)

    def remember(self, local: Locals, trained: Trained) -> None:
        """Stores new memories, once it is certain that their chunk will not be trained again."""
        for each in trained.remembered:
            if local.way == "personal":
                self.memories.put(*each)
            else:
                self.memories.add(*each)

    def share(
        self,
        r: int,
        clients: Tensor,
        mine: Tensor,
        models: list[Tensor],
        more: dict[int, Tensor],
        held: dict[int, RoundUpdates],
        ranks: Ranks,
    ) -> None:
        """Gives all ranks what a run's clients (n,) sent and kept in a round; `mine` (n,) trained here."""
        device = models[0].device
        if r in held:
            held[r].share(ranks, clients.to(device), [model[r : r + 1] for model in models])
        if r in self.memories.values:
            self.memories.share(r, clients.to(device), mine.to(device), ranks)
            if isinstance(self.runs[r].algorithm, MemoryAlgorithm):
                nothing = torch.zeros(self.layout.parameters, dtype=torch.float64, device=device)
                (more[r],) = ranks.sum(more.get(r, nothing))

    def after(
        self,
        local: Locals,
        modifications: Modifications,
        chunk: Chunk,
        report: Report,
        delta: list[Tensor],
        part: ChunkSums,
        *,
        copy: bool,
    ) -> Trained:
        """New memories and updates, as a `copy` if the next chunk overwrites the rows."""
        found = Trained(part, {}, {}, {}, [])
        for r, here in chunk.rows_of.items():
            if r not in self.seeing and r not in local.memories:
                continue
            own, client = Report(*(field[here] for field in report)), chunk.clients(here)
            every = len(here) == len(chunk.rows)
            update = delta if every else [matrix.index_select(0, here) for matrix in delta]
            if r in self.seeing:
                found.held[r] = own, client, [m.clone() for m in update] if every and copy else update
            if r in local.memories:
                rule, memory = local.memories[r].change(own), partial(self.memories.take, r, client)
                flat, shared = self.layout.from_matrices(update), modifications.shared.get(r, 0.0)
                change = changed(rule, memory, shared, flat, part.usable[here])
                found.changes[r] = change.sum(0).double()
                found.remembered.append((r, client, change))
        return found

    def gradients(
        self, chunk: Chunk, sums: list[Tensor], norm: Tensor, divisor: Tensor
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """By run, Σ S_k·∇F_k (P,) and ΣS of the clients with a finite gradient.

        `sums` are the rows' gradients, summed over the probed samples; divided by `divisor` they are ∇F_k.
        """
        found = {}
        for r in self.summing:
            if r in chunk.rows_of:
                here = chunk.rows_of[r]
                size, counted = self.sizes[chunk.clients(here)], torch.isfinite(norm[here])
                each = size / divisor[here]
                flat = self.layout.from_matrices([m[here] for m in sums])
                flat = torch.where(counted[:, None], flat, 0).double()
                total = torch.where(counted, each, 0)[None] @ flat
                found[r] = total[0], torch.where(counted, size, 0).sum()
        return found
