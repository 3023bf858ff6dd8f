"""The stacked executor: the clients of all runs are rows of one matrix, and take their steps together.

Rows are sorted by their number of local steps, so the rows still training are a prefix that shrinks.
They go through in chunks that fit into memory; what leaves a chunk is a sum.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from fairwind.contract import Report, contribute
from fairwind.counter import mix, segments
from fairwind.data.federation import Federation
from fairwind.engine.bench import Bench, Rows, gradient_step, loss_step, train_step
from fairwind.engine.cohort import Cohort
from fairwind.engine.evaluate import chunks
from fairwind.engine.executor import Outcome, Run, over_ranks
from fairwind.engine.precision import products
from fairwind.engine.ranks import ALONE, Ranks
from fairwind.engine.record import Recorder, out_of_memory, recording
from fairwind.engine.schedule import Lot, Schedule, batches
from fairwind.errors import InputError, first_line

T = TypeVar("T")
Kind = Literal["training", "gradient", "loss"]  # what rows are at work for
PROBES: tuple[Kind, ...] = ("gradient", "loss")
FEW = 4  # chunks that are kept from round to round, where rounds are alike
LONG = 3000  # steps of a round, chunk after chunk, beyond which a recording of them all is too large


class Chunk(NamedTuple):
    """Rows that work together, the longest first: all that is known of them before their orders are drawn."""

    rows: Tensor  # (n,) which of the round's rows
    run: Tensor  # (n,)
    runs: list[int]  # the runs among these, here
    runs_there: Tensor  # and on the device
    lot: Lot
    client: Tensor  # (n,) which of the lot's clients
    counts: list[int]  # how many rows take each step
    step: Tensor  # (Σ counts,) for all these, which step
    who: Tensor  # (Σ counts,) and which of the lot's clients


class Stacked:
    """Executes rounds for all clients of all runs at once."""

    def __init__(
        self,
        cohort: Cohort,
        federation: Federation,
        schedule: Schedule,
        runs: list[Run],
        *,
        budget: int,
        ranks: Ranks = ALONE,
    ):
        """`budget` is how many numbers the rows of a chunk may hold together."""
        self.cohort, self.schedule, self.runs = cohort, schedule, runs
        self.device, self.budget, self.ranks = federation.inputs.device, budget, ranks
        self.seeds = sorted({run.seed for run in runs})
        self.seed_of = torch.tensor([self.seeds.index(run.seed) for run in runs])  # (R,)
        runs_of: dict[int, list[int]] = {}
        for r, run in enumerate(runs):
            runs_of.setdefault(id(run.algorithm), []).append(r)
        self.algorithms = [(runs[mine[0]].algorithm, mine) for mine in runs_of.values()]

        data, solver = (federation.inputs, federation.targets), schedule.solver
        # Samples of a client that are probed at once: more are faster, but a client with fewer pads them.
        typical = int(schedule.probed(federation.train).double().mean())
        probed = min(256 if self.device.type == "cuda" else 64, max(32, 1 << typical.bit_length() - 1))
        step, momentum = train_step(cohort, solver), bool(solver.momentum)
        self.recorder = Recorder(self.device)
        given = cohort, data, self.recorder
        self.benches: dict[Kind, Bench] = {
            "training": Bench(step, *given, solver.batch_size, carries=momentum, casts=True),
            "gradient": Bench(gradient_step(cohort), *given, probed, carries=True, casts=True),
            "loss": Bench(loss_step(cohort), *given, probed),
        }
        self.kept: dict[Kind, list[tuple[Tensor, Chunk | None]]] = {}
        self.keys: tuple[Tensor, Tensor] | None = None
        self.ran_short = False  # of memory, in this round
        # A round that repeats is recorded as a whole: then its chunks are kept, and its steps not recorded.
        self.repeats = self.recorder.on and schedule.repeats and ranks.world == 1
        self.recorder.on &= not self.repeats

    def step_by_step(self) -> None:
        """Gives up recording whole rounds."""
        self.repeats, self.recorder.on = False, self.device.type == "cuda"
        self.kept.clear()

    def compile(self) -> None:
        """Compiles the steps when they are first taken."""
        for bench in self.benches.values():
            bench.compile()

    def saves(self) -> float:
        """Seconds that a compiled step saves in a round, about."""
        solver, size = self.schedule.solver, self.schedule.federation.train
        steps = solver.most * (-(-size // solver.batch_size))
        rows = self.schedule.participants * len(self.runs) // self.ranks.world
        numbers = rows * self._fixed("training")
        if self.device.type == "cuda":  # passes over memory
            return 3e-12 * numbers * float(steps.double().mean())
        calls = max(int(steps.max()), int(numbers // self.budget * steps.double().mean()))
        return 1e-3 * calls

    def prepare(self, round: int) -> int:
        self.plan = self.schedule.plan(self.seeds, round)
        # Every run has a row for each client its seed chose.
        per_seed = self.schedule.participants
        run = torch.arange(len(self.runs)).repeat_interleave(per_seed)
        entry = (self.seed_of[run].view(-1, per_seed) * per_seed + torch.arange(per_seed)).view(-1)
        steps = self.plan.steps[entry]
        # Ranks deal the rows out such that all have about the same to do.
        passes = torch.tensor([1 + (r.algorithm.probe == "gradient") for r in self.runs])
        mine = self.ranks.deal(steps * passes[run])
        self.run, self.entry = run[mine], entry[mine]
        if self.ran_short:
            self.kept.clear()
            self.ran_short = False
        steps_kept = sum(len(chunk.counts) for kept in self.kept.values() for _, chunk in kept if chunk)
        if self.repeats and steps_kept > LONG:
            self.step_by_step()
        if self.repeats and self.keys is not None:
            for place, key in zip(self.keys, (self.plan.order_key, self.plan.dropout_key), strict=True):
                place.copy_(key.pin_memory() if place.is_cuda else key, non_blocking=True)
        else:
            self.keys = self.schedule.keys(self.plan)
        return int(steps.sum())

    @torch.no_grad()
    def round(self, x: Tensor, loss0: Tensor) -> Outcome:
        models = self.cohort.laid(self.cohort.parts(x))
        loss, grad_norm = torch.full((2, len(self.run)), torch.nan, dtype=torch.float64, device=self.device)
        for kind in PROBES:
            probe = partial(self._probe, kind, models)
            for chunk, measured in self._chunked(kind, probe):
                loss[chunk.rows], grad_norm[chunk.rows] = measured

        total = [torch.zeros_like(model, dtype=torch.float64) for model in models]
        used, left_out = torch.zeros(2, len(self.runs), dtype=torch.int64, device=self.device)
        sums: list[Any] = [None] * len(self.runs)

        def train(chunk: Chunk) -> bool:
            report, delta = self._train(chunk, models, loss0, loss[chunk.rows], grad_norm[chunk.rows])
            self._add(chunk, report, delta, total, sums, used, left_out)
            return True

        for _ in self._chunked("training", train):
            pass
        outcome = Outcome(self.cohort.unlaid(total), sums, used, left_out)
        return over_ranks(outcome, self.runs, self.ranks)

    def _chunked(self, kind: Kind, work: Callable[[Chunk], T]) -> Iterator[tuple[Chunk, T]]:
        """Rows in chunks within the budget, and their work done.

        Where memory runs out a chunk is halved, and so is the budget from then on.
        """
        if kind in self.kept:
            pending = self.kept[kind]
        else:
            pending = [(rows, None) for rows in self._cut(kind, self._rows(kind))]
        # Of many chunks the tables would be as large as the federation's.
        keep = self.repeats or (self.schedule.repeats and len(pending) <= FEW)
        finished: list[tuple[Tensor, Chunk | None]] = []
        while pending:
            (rows, known), *pending = pending
            chunk = done = None
            try:
                chunk = known or self._chunk(kind, rows)
                done = work(chunk)
            except RuntimeError as error:
                if not out_of_memory(error) or recording():
                    raise
                if len(rows) == 1:
                    raise InputError(
                        f"a single client does not fit into memory ({first_line(error)}); "
                        "take a smaller batch size or model, or another device"
                    ) from error
            if chunk is not None and done is not None:
                if keep:
                    finished.append((rows, chunk))
                yield chunk, done
                continue
            # Outside the handler, which holds on to the memory of what failed.
            self.budget = max(1, min(self.budget, int(self._costs(kind, rows).sum())) // 2)
            self.ran_short = True
            known = chunk = None
            for bench in self.benches.values():
                bench.clear()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            left = torch.cat([rows, *(later for later, _ in pending)])
            pending = [(rows, None) for rows in self._cut(kind, left)]
        if keep:
            self.kept[kind] = finished

    def _rows(self, kind: Kind) -> Tensor:
        """The rows that are at work for something, those that should be in a chunk together side by side."""
        asking = [kind in ("training", run.algorithm.probe) for run in self.runs]
        rows = torch.tensor(asking)[self.run].nonzero()[:, 0]
        rows = rows[torch.argsort(self._steps(kind, rows), descending=True, stable=True)]
        # Rows that take equally many steps leave the fewest to wait for; but a chunk pays for the sums of all
        # its runs, which is dear where it has few rows.
        if self.budget < 4 * len(self.runs) * self._fixed(kind):
            rows = rows[torch.argsort(self.run[rows], stable=True)]
        return rows

    def _steps(self, kind: Kind, rows: Tensor) -> Tensor:
        entry = self.entry[rows]
        if kind == "training":
            return self.plan.steps[entry]
        return -(-self.schedule.probed(self.plan.size[entry]) // self.benches[kind].batch_size)

    def _cut(self, kind: Kind, rows: Tensor) -> list[Tensor]:
        """Rows in chunks within the budget, in each the longest first."""
        costs = self._costs(kind, rows)
        parts = list(chunks(costs, self.budget))
        if self.device.type == "cuda" and parts:  # of one size, so that all use the same memory
            parts = _evenly(costs, self.budget)
        if len(parts) > 1 and len(parts[-1]) == 1 < len(parts[-2]):  # compiled code treats one row apart
            parts[-2:] = [torch.cat(parts[-2:])]
        cut = [rows[part] for part in parts]
        return [part[torch.argsort(self._steps(kind, part), descending=True, stable=True)] for part in cut]

    def _costs(self, kind: Kind, rows: Tensor) -> Tensor:
        """How many numbers each row holds, about."""
        # Beside what is fixed, some dozen int64 numbers for each sample while the order is made.
        return self._fixed(kind) + 24 * self.benches[kind].batch_size * self._steps(kind, rows)

    def _fixed(self, kind: Kind) -> int:
        """Numbers of a row, whatever its samples."""
        # Its parameters, received ones, gradient, momentum and a temporary; a batch, what it becomes, and
        # that again on the way back.
        cohort, batch_size = self.cohort, self.benches[kind].batch_size
        return 5 * cohort.parameters + cohort.per_row + 2 * batch_size * cohort.per_sample

    def _chunk(self, kind: Kind, rows: Tensor) -> Chunk:
        bench, steps = self.benches[kind], self._steps(kind, rows)
        entries, client = torch.unique(self.entry[rows], return_inverse=True)
        if kind == "training":
            lot = self.schedule.training(self.plan, entries)
        else:
            lot = self.schedule.probing(self.plan, entries, bench.batch_size)
        finished = torch.bincount(steps).cumsum(0)[:-1]
        active = bench.rounded(len(rows) - finished)
        counts, client = active.tolist(), client.to(self.device)
        step, row = segments(active.to(self.device), sum(counts))
        run = self.run[rows]
        runs = torch.unique(run)
        rows, run, runs_there = (t.to(self.device) for t in (rows, run, runs))
        return Chunk(rows, run, runs.tolist(), runs_there, lot, client, counts, step, client[row])

    def _work(self, kind: Kind, chunk: Chunk, models: list[Tensor]) -> Rows:
        """Lets the chunk's rows take all their steps from their runs' models."""
        assert self.keys is not None
        bench, work = self.benches[kind], chunk.lot.drawn(*self.keys)
        seated = bench.seat(models, chunk.run)
        samples = batches(work, chunk.who, chunk.step, bench.batch_size)
        bench.work(chunk.counts, samples, mix(work.key[chunk.who], chunk.step))
        return seated

    def _probe(self, kind: Kind, models: list[Tensor], chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Each row's mean loss over its samples, and the norm of its gradient, if that is probed for."""
        rows = self._work(kind, chunk, models)
        summed, size = rows.loss.double(), chunk.lot.size[chunk.client]
        norm = _norms(self.cohort.laid(rows.carried)) if rows.carried else summed * torch.nan
        return summed / size, norm / size

    def _train(
        self, chunk: Chunk, models: list[Tensor], loss0: Tensor, loss: Tensor, grad_norm: Tensor
    ) -> tuple[Report, list[Tensor]]:
        """Lets rows train; their reports, and their updates δ as they lie."""
        delta = self.cohort.laid(self._work("training", chunk, models).weights)
        for trained, model in zip(delta, models, strict=True):
            torch.sub(model[chunk.run], trained, out=trained)
        lot, solver = chunk.lot, self.schedule.solver
        report = Report(
            size=lot.size[chunk.client].double(),
            steps=solver.accumulated(lot.steps[chunk.client].double()),
            lr=torch.full_like(loss, solver.lr),
            update_norm=_norms(delta),
            loss=loss,
            loss0=loss0[chunk.run, lot.client[chunk.client]],
            grad_norm=grad_norm,
        )
        return report, delta

    def _add(
        self,
        chunk: Chunk,
        report: Report,
        delta: list[Tensor],
        total: list[Tensor],
        sums: list[Any],
        used: Tensor,
        left_out: Tensor,
    ) -> None:
        """Adds the rows' contributions to their runs' sums, once nothing more can fail for want of memory."""
        member = (chunk.runs_there[:, None] == chunk.run).double()  # (runs, rows)
        coef = torch.zeros_like(report.size)
        usable = torch.zeros_like(report.size, dtype=torch.bool)
        new_sums: dict[int, Any] = {}
        for algorithm, all_mine in self.algorithms:
            mine = [r for r in all_mine if r in chunk.runs]
            if not mine:
                continue
            # Asked of all rows: what an algorithm makes of another's rows is finite, and multiplied by 0.
            part, counts = contribute(algorithm, report)
            members = torch.stack([member[chunk.runs.index(r)] for r in mine])
            asked = members.sum(0) > 0
            coef, usable = torch.where(asked, part.coef, coef), torch.where(asked, counts, usable)
            added = members @ torch.stack(part.sums, dim=1)
            new_sums |= {r: type(part.sums)(*new.unbind()) for r, new in zip(mine, added, strict=True)}
        weights = member * coef
        scale = weights.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        scaled = (weights / scale).to(self.cohort.dtype)
        with products("float32", self.device):
            updates = [
                scale * (scaled @ update.masked_fill_(~usable[:, None], 0)).double()  # never 0·NaN
                for update in delta
            ]
        counted = (member @ usable.double()).long()
        used.index_add_(0, chunk.runs_there, counted)
        left_out.index_add_(0, chunk.runs_there, member.sum(1).long() - counted)
        for summed, update in zip(total, updates, strict=True):
            summed.index_add_(0, chunk.runs_there, update)
        for r, new in new_sums.items():
            sums[r] = new if sums[r] is None else type(new)(*map(torch.add, sums[r], new))


def _evenly(costs: Tensor, budget: int) -> list[Tensor]:
    """Indices cut into few chunks of the same number each, or one less, within the budget if that can be."""
    parts = -(-int(costs.sum()) // budget)
    while True:
        cut = list(torch.arange(len(costs)).tensor_split(min(parts, len(costs))))
        if parts >= len(costs) or max(int(costs[part].sum()) for part in cut) <= budget:
            return cut
        parts += 1 + parts // 8


def _norms(parts: list[Tensor]) -> Tensor:
    """Euclidean norms of rows, summed in float64."""
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts]
    return torch.stack(norms).square().sum(0).sqrt()
