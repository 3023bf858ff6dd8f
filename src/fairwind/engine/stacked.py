"""The stacked executor: the clients of all runs are rows of one matrix, and take their steps together.

Rows are sorted by their number of local steps, so the rows still training are a prefix that shrinks.
They go through in chunks that fit into memory; what leaves a chunk is a sum.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fairwind.contract import AnyAlgorithm, Report, contribute
from fairwind.counter import mix, segments
from fairwind.data.federation import Federation
from fairwind.engine.bench import Bench, out_of_memory, probe_step, train_step
from fairwind.engine.cohort import Cohort, Parts
from fairwind.engine.evaluate import chunks, client_means
from fairwind.engine.executor import Outcome, Run
from fairwind.engine.precision import products
from fairwind.engine.schedule import Plan, Schedule, Work, batches
from fairwind.errors import InputError, first_line

T = TypeVar("T")
PROBE_BATCH = 64  # samples of a client probed at once; padding wastes what a small client lacks


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
    ):
        """`budget` is how many numbers the rows of a chunk may hold together."""
        self.cohort, self.federation, self.schedule, self.runs = cohort, federation, schedule, runs
        self.data = federation.inputs, federation.targets
        self.budget = budget
        self.seeds = sorted({run.seed for run in runs})
        self.seed_of = torch.tensor([self.seeds.index(run.seed) for run in runs])  # (R,)
        self.algorithms: list[AnyAlgorithm] = []
        for run in runs:
            if not any(run.algorithm is a for a in self.algorithms):
                self.algorithms.append(run.algorithm)
        index = [next(i for i, a in enumerate(self.algorithms) if a is run.algorithm) for run in runs]
        self.algorithm_of = torch.tensor(index)  # (R,)
        momentum = bool(schedule.solver.momentum)
        step = train_step(cohort, schedule.solver)
        self.training = Bench(step, cohort, self.data, carries=momentum, casts=True)
        self.probing = Bench(probe_step(cohort), cohort, self.data, carries=True, casts=False)

    def compile(self) -> None:
        """Compiles the steps when they are first taken."""
        self.training.compile()
        self.probing.compile()

    def calls(self) -> int:
        """How often the step of local training is called in a round, about."""
        solver, size = self.schedule.solver, self.federation.train
        steps = solver.most * (-(-size // solver.batch_size))
        rows = self.schedule.participants * len(self.runs)
        passes = rows * self._fixed(solver.batch_size) // self.budget
        return int(max(steps.max(), passes * steps.double().mean()))

    @torch.no_grad()
    def round(self, x: Tensor, loss0: Tensor, round: int) -> Outcome:
        plan = self.schedule.plan(self.seeds, round)
        # Every run has a row for each client its seed chose.
        per_seed = self.schedule.participants
        run = torch.arange(len(self.runs)).repeat_interleave(per_seed)
        entry = (self.seed_of[run].view(-1, per_seed) * per_seed + torch.arange(per_seed)).view(-1)
        loss, grad_norm = self._probe(x, plan, run, entry)

        outcome = Outcome(
            torch.zeros_like(x, dtype=torch.float64),
            [None] * len(self.runs),
            torch.zeros(len(self.runs), dtype=torch.int64, device=x.device),
            torch.zeros(len(self.runs), dtype=torch.int64, device=x.device),
            int(plan.steps[entry].sum()),
        )
        longest_first = torch.argsort(plan.steps[entry], descending=True, stable=True)
        samples = (plan.size * plan.epochs)[entry]

        def train(rows: Tensor) -> tuple[Report, Parts]:
            return self._train(x, loss0, plan, run[rows], entry[rows], loss[rows], grad_norm[rows])

        batch_size = self.schedule.solver.batch_size
        for rows, (report, delta) in self._chunked(longest_first, samples, batch_size, train):
            self._add(outcome, run[rows], report, delta)
        return outcome

    def _chunked(
        self, rows: Tensor, samples: Tensor, batch_size: int, work: Callable[[Tensor], T]
    ) -> Iterator[tuple[Tensor, T]]:
        """Rows in chunks within the budget, given how many samples each goes through, and their work done.

        Where memory runs out a chunk is halved, and so is the budget from then on.
        """
        pending = self._chunks(rows, samples, batch_size)
        while pending:
            chunk = pending.pop(0)
            try:
                done = work(chunk)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                if len(chunk) == 1:
                    raise InputError(
                        f"a single client does not fit into memory ({first_line(error)}); "
                        "take a smaller batch size or model, or another device"
                    ) from error
                done = None
            if done is None:  # outside the handler, which holds on to the memory of what failed
                self.budget = max(1, self.budget // 2)
                pending[:0] = chunk.tensor_split(2)
                self.training.clear()
                self.probing.clear()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            else:
                yield chunk, done

    def _chunks(self, rows: Tensor, samples: Tensor, batch_size: int) -> list[Tensor]:
        # Beside what is fixed, some dozen int64 numbers for each sample while the order is made.
        costs = self._fixed(batch_size) + 24 * samples[rows]
        return [rows[chunk] for chunk in chunks(costs, self.budget)]

    def _fixed(self, batch_size: int) -> int:
        """Numbers of a row, whatever its samples."""
        # Its parameters, received ones, gradient, momentum and a temporary; a batch, what it becomes, and
        # that again on the way back.
        cohort = self.cohort
        return 5 * cohort.parameters + cohort.per_row + 2 * batch_size * cohort.per_sample

    def _probe(self, x: Tensor, plan: Plan, run: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm of each row at x, as far as its run's algorithm asks for them; else NaN."""
        loss, grad_norm = torch.full((2, len(run)), torch.nan, dtype=torch.float64, device=x.device)
        asked = [r.algorithm.probe for r in self.runs]
        for seed in range(len(self.seeds)):
            mine = [r for r, probe in enumerate(asked) if probe == "loss" and self.seed_of[r] == seed]
            if mine:
                loss.view(len(self.runs), -1)[mine] = self._probe_losses(x[mine], plan, seed)
        wants_gradient = torch.tensor([probe == "gradient" for probe in asked])[run]
        samples = self.schedule.probed(plan.size)[entry]
        largest_first = torch.argsort(samples, descending=True, stable=True)

        def measure(rows: Tensor) -> tuple[Tensor, Tensor]:
            entries, client = torch.unique(entry[rows], return_inverse=True)
            work = self.schedule.probing(plan, entries, PROBE_BATCH)
            seated = self.probing.seat(x, run[rows].to(x.device))
            _take(self.probing, work, client, PROBE_BATCH)
            size = work.size[client.to(x.device)]
            return seated.loss.double() / size, _norms(seated.carried) / size

        wanted = largest_first[wants_gradient[largest_first]]
        for rows, measured in self._chunked(wanted, samples, PROBE_BATCH, measure):
            loss[rows.to(x.device)], grad_norm[rows.to(x.device)] = measured
        return loss, grad_norm

    def _probe_losses(self, x: Tensor, plan: Plan, seed: int) -> Tensor:
        """Losses (R, M) of a seed's clients under models of that seed."""
        mine = (plan.seed == seed).nonzero()[:, 0]
        sizes = self.schedule.probed(plan.size[mine])

        def pick(clients: Tensor) -> Tensor:
            return self.schedule.probing(plan, mine[clients], PROBE_BATCH).order

        return client_means(self.cohort, self.federation, x, sizes, pick)[0]

    def _train(
        self,
        x: Tensor,
        loss0: Tensor,
        plan: Plan,
        run: Tensor,
        entry: Tensor,
        loss: Tensor,
        grad_norm: Tensor,
    ) -> tuple[Report, Parts]:
        """Lets rows train, the longest first; their reports, and their updates δ."""
        solver, device = self.schedule.solver, x.device
        run = run.to(device)
        entries, client = torch.unique(entry, return_inverse=True)
        work = self.schedule.training(plan, entries)
        delta = self.training.seat(x, run).weights
        _take(self.training, work, client, solver.batch_size)
        for trained, part in zip(delta, self.cohort.parts(x), strict=True):
            trained.neg_().add_(part[run])
        report = Report(
            size=plan.size[entry].double().to(device),
            steps=solver.accumulated(plan.steps[entry].double()).to(device),
            lr=torch.full_like(loss, solver.lr),
            update_norm=_norms(delta),
            loss=loss,
            loss0=loss0[run, plan.client[entry].to(device)],
            grad_norm=grad_norm,
        )
        return report, delta

    def _add(self, outcome: Outcome, run: Tensor, report: Report, delta: Parts) -> None:
        """Adds the rows' contributions to their runs' sums."""
        device = report.size.device
        member = F.one_hot(run, len(self.runs)).T.double().to(device)  # (R, rows)
        coef = torch.zeros_like(report.size)
        usable = torch.zeros_like(report.size, dtype=torch.bool)
        for a, algorithm in enumerate(self.algorithms):
            rows = (self.algorithm_of[run] == a).nonzero()[:, 0].to(device)
            part, usable[rows] = contribute(algorithm, Report(*(field[rows] for field in report)))
            coef[rows] = part.coef
            added = member[:, rows] @ torch.stack(part.sums, dim=1)
            for r in (self.algorithm_of == a).nonzero()[:, 0].tolist():
                before = outcome.sums[r] or [0] * len(part.sums)
                outcome.sums[r] = type(part.sums)(*(b + new for b, new in zip(before, added[r], strict=True)))
        weights = member * coef
        scale = weights.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        scaled = (weights / scale).to(self.cohort.dtype)
        totals = torch.split(outcome.total, self.cohort.sizes, dim=1)
        with products("float32", device):
            for total, update in zip(totals, delta, strict=True):
                rows = update.reshape(len(run), -1).masked_fill(~usable[:, None], 0)  # never 0·NaN
                total.add_(scale * (scaled @ rows).double())
        counted = (member @ usable.double()).long()
        outcome.used.add_(counted)
        outcome.left_out.add_(member.sum(1).long() - counted)


def _take(bench: Bench, work: Work, client: Tensor, batch_size: int) -> None:
    """Lets rows that are the work's clients, the longest first, take all their steps."""
    finished = torch.bincount(work.steps.cpu()[client]).cumsum(0)[:-1]
    active = bench.rounded(len(client) - finished)
    client = client.to(work.order.device)
    step, row = segments(active.to(client.device))
    table, keys = batches(work, client[row], step, batch_size), mix(work.key[client[row]], step)
    bench.work(active.tolist(), table, keys)


def _norms(parts: Parts) -> Tensor:
    """Euclidean norms of rows, summed in float64."""
    norms = [torch.linalg.vector_norm(part.flatten(1), dim=1, dtype=torch.float64) for part in parts]
    return torch.stack(norms).square().sum(0).sqrt()
