"""The stacked executor: the clients of all runs are rows of one matrix, and take their steps together.

Rows are sorted by their number of local steps, so the rows still training are a prefix that shrinks.
They are trained in chunks that fit into memory; only sums leave a chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fairwind.contract import Report
from fairwind.data.federation import Federation
from fairwind.engine.backends.backend import compile_steps, has_handwritten_step, seconds
from fairwind.engine.backends.graphs import Graphs, out_of_memory, recording
from fairwind.engine.evaluation import split
from fairwind.engine.executor import RoundSums, Run, over_ranks
from fairwind.engine.extras import AlgorithmExtras, MeanGradient, Trained
from fairwind.engine.local import PASSES, Locals, Modifications, Pass
from fairwind.engine.memory import Memories
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
FEW = 16  # chunks per worker that are reused if all rounds are alike
LONG = 3000  # steps of a round beyond which a CUDA graph of all of them is too large
COUNTS = 128  # at most this many numbers of rows have a CUDA graph; others are rounded up to these


class Stacked:
    """Trains all clients of all runs at once."""

    def __init__(
        self,
        model: StackedModel,
        federation: Federation,
        planner: Planner,
        runs: list[Run],
        memories: Memories,
        *,
        budget: int,
        workers: int = 1,
        ranks: Ranks = ALONE,
    ):
        """`budget` is how many numbers the rows of a chunk may hold together."""
        self.model, self.planner, self.runs, self.threads = model, planner, runs, 1
        self.device, self.ranks = federation.device, ranks
        like = torch.empty(0, dtype=model.dtype, device=self.device)
        found = [Locals(runs, way, like) for way in PASSES]
        self.locals: dict[Pass, Locals] = {each.way: each for each in found if each.parts}
        self.extras = AlgorithmExtras(model.layout, memories, runs, federation, workers=workers)
        vectors = max(each.rules.own + each.rules.corrected for each in self.locals.values())
        self.cutter = Cutter(
            model, planner, runs, budget=budget, workers=workers, apart=self.extras.apart, vectors=vectors
        )
        self.algorithms = by_algorithm(runs)
        self.step_graphs, self.round_graphs = Graphs(self.device), Graphs(self.device)
        models = [model, *(model.another() for _ in range(workers - 1))]
        self.federation = federation
        # If samples are on the host, one of them gives their types and shapes.
        hosted = federation.compute_device is not None
        data = federation.at(slice(0, 1)) if hosted else (federation.inputs, federation.targets)
        self.workers = Workers([self._workspaces(each, data) for each in models])
        self.kept: dict[Kind, list[tuple[Tensor, Chunk | None]]] = {}
        self.keys: tuple[Tensor, Tensor] | None = None
        self.lr = torch.zeros((), dtype=torch.float64, device=self.device)
        self.ran_short = False  # of memory, in this round
        self.uncompiled = False  # and is to be compiled
        # A round that repeats is recorded as a whole: then its chunks are kept, and its steps not recorded.
        self.records = self.round_graphs.on
        plain = not (hosted or self.extras.seeing or memories.on_host)
        self.whole_rounds = self.records and planner.repeats and ranks.world == 1 and plain
        self.step_graphs.on &= not self.whole_rounds

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

    def compile_seconds(self) -> tuple[float, float]:
        """About how many seconds compiled steps save in a round, and how many it takes to compile them."""
        return self.cutter.saved(self.ranks.world), seconds(self._needed(), self.planner.solver)

    @property
    def handwritten(self) -> bool:
        """Whether there is C++ for all kinds of steps that are needed."""
        solver = self.planner.solver
        return all(has_handwritten_step(kind, each, solver) for kind, each in self._needed().items())

    @property
    def graphs(self) -> str:
        """What is recorded as CUDA graphs."""
        return "rounds" if self.whole_rounds else "steps" if self.step_graphs.on else "none"

    def compile(self) -> None:
        """Compiles the steps before the first round."""
        self.uncompiled = self.cutter.compiled = True

    def enlarge(self) -> int:
        """Enlarges the budget, if launching the operations of uncompiled steps needs larger chunks."""
        self.cutter.budget = max(self.cutter.budget, self.cutter.launched)
        return self.cutter.budget

    def _needed(self) -> Workspaces:
        """The kinds of steps that will be used, and the first worker's workspaces for them."""
        kinds = {*self.locals, *(run.algorithm.probe for run in self.runs)}
        return {kind: each for kind, each in self.workers.states[0].items() if kind in kinds}

    def prepare(self, round: int) -> int:
        if self.uncompiled:
            self.uncompiled = False
            for kind in self._needed():
                compile_steps(kind, [each[kind] for each in self.workers.states], self.planner.solver)
        steps = self.cutter.begin(round, self.ranks)
        if self.ran_short:
            self.kept.clear()
            self.ran_short = False
        steps_kept = sum(len(chunk.counts) for kept in self.kept.values() for _, chunk in kept if chunk)
        if self.whole_rounds and (steps_kept > LONG or not self.round_graphs.on):
            self.whole_rounds, self.step_graphs.on = False, self.records
            self.kept.clear()
        assert self.cutter.plan is not None
        drawn = self.cutter.plan.order_key, self.cutter.plan.dropout_key
        if self.whole_rounds and self.keys is not None:
            for place, key in zip(self.keys, drawn, strict=True):
                place.copy_(key.pin_memory() if place.is_cuda else key, non_blocking=True)
        else:
            self.keys = drawn[0].to(self.device), drawn[1].to(self.device)
        self.lr.fill_(self.planner.solver.rate(round))
        return steps

    def round(
        self, x: Tensor, loss0: Tensor, states: Sequence[Any], finish: Callable[[RoundSums], None]
    ) -> None:
        if not self.whole_rounds:
            return finish(self._outcome(x, loss0, states))
        self.round_graphs.do("a round", lambda: finish(self._outcome(x, loss0, states)))
        if self.ran_short:  # its chunks will be others
            self.round_graphs.forget()
        return None

    @torch.no_grad()
    def _outcome(self, x: Tensor, loss0: Tensor, states: Sequence[Any]) -> RoundSums:
        layout, rows = self.model.layout, len(self.cutter.row_run)
        models = layout.as_matrices(layout.parts(x))
        loss, grad_norm = torch.full((2, rows), torch.nan, dtype=torch.float64, device=self.device)
        gradients = {r: MeanGradient(x[r]) for r in self.extras.summing}
        for kind in PROBES:
            for chunk, measured in self._chunked(kind, partial(self._probe, kind, models)):
                loss[chunk.rows], grad_norm[chunk.rows] = measured[:2]
                for r, found in measured[2].items():
                    gradients[r].add(*found)
        more = {r: gradient.mean() for r, gradient in gradients.items()}
        held = self.extras.held()
        totals = RoundTotals(len(self.runs), models)

        def train(
            local: Locals, modifications: Modifications, chunk: Chunk, workspaces: Workspaces
        ) -> Trained:
            rows = self._work(chunk, workspaces[local.way], models, modifications, local)
            delta = layout.as_matrices(rows.weights)
            if local.way == "personal":
                return self.extras.keep_models(chunk, delta)
            start = chunk.runs_there if len(chunk.runs) == 1 else chunk.row_run
            for trained, model in zip(delta, models, strict=True):
                torch.sub(model.index_select(0, start), trained, out=trained)
            report = self._report(chunk, loss0)
            report = report._replace(
                update_norm=norms(delta), loss=loss[chunk.rows], grad_norm=grad_norm[chunk.rows]
            )
            part = contributions(self.algorithms, chunk, report, delta, waits=not self.records)
            return self.extras.after(
                local, modifications, chunk, report, delta, part, copy=not self.one_chunk
            )

        for way, local in self.locals.items():
            modifications = local.modifications(layout, x, states, more)
            for chunk, trained in self._chunked(way, partial(train, local, modifications)):
                if trained.part is not None:
                    totals.add(chunk, trained.part)
                for r, change in trained.changes.items():
                    more[r] = more[r] + change if r in more else change
                for r, each in trained.held.items():
                    held[r].add(*each)
                self.extras.remember(local, trained)
        return over_ranks(totals.outcome(layout, more, held), self.runs, self.ranks)

    def _chunked(self, kind: Kind, work: Callable[[Chunk, Workspaces], T]) -> Iterator[tuple[Chunk, T]]:
        """Rows in chunks within the budget, and their results.

        If memory runs out, a chunk is halved, and so is the budget from then on.
        """
        if kind in self.kept:
            pending = self.kept[kind]
        else:
            pending = [(rows, None) for rows in self.cutter.cut(kind, self.cutter.rows(kind))]
        # Tables of many chunks would be as large as the federation's.
        few = FEW * len(self.workers.states)
        keep = self.whole_rounds or (self.planner.repeats and len(pending) <= few)
        finished: list[tuple[Tensor, Chunk | None]] = []
        most_counts = COUNTS if self.step_graphs.on else None

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
        if local is not None:
            self.extras.begin(local, chunk, rows)
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
        sums = self.model.layout.as_matrices(rows.kept[0])
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
