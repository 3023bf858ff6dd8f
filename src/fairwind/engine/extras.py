"""What some types of algorithm need besides one sum: client memory, gradients, held updates."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.aggregation import usable_clients
from fairwind.contract import GradientAlgorithm, MemoryAlgorithm, Report
from fairwind.data.federation import Federation
from fairwind.engine.executor import Run, seeing
from fairwind.engine.layout import Layout, Parts
from fairwind.engine.local import Locals, Modifications, trains_alone
from fairwind.engine.memory import Compression, Memories, OwnParts, changed
from fairwind.engine.plan import ExecutionPlan
from fairwind.engine.ranks import Ranks
from fairwind.engine.round_updates import RoundUpdates
from fairwind.engine.stacked.chunks import Chunk
from fairwind.engine.stacked.model import StackedModel
from fairwind.engine.stacked.steps import Rows
from fairwind.engine.stacked.sums import ChunkSums, norms
from fairwind.engine.workers import Workers


class OwnPart(NamedTuple):
    """What some clients of a run have for themselves after training."""

    run: int
    client: Tensor  # (n,)
    new: Tensor  # (n, ·)
    usable: Tensor  # (n,)


class Trained(NamedTuple):
    """The results of a chunk of rows."""

    part: ChunkSums | None  # none for personal models
    usable: dict[int, Tensor]  # by run whose clients train alone: which of its rows (n,) are usable
    changes: dict[int, Tensor]  # by run, Σ of the changes of its clients' memories (P,)
    held: dict[int, tuple[Report, Tensor, list[Tensor]]]  # by run: reports, clients and updates
    remembered: list[tuple[int, Tensor, Tensor]]  # runs, clients, and their memories' changes or new models
    own: list[OwnPart]
    left_out: Sequence[tuple[int, Tensor, Tensor, Tensor]] = ()  # likewise: who counts, and what a codec cut


def _pairs(layout: Layout, parts: Parts, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of rows and flat vectors (n, ·), both as matrices."""
    return zip(layout.as_matrices(parts), layout.as_matrices(layout.parts(flat)), strict=True)


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
        model: StackedModel,
        memories: Memories,
        own: OwnParts,
        runs: Sequence[Run],
        federation: Federation,
        plan: ExecutionPlan,
        compression: Compression | None = None,
    ):
        self.compression = compression
        self.model, self.layout, self.memories, self.own, self.runs = model, model.shared, memories, own, runs
        self.sizes = federation.train.to(federation.device).double()
        self.seeing = seeing(runs)
        self.workers = Workers([None] * (plan.workers.value if self.seeing else 1))
        self.gram_numbers = plan.sizes.gram_numbers
        self.summing = [r for r, run in enumerate(runs) if isinstance(run.algorithm, GradientAlgorithm)]

    def held(self) -> dict[int, RoundUpdates]:
        """Where updates are held in a round, for the runs whose servers see them."""
        how = self.layout.from_matrices, self.gram_numbers, self.workers
        return {r: RoundUpdates(algorithm, *how) for r, algorithm in self.seeing.items()}

    def begin(self, local: Locals | None, chunk: Chunk, rows: Rows) -> None:
        """Loads what clients keep into rows: their own parts, and memories.

        These are part of modified steps, or whole models. Probes have no `local`.
        """
        whole = (*rows.weights, *rows.states)
        shared = len(self.layout.names)
        for r, here in chunk.rows_of.items():
            client = chunk.clients(here)
            if local is not None and local.way == "personal":
                self._load(self.model.whole, whole, self.memories.take(r, client), here)
                continue
            if self.own.width:
                layout = self.model.whole.part(slice(shared, None))
                self._load(layout, whole[shared:], self.own.take(r, client), here)
            if local is not None and r in local.memories:
                factor, kept = local.memories[r].factor, self.memories.take(r, client)
                offset = tuple(part[: len(chunk.rows)] for part in rows.offset)
                for place, matrix in _pairs(self.layout, offset, kept):
                    if len(here) == len(place):
                        place.add_(matrix, alpha=factor)
                    else:
                        place.index_add_(0, here, matrix, alpha=factor)

    @staticmethod
    def _load(layout: Layout, parts: Parts, flat: Tensor, here: Tensor) -> None:
        """Copies flat vectors (n, ·) into some of the rows of parts."""
        for place, matrix in _pairs(layout, parts, flat):
            place.index_copy_(0, here, matrix.to(place.dtype))

    def own_parts(self, chunk: Chunk, report: Report, rows: Rows) -> list[OwnPart]:
        """The rows' own parts after training, by run, if the model has any."""
        if not self.own.width:
            return []
        layout, shared = self.model.whole, len(self.layout.names)
        parts, own = (*rows.weights, *rows.states)[shared:], layout.part(slice(shared, None))
        flat, found = own.from_matrices(own.as_matrices(parts)), []
        for r, here in chunk.rows_of.items():
            mine = Report(*(field[here] for field in report))
            usable = usable_clients(self.runs[r].algorithm, mine)
            found.append(OwnPart(r, chunk.clients(here), flat[here], usable))
        return found

    def keep_models(self, chunk: Chunk, rows: Rows) -> Trained:
        """The trained personal models that are finite."""
        kept, counted, layout = [], {}, self.model.whole
        models = layout.from_matrices(layout.as_matrices((*rows.weights, *rows.states)))
        for r, here in chunk.rows_of.items():
            new, client = models[here], chunk.clients(here)
            usable = torch.isfinite(new).all(1, keepdim=True)
            kept.append((r, client, torch.where(usable, new, self.memories.take(r, client))))
            if trains_alone(self.runs[r]):
                counted[r] = usable[:, 0]
        return Trained(None, counted, {}, {}, kept, [])

    def remember(self, local: Locals, trained: Trained) -> None:
        """Stores new memories, once it is certain that their chunk will not be trained again."""
        for coded in trained.left_out:
            assert self.compression is not None
            self.compression.keep(*coded)
        for each in trained.remembered:
            if local.way == "personal":
                self.memories.put(*each)
            else:
                self.memories.add(*each)
        for part in trained.own:
            self.own.put(*part)

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
        if self.compression is not None:
            self.compression.errors.share(r, clients.to(device), mine.to(device), ranks)
        if r in held:
            held[r].share(ranks, clients.to(device), [model[r : r + 1] for model in models])
        if self.own.width:
            self.own.share(r, clients.to(device), mine.to(device), ranks)
        if r in self.memories.values:
            self.memories.share(r, clients.to(device), mine.to(device), ranks)
            if isinstance(self.runs[r].algorithm, MemoryAlgorithm):
                nothing = torch.zeros(self.layout.parameters, dtype=torch.float64, device=device)
                (more[r],) = ranks.sum(more.get(r, nothing))

    def sent(
        self, chunk: Chunk, report: Report, delta: list[Tensor]
    ) -> tuple[Report, list[tuple[int, Tensor, Tensor, Tensor]]]:
        """Turns the rows' updates into what arrives of them, in place.

        Returns the reports with the norms of these, and by run its clients, their rows, and what is left out.
        """
        if self.compression is None:
            return report, []
        left_out = []
        for r, here in chunk.rows_of.items():
            client = chunk.clients(here)
            flat = self.layout.from_matrices([matrix[here] for matrix in delta])
            arrived, missing = self.compression.sent(r, client, flat)
            for place, matrix in zip(delta, self.layout.as_matrices(self.layout.parts(arrived)), strict=True):
                place.index_copy_(0, here, matrix)
            left_out.append((r, client, here, missing))
        return report._replace(update_norm=norms(delta)), left_out

    def after(
        self,
        local: Locals,
        modifications: Modifications,
        chunk: Chunk,
        report: Report,
        delta: list[Tensor],
        part: ChunkSums,
        parts: list[OwnPart],
        *,
        copy: bool,
    ) -> Trained:
        """New memories and updates, as a `copy` if the next chunk overwrites the rows."""
        found = Trained(part, {}, {}, {}, [], parts)
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
