"""The stacked executor: the clients of all runs are rows of one matrix, and take their steps together.

Rows are sorted by their number of local steps, so the rows still training are a prefix that shrinks.
They go through in chunks that fit into memory; what leaves a chunk is a sum.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fairwind.contract import AnyAlgorithm, Report, contribute
from fairwind.counter import mix, segments
from fairwind.data.federation import Federation
from fairwind.engine.cohort import Cohort
from fairwind.engine.evaluate import chunks, client_means
from fairwind.engine.executor import Outcome, Run, over_ranks
from fairwind.engine.ranks import ALONE, Ranks
from fairwind.engine.schedule import Plan, Schedule, Work, batches
from fairwind.engine.solver import Solver
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
        ranks: Ranks = ALONE,
    ):
        """`budget` is how many numbers the rows of a chunk may hold together."""
        self.cohort, self.federation, self.schedule, self.runs = cohort, federation, schedule, runs
        self.data = federation.inputs, federation.targets
        self.budget, self.ranks = budget, ranks
        self.seeds = sorted({run.seed for run in runs})
        self.seed_of = torch.tensor([self.seeds.index(run.seed) for run in runs])  # (R,)
        self.algorithms: list[AnyAlgorithm] = []
        for run in runs:
            if not any(run.algorithm is a for a in self.algorithms):
                self.algorithms.append(run.algorithm)
        index = [next(i for i, a in enumerate(self.algorithms) if a is run.algorithm) for run in runs]
        self.algorithm_of = torch.tensor(index)  # (R,)
        self.train_step = _train_step(cohort, schedule.solver)
        self.probe_step = _probe_step(cohort)

    def compile(self) -> None:
        """Compiles the steps when they are first taken."""
        self.train_step = _compile(self.train_step)
        self.probe_step = _compile(self.probe_step)

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
        steps = int(plan.steps[entry].sum())
        mine = self._share(plan, run, entry)
        run, entry = run[mine], entry[mine]
        loss, grad_norm = self._probe(x, plan, run, entry)

        outcome = Outcome(
            torch.zeros_like(x, dtype=torch.float64),
            [None] * len(self.runs),
            torch.zeros(len(self.runs), dtype=torch.int64, device=x.device),
            torch.zeros(len(self.runs), dtype=torch.int64, device=x.device),
            steps,
        )
        longest_first = torch.argsort(plan.steps[entry], descending=True, stable=True)
        samples = (plan.size * plan.epochs)[entry]

        def train(rows: Tensor) -> tuple[Report, Tensor]:
            return self._train(x, loss0, plan, run[rows], entry[rows], loss[rows], grad_norm[rows])

        batch_size = self.schedule.solver.batch_size
        for rows, (report, delta) in self._chunked(longest_first, samples, batch_size, train):
            self._add(outcome, run[rows], report, delta)
        return over_ranks(outcome, self.runs, self.ranks)

    def _share(self, plan: Plan, run: Tensor, entry: Tensor) -> Tensor:
        """This rank's rows, such that all ranks have about the same to do."""
        passes = [1 + (r.algorithm.probe == "gradient") for r in self.runs]
        return self.ranks.deal(plan.steps[entry] * torch.tensor(passes)[run])

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
                if not _out_of_memory(error):
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
            asking = [r for r, probe in enumerate(asked) if probe == "loss" and self.seed_of[r] == seed]
            rows = torch.isin(run, torch.tensor(asking)).nonzero()[:, 0]
            if len(rows):
                entries, client = torch.unique(entry[rows], return_inverse=True)
                model = torch.searchsorted(torch.tensor(asking), run[rows])
                losses = self._probe_losses(x[asking], plan, entries)
                loss[rows.to(x.device)] = losses[model.to(x.device), client.to(x.device)]
        wants_gradient = torch.tensor([probe == "gradient" for probe in asked])[run]
        samples = self.schedule.probed(plan.size)[entry]
        largest_first = torch.argsort(samples, descending=True, stable=True)

        def measure(rows: Tensor) -> tuple[Tensor, Tensor]:
            entries, client = torch.unique(entry[rows], return_inverse=True)
            work = self.schedule.probing(plan, entries, PROBE_BATCH)
            weights = x[run[rows].to(x.device)]
            gradient = torch.zeros_like(weights)
            summed = torch.zeros(len(rows), dtype=x.dtype, device=x.device)
            for n, batch, _ in _steps(work, client, PROBE_BATCH):
                self.probe_step(gradient[:n], weights[:n], batch, summed[:n], *self.data)
            size = work.size[client.to(x.device)]
            return summed.double() / size, _norms(gradient) / size

        wanted = largest_first[wants_gradient[largest_first]]
        for rows, measured in self._chunked(wanted, samples, PROBE_BATCH, measure):
            loss[rows.to(x.device)], grad_norm[rows.to(x.device)] = measured
        return loss, grad_norm

    def _probe_losses(self, x: Tensor, plan: Plan, entries: Tensor) -> Tensor:
        """Losses (R, N) of some of a plan's clients under models of their seed."""
        sizes = self.schedule.probed(plan.size[entries])

        def pick(clients: Tensor) -> Tensor:
            return self.schedule.probing(plan, entries[clients], PROBE_BATCH).order

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
    ) -> tuple[Report, Tensor]:
        """Lets rows train, the longest first; their reports, and their updates δ (rows, P)."""
        solver, device = self.schedule.solver, x.device
        run = run.to(device)
        received = x[run]
        flat = received.clone()
        buffer = torch.zeros_like(flat) if solver.momentum else None
        entries, client = torch.unique(entry, return_inverse=True)
        work = self.schedule.training(plan, entries)
        for n, samples, keys in _steps(work, client, solver.batch_size):
            self.train_step(flat[:n], None if buffer is None else buffer[:n], samples, keys, *self.data)
        delta = received.sub_(flat)
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

    def _add(self, outcome: Outcome, run: Tensor, report: Report, delta: Tensor) -> None:
        """Adds the rows' contributions to their runs' sums."""
        device = delta.device
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
        delta.masked_fill_(~usable[:, None], 0)  # never 0·NaN
        weights = member * coef
        scale = weights.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        outcome.total.add_(scale * ((weights / scale).to(delta.dtype) @ delta).double())
        counted = (member @ usable.double()).long()
        outcome.used.add_(counted)
        outcome.left_out.add_(member.sum(1).long() - counted)


def _steps(work: Work, client: Tensor, batch_size: int) -> Iterable[tuple[int, Tensor, Tensor]]:
    """For rows that are the work's clients, the longest first: each step's number of rows, batches and keys.

    A single row is counted as two where there are two, because compiled code treats a size of one apart.
    """
    finished = torch.bincount(work.steps.cpu()[client]).cumsum(0)[:-1]
    active = (len(client) - finished).clamp(min=min(2, len(client)))
    client = client.to(work.order.device)
    step, row = segments(active.to(client.device))
    counts = active.tolist()
    samples = torch.split(batches(work, client[row], step, batch_size), counts)
    keys = torch.split(mix(work.key[client[row]], step), counts)
    return zip(counts, samples, keys, strict=True)


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _norms(rows: Tensor) -> Tensor:
    """Euclidean norms of rows, summed in float64."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms


def _train_step(cohort: Cohort, solver: Solver) -> Callable[..., None]:
    """One local step of every row, in place."""

    def step(
        flat: Tensor,  # (rows, P)
        buffer: Tensor | None,  # (rows, P)
        samples: Tensor,  # (rows, B), negative is padding
        keys: Tensor,  # (rows,)
        inputs: Tensor,
        targets: Tensor,
    ) -> None:
        mask, index = samples >= 0, torch.where(samples >= 0, samples, ~samples)
        g = cohort.gradients(flat, inputs[index], targets[index], mask, keys)
        change, momenta = solver.update(flat, g, buffer)
        flat.add_(torch.where(mask[:, :1], change, 0))  # a row that has finished stays
        if buffer is not None and momenta is not None:
            buffer.copy_(momenta)

    return step


def _probe_step(cohort: Cohort) -> Callable[..., None]:
    """Adds a block of every row's samples to its summed gradient and loss, in place."""

    def step(
        gradient: Tensor,  # (rows, P)
        weights: Tensor,  # (rows, P)
        samples: Tensor,  # (rows, B), negative is padding
        summed: Tensor,  # (rows,)
        inputs: Tensor,
        targets: Tensor,
    ) -> None:
        mask, index = samples >= 0, torch.where(samples >= 0, samples, ~samples)
        g, losses = cohort.probes(weights, inputs[index], targets[index], mask)
        gradient.add_(g)
        summed.add_(losses)

    return step


def _compile(step: Callable[..., None]) -> Callable[..., None]:
    """Compiles a step for any number of rows, which are the first dimension of its first four arguments."""
    assert isinstance(step, FunctionType)
    # Compiled code is cached, and its number limited, by code object: each engine gets its own.
    step.__code__ = step.__code__.replace()
    compiled = torch.compile(step)
    chosen: Callable[..., None] | None = None

    def call(*arguments: Tensor | None) -> None:
        nonlocal chosen
        if chosen is not None:
            return chosen(*arguments)
        for rows in arguments[:4]:
            if rows is not None and len(rows) > 1:
                torch._dynamo.mark_dynamic(rows, 0)
        try:
            compiled(*arguments)
            chosen = compiled
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            if isinstance(error, RuntimeError) and _out_of_memory(error):
                raise
            warnings.warn(f"the local step runs uncompiled, and slower: {first_line(error)}", stacklevel=2)
            chosen = step
            step(*arguments)

    return call
