"""The stacked executor: the clients of all runs are rows of one matrix, and take their steps together.

Rows are sorted by their number of local steps, so the rows still training are a prefix that shrinks.
They are trained in chunks that fit into memory; only sums leave a chunk.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fairwind.contract import Report
from fairwind.data.federation import Federation
from fairwind.engine import tuning
from fairwind.engine.backends.backend import compile_steps
from fairwind.engine.backends.graphs import Graphs, out_of_memory, recording, renew
from fairwind.engine.evaluation import split
from fairwind.engine.executor import ClientUpdates, RoundSums, Run, Shared, over_ranks
from fairwind.engine.extras import AlgorithmExtras, MeanGradient, OwnPart, Trained
from fairwind.engine.local import Locals, Modifications, locals_of
from fairwind.engine.memory import Compression, Memories, OwnParts
from fairwind.engine.plan import ExecutionPlan
from fairwind.engine.ranks import ALONE, Ranks
from fairwind.engine.schedule import Planner
from fairwind.engine.stacked.chunks import PROBES, Chunk, Cutter, Kind
from fairwind.engine.stacked.model import StackedModel
from fairwind.engine.stacked.steps import Rows, gradient_step, loss_step, train_step
from fairwind.engine.stacked.sums import RoundTotals, by_algorithm, contributions, norms
from fairwind.engine.stacked.workspace import Workspace
from fairwind.engine.workers import Workers
from fairwind.errors import InputError, first_line

T = TypeVar("T")
Workspaces = dict[Kind, Workspace]


class Stacked:
    """Trains all clients of all runs at once."""

    def __init__(
        self,
        model: StackedModel,
        federation: Federation,
        planner: Planner,
        runs: list[Run],
        memories: Memories,
        own: OwnParts,
        plan: ExecutionPlan,
        ranks: Ranks = ALONE,
        compression: Compression | None = None,
    ):
        self.model, self.planner, self.runs, self.plan = model, planner, runs, plan
        self.threads, self.device, self.ranks = plan.threads.value, federation.device, ranks
        self.locals = locals_of(runs, torch.empty(0, dtype=model.dtype, device=self.device))
        self.extras = AlgorithmExtras(model, memories, own, runs, federation, plan, compression)
        vectors = max(each.rules.vectors for each in self.locals.values())
        self.cutter = Cutter(model, planner, runs, plan, vectors=vectors)
        self.algorithms = by_algorithm(runs)
        # A round that repeats is recorded as a whole: then its chunks are kept, and its steps not recorded.
        self.whole_rounds = plan.graphs.value == "rounds"
        self.step_graphs = Graphs(self.device, on=plan.graphs.value == "steps")
        self.round_graphs = Graphs(self.device, on=self.whole_rounds)
        models = [model, *(model.another() for _ in range(plan.workers.value - 1))]
        self.federation = federation
        # If samples are on the host, one of them gives their types and shapes.
        hosted = federation.compute_device is not None
        data = federation.at(slice(0, 1)) if hosted else (federation.inputs, federation.targets)
        self.workers = Workers([self._workspaces(each, data) for each in models])
        self.kept: dict[Kind, list[tuple[Tensor, Chunk | None]]] = {}
        self.keys: tuple[Tensor, Tensor] | None = None
        self.lr = torch.zeros((), dtype=torch.float64, device=self.device)
        self.ran_short = False  # of memory, in this round
        self.uncompiled = plan.steps.value != "eager"  # and is to be compiled

    def _workspaces(self, model: StackedModel, data: tuple[Any, Any]) -> Workspaces:
        solver, sizes = self.planner.solver, self.cutter.batch_sizes
        trained = model, data, sizes["training"], self.step_graphs
        probed = model, data, sizes["loss"], self.step_graphs
        made: Workspaces = {
            "gradient": Workspace(gradient_step(model), *probed, kept=1, casts=True),
            "loss": Workspace(loss_step(model), *probed),
        }
        for way, local in self.locals.items():
            step = train_step(model, solver, local.rules)
            made[way] = Workspace(step, *trained, kept=solver.moments, casts=True, rules=local.rules)
        return made

    def _needed(self) -> Workspaces:
        """The kinds of steps that will be used, and the first worker's workspaces for them."""
        kinds = {*self.locals, *(run.algorithm.probe for run in self.runs)}
        return {kind: each for kind, each in self.workers.states[0].items() if kind in kinds}

    def prepare(self, round: int) -> int:
        if self.uncompiled:
            self.uncompiled = False
            for kind in self._needed():
                workspaces = [each[kind] for each in self.workers.states]
                compile_steps(self.plan.steps.value, kind, workspaces, self.planner.solver)
        steps = self.cutter.begin(round, self.ranks)
        if self.ran_short:
            self.kept.clear()
            self.ran_short = False
        steps_kept = sum(len(chunk.counts) for kept in self.kept.values() for _, chunk in kept if chunk)
        if self.whole_rounds and (steps_kept > tuning.MAX_GRAPH_STEPS or not self.round_graphs.on):
            self.whole_rounds, self.step_graphs.on = False, True
            self.kept.clear()
        assert self.cutter.plan is not None
        drawn = self.cutter.plan.order_key, self.cutter.plan.dropout_key
        if self.whole_rounds and self.keys is not None:
            for place, key in zip(self.keys, drawn, strict=True):
                renew(place, key)
        else:
            self.keys = drawn[0].to(self.device), drawn[1].to(self.device)
        self.lr.fill_(self.planner.solver.rate(round))
        return steps

    def round(self, x: Tensor, loss0: Tensor, shared: Shared, finish: Callable[[RoundSums], None]) -> None:
        if not self.whole_rounds:
            return finish(self._sums(x, loss0, shared))
        self.round_graphs.do("a round", lambda: finish(self._sums(x, loss0, shared)))
        if self.ran_short:  # its chunks will be others
            self.round_graphs.forget()
        return None

    @torch.no_grad()
    def gradients(self, x: Tensor) -> dict[int, Tensor]:
        layout = self.model.shared
        return self._probes(x, layout.as_matrices(layout.parts(x)))[1]

    @torch.no_grad()
    def updates(
        self, x: Tensor, loss0: Tensor, shared: Shared, gradients: dict[int, Tensor]
    ) -> Iterator[ClientUpdates]:
        layout = self.model.shared
        models = layout.as_matrices(layout.parts(x))
        probed, measured = self._probes(x, models)
        gradients |= measured | gradients
        for way, local in self.locals.items():
            modifications = local.modifications(layout, x, shared, gradients)
            if way == "personal":
                keep = partial(self._personal, local, modifications, models)
                for chunk, trained in self._chunked(way, keep):
                    self.extras.remember(local, trained)
                    for r, usable in trained.usable.items():
                        yield self._unchanged(r, chunk, usable, x, loss0)
                continue
            train = partial(self._train, local, modifications, models, probed, loss0)
            for chunk, (report, delta, parts) in self._chunked(way, train):
                for part in parts:
                    self.extras.own.put(*part)
                flat = layout.from_matrices(delta)
                for r in chunk.runs:
                    mine = (chunk.row_run == r).nonzero()[:, 0]
                    own = Report(*(field[mine] for field in report))
                    yield ClientUpdates(r, chunk.clients(mine), own, flat[mine])

    def _unchanged(self, r: int, chunk: Chunk, usable: Tensor, x: Tensor, loss0: Tensor) -> ClientUpdates:
        """The zero updates of a run's rows (n,) that only trained models of their own."""
        here = chunk.rows_of[r]
        report = Report(*(field[here] for field in self._report(chunk, loss0)))
        report = report._replace(update_norm=torch.where(usable, 0.0, torch.nan).double())
        return ClientUpdates(r, chunk.clients(here), report, x.new_zeros(len(here), x.shape[1]))

    @torch.no_grad()
    def _sums(self, x: Tensor, loss0: Tensor, shared: Shared) -> RoundSums:
        layout = self.model.shared
        models = layout.as_matrices(layout.parts(x))
        probed, more = self._probes(x, models)
        held = self.extras.held()
        totals = RoundTotals(len(self.runs), models)

        def work(
            local: Locals, modifications: Modifications, chunk: Chunk, workspaces: Workspaces
        ) -> Trained:
            if local.way == "personal":
                return self._personal(local, modifications, models, chunk, workspaces)
            given = local, modifications, models, probed, loss0, chunk, workspaces
            report, delta, own = self._train(*given)
            report, left_out = self.extras.sent(chunk, report, delta)
            waits = self.plan.graphs.value == "none"
            part = contributions(self.algorithms, chunk, report, delta, waits=waits)
            done = self.extras.after(
                local, modifications, chunk, report, delta, part, own, copy=not self.one_chunk
            )
            return done._replace(left_out=[(r, who, part.usable[at], e) for r, who, at, e in left_out])

        for way, local in self.locals.items():
            modifications = local.modifications(layout, x, shared, more)
            for chunk, trained in self._chunked(way, partial(work, local, modifications)):
                if trained.part is not None:
                    totals.add(chunk, trained.part)
                for r, usable in trained.usable.items():
                    totals.count(r, usable)
                for r, change in trained.changes.items():
                    more[r] = more[r] + change if r in more else change
                for r, each in trained.held.items():
                    held[r].add(*each)
                self.extras.remember(local, trained)
        if self.ranks.world > 1:
            coded = range(len(self.runs) if self.extras.compression or self.extras.own.width else 0)
            for r in sorted({*self.extras.memories.values, *held, *coded}):
                self.extras.share(r, *self.cutter.clients(r), models, more, held, self.ranks)
        return over_ranks(totals.outcome(layout, more, held), self.runs, self.ranks)

    def _probes(self, x: Tensor, models: list[Tensor]) -> tuple[tuple[Tensor, Tensor], dict[int, Tensor]]:
        """Every row's loss and norm of its gradient, NaN if not probed; and the mean gradients of runs."""
        rows = len(self.cutter.row_run)
        loss, grad_norm = torch.full((2, rows), torch.nan, dtype=torch.float64, device=self.device)
        gradients = {r: MeanGradient(x[r]) for r in self.extras.summing}
        for kind in PROBES:
            for chunk, measured in self._chunked(kind, partial(self._probe, kind, models)):
                loss[chunk.rows], grad_norm[chunk.rows] = measured[:2]
                for r, found in measured[2].items():
                    gradients[r].add(*found)
        return (loss, grad_norm), {r: each.mean(self.ranks) for r, each in gradients.items()}

    def _personal(
        self,
        local: Locals,
        modifications: Modifications,
        models: list[Tensor],
        chunk: Chunk,
        workspaces: Workspaces,
    ) -> Trained:
        """The rows' personal models."""
        rows = self._work(chunk, workspaces["personal"], models, modifications, local)
        return self.extras.keep_models(chunk, rows)

    def _train(
        self,
        local: Locals,
        modifications: Modifications,
        models: list[Tensor],
        probed: tuple[Tensor, Tensor],
        loss0: Tensor,
        chunk: Chunk,
        workspaces: Workspaces,
    ) -> tuple[Report, list[Tensor], list[OwnPart]]:
        """The rows' reports, updates as matrices, and own parts."""
        rows = self._work(chunk, workspaces[local.way], models, modifications, local)
        delta = self.model.layout.as_matrices(rows.weights)[: len(models)]
        start = chunk.runs_there if len(chunk.runs) == 1 else chunk.row_run
        for trained, model in zip(delta, models, strict=True):
            torch.sub(model.index_select(0, start), trained, out=trained)
        loss, grad_norm = (measured[chunk.rows] for measured in probed)
        report = self._report(chunk, loss0)
        report = report._replace(update_norm=norms(delta), loss=loss, grad_norm=grad_norm)
        return report, delta, self.extras.own_parts(chunk, report, rows)

    def _chunked(self, kind: Kind, work: Callable[[Chunk, Workspaces], T]) -> Iterator[tuple[Chunk, T]]:
        """Rows in chunks within the budget, and their results.

        If memory runs out, a chunk is halved, and so is the budget from then on.
        """
        if kind in self.kept:
            pending = self.kept[kind]
        else:
            pending = [(rows, None) for rows in self.cutter.cut(kind, self.cutter.rows(kind))]
        # Tables of many chunks would be as large as the federation's.
        few = tuning.MAX_REUSED_CHUNKS * len(self.workers.states)
        keep = self.whole_rounds or (self.planner.repeats and len(pending) <= few)
        finished: list[tuple[Tensor, Chunk | None]] = []
        most_counts = tuning.MAX_GRAPH_ROW_COUNTS if self.step_graphs.on else None

        @torch.no_grad()
        def attempt(item: tuple[Tensor, Chunk | None], workspaces: Workspaces) -> tuple[Chunk, T] | str:
            rows, known = item
            try:
                chunk = known or self.cutter.chunk(kind, rows, most_counts)
                return chunk, work(chunk, workspaces)
            except RuntimeError as error:
                if not out_of_memory(error) or recording():
                    raise
                return first_line(error)

        while pending:
            done, failed, self.one_chunk = 0, "", len(pending) == 1
            for found in self.workers.map(attempt, pending):
                if isinstance(found, str):
                    failed = found
                    break
                done += 1
                if keep:
                    finished.append((pending[done - 1][0], found[0]))
                yield found
            pending = self._smaller(kind, [rows for rows, _ in pending[done:]], failed) if failed else []
        if keep:
            self.kept[kind] = finished

    def _smaller(self, kind: Kind, left: list[Tensor], why: str) -> list[tuple[Tensor, Chunk | None]]:
        """The remaining rows in smaller chunks, after the first of them did not fit into memory."""
        if len(left[0]) == 1:
            raise InputError(
                f"a single client does not fit into memory ({why}); "
                "take a smaller batch size or model, or another device"
            )
        self.ran_short = True
        for workspaces in self.workers.states:
            for workspace in workspaces.values():
                workspace.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return [(rows, None) for rows in self.cutter.halved(kind, left[0], torch.cat(left))]

    def _work(
        self,
        chunk: Chunk,
        workspace: Workspace,
        models: list[Tensor],
        modifications: Modifications | None = None,
        local: Locals | None = None,
    ) -> Rows:
        """Trains the chunk's rows from their runs' models."""
        assert self.keys is not None
        order = chunk.selection.order(*self.keys)
        if chunk.selection.brought is not None:
            workspace.bring(self.federation, chunk.selection.brought)
        rows = workspace.load(models, chunk.row_run, modifications)
        self.extras.begin(local, chunk, rows)
        workspace.begin(rows)
        keys = chunk.dropout_keys(order) if self.model.random else None
        workspace.work(chunk.counts, chunk.samples(order), keys, self.lr)
        return rows

    def _probe(
        self, kind: Kind, models: list[Tensor], chunk: Chunk, workspaces: Workspaces
    ) -> tuple[Tensor, Tensor, dict[int, tuple[Tensor, Tensor]]]:
        """Each row's mean loss, and its gradient's norm if the probe needs it; and sums of gradients."""
        rows = self._work(chunk, workspaces[kind], models)
        summed, divisor = rows.loss.double(), self._divisor(chunk)
        if not rows.kept:
            return summed / divisor, summed * torch.nan, {}
        sums = self.model.layout.as_matrices(rows.kept[0])[: len(models)]
        norm = norms(sums)
        return summed / divisor, norm / divisor, self.extras.gradients(chunk, sums, norm, divisor)

    def _divisor(self, chunk: Chunk) -> Tensor:
        """What the summed losses of rows (n,) are divided by."""
        weights, brought = self.model.sample_weights, chunk.selection.brought
        if weights is not None:
            assert self.keys is not None
            if brought is not None:  # these clients were copied to the device, one after another
                weights = weights[split(self.federation, "train")[1](brought)]
            weights = chunk.sums(weights, chunk.selection.order(*self.keys))
        return self.model.loss.divisors(chunk.size, weights)

    def _report(self, chunk: Chunk, loss0: Tensor) -> Report:
        """The rows' reports without the results of training."""
        steps = self.planner.solver.accumulated(chunk.steps)
        unknown = torch.full_like(chunk.size, torch.nan)
        first = loss0[chunk.row_run, chunk.client]
        return Report(chunk.size, steps, self.lr.expand_as(steps), unknown, unknown, first, unknown)
