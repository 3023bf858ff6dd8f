"""The stacked executor: the clients of all runs are rows of one matrix, and take their steps together.

Rows are sorted by their number of local steps, so the rows still training are a prefix that shrinks.
They go through in chunks that fit into memory; what leaves a chunk is a sum.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from fairwind.contract import Probe, Report, contribute
from fairwind.counter import mix, segments
from fairwind.data.federation import Federation
from fairwind.engine.bench import Bench, gradient_step, loss_step, out_of_memory, train_step
from fairwind.engine.cohort import Cohort
from fairwind.engine.evaluate import chunks
from fairwind.engine.executor import Outcome, Run
from fairwind.engine.precision import products
from fairwind.engine.schedule import Plan, Schedule, Work, batches
from fairwind.errors import InputError, first_line

T = TypeVar("T")


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
        runs_of: dict[int, list[int]] = {}
        for r, run in enumerate(runs):
            runs_of.setdefault(id(run.algorithm), []).append(r)
        self.algorithms = [(runs[mine[0]].algorithm, mine) for mine in runs_of.values()]
        momentum = bool(schedule.solver.momentum)
        step = train_step(cohort, schedule.solver)
        self.training = Bench(step, cohort, self.data, carries=momentum, casts=True)
        self.probing: dict[Probe, Bench] = {
            "gradient": Bench(gradient_step(cohort), cohort, self.data, carries=True),
            "loss": Bench(loss_step(cohort), cohort, self.data),
        }
        # Samples of a client that are probed at once: more are faster, but a client with fewer pads them.
        typical = int(schedule.probed(federation.train).double().mean())
        most = 256 if self.data[0].is_cuda else 64
        self.probe_batch = min(most, max(32, 1 << typical.bit_length() - 1))

    @property
    def benches(self) -> list[Bench]:
        return [self.training, *self.probing.values()]

    def compile(self) -> None:
        """Compiles the steps when they are first taken."""
        for bench in self.benches:
            bench.compile()

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
        models = self.cohort.laid(self.cohort.parts(x))
        # Every run has a row for each client its seed chose.
        per_seed = self.schedule.participants
        run = torch.arange(len(self.runs)).repeat_interleave(per_seed)
        entry = (self.seed_of[run].view(-1, per_seed) * per_seed + torch.arange(per_seed)).view(-1)
        loss, grad_norm = self._probe(models, plan, run, entry)

        total = [torch.zeros_like(model, dtype=torch.float64) for model in models]
        outcome = Outcome(
            x.new_empty(0),
            [None] * len(self.runs),
            torch.zeros(len(self.runs), dtype=torch.int64, device=x.device),
            torch.zeros(len(self.runs), dtype=torch.int64, device=x.device),
            int(plan.steps[entry].sum()),
        )
        longest_first = torch.argsort(plan.steps[entry], descending=True, stable=True)
        samples = (plan.size * plan.epochs)[entry]

        def train(rows: Tensor) -> tuple[Report, list[Tensor]]:
            here = rows.to(x.device)
            return self._train(models, loss0, plan, run[rows], entry[rows], loss[here], grad_norm[here])

        batch_size = self.schedule.solver.batch_size
        for rows, (report, delta) in self._chunked(longest_first, samples, batch_size, train):
            self._add(outcome, total, run[rows].to(x.device), report, delta)
        return outcome._replace(total=self.cohort.unlaid(total))

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
                for bench in self.benches:
                    bench.clear()
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

    def _probe(self, models: list[Tensor], plan: Plan, run: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm of each row, as far as its run's algorithm asks for them; else NaN."""
        device = models[0].device
        loss, grad_norm = torch.full((2, len(run)), torch.nan, dtype=torch.float64, device=device)
        samples = self.schedule.probed(plan.size)[entry]
        largest_first = torch.argsort(samples, descending=True, stable=True)

        for probe, bench in self.probing.items():

            def measure(rows: Tensor, bench: Bench = bench) -> tuple[Tensor, Tensor]:
                entries, client = torch.unique(entry[rows], return_inverse=True)
                work = self.schedule.probing(plan, entries, self.probe_batch)
                seated = bench.seat(models, run[rows].to(device))
                _take(bench, work, client, -(-samples[rows] // self.probe_batch), self.probe_batch)
                size, summed = samples[rows].to(device), seated.loss.double()
                norm = _norms(self.cohort.laid(seated.carried)) if seated.carried else summed * torch.nan
                return summed / size, norm / size

            asking = torch.tensor([r.algorithm.probe == probe for r in self.runs])[run]
            wanted = largest_first[asking[largest_first]]
            for rows, measured in self._chunked(wanted, samples, self.probe_batch, measure):
                here = rows.to(device)
                loss[here], grad_norm[here] = measured
        return loss, grad_norm

    def _train(
        self,
        models: list[Tensor],
        loss0: Tensor,
        plan: Plan,
        run: Tensor,
        entry: Tensor,
        loss: Tensor,
        grad_norm: Tensor,
    ) -> tuple[Report, list[Tensor]]:
        """Lets rows train, the longest first; their reports, and their updates δ as they lie."""
        solver, device, steps = self.schedule.solver, loss.device, plan.steps[entry]
        run = run.to(device)
        entries, client = torch.unique(entry, return_inverse=True)
        work = self.schedule.training(plan, entries)
        delta = self.cohort.laid(self.training.seat(models, run).weights)
        _take(self.training, work, client, steps, solver.batch_size)
        for trained, model in zip(delta, models, strict=True):
            torch.sub(model[run], trained, out=trained)
        report = Report(
            size=plan.size[entry].double().to(device),
            steps=solver.accumulated(steps.double()).to(device),
            lr=torch.full_like(loss, solver.lr),
            update_norm=_norms(delta),
            loss=loss,
            loss0=loss0[run, plan.client[entry].to(device)],
            grad_norm=grad_norm,
        )
        return report, delta

    def _add(
        self, outcome: Outcome, total: list[Tensor], run: Tensor, report: Report, delta: list[Tensor]
    ) -> None:
        """Adds the rows' contributions to their runs' sums."""
        runs = torch.arange(len(self.runs), device=run.device)
        member = (runs[:, None] == run).double()  # (R, rows)
        coef = torch.zeros_like(report.size)
        usable = torch.zeros_like(report.size, dtype=torch.bool)
        for algorithm, mine in self.algorithms:
            # Asked of all rows: what an algorithm makes of another's is finite, and not a member's.
            part, counts = contribute(algorithm, report)
            asked = member[mine].sum(0) > 0
            coef, usable = torch.where(asked, part.coef, coef), torch.where(asked, counts, usable)
            added = member[mine] @ torch.stack(part.sums, dim=1)
            for r, sums in zip(mine, added, strict=True):
                new = type(part.sums)(*sums.unbind())
                before = outcome.sums[r]
                outcome.sums[r] = new if before is None else type(new)(*map(torch.add, before, new))
        weights = member * coef
        scale = weights.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        scaled = (weights / scale).to(self.cohort.dtype)
        with products("float32", run.device):
            for summed, update in zip(total, delta, strict=True):
                update.masked_fill_(~usable[:, None], 0)  # never 0·NaN
                summed.add_(scale * (scaled @ update).double())
        counted = (member @ usable.double()).long()
        outcome.used.add_(counted)
        outcome.left_out.add_(member.sum(1).long() - counted)


def _take(bench: Bench, work: Work, client: Tensor, steps: Tensor, batch_size: int) -> None:
    """Lets rows that are the work's clients, the longest first, take so many steps."""
    finished = torch.bincount(steps).cumsum(0)[:-1]
    active = bench.rounded(len(client) - finished)
    client, counts = client.to(work.order.device), active.tolist()
    step, row = segments(active.to(client.device), sum(counts))
    who = client[row]
    bench.work(counts, batches(work, who, step, batch_size), mix(work.key[who], step))


def _norms(parts: list[Tensor]) -> Tensor:
    """Euclidean norms of rows, summed in float64."""
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts]
    return torch.stack(norms).square().sum(0).sqrt()
