"""The plain executor: one client after another, with ordinary autograd and PyTorch's own optimisers.

It takes any module that PyTorch can train. On a CPU, clients are distributed over worker threads, one per
core; a large model uses all cores in each kernel instead. The stacked executor is tested against it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby, islice
from typing import NamedTuple

import torch
from torch import Tensor

from fairwind.aggregation import usable_clients
from fairwind.contract import GradientAlgorithm, Local, MemoryAlgorithm, PersonalAlgorithm, Report
from fairwind.data.counter import mix
from fairwind.data.federation import Federation
from fairwind.engine import tuning
from fairwind.engine.executor import ClientUpdates, RoundSums, Run, Shared
from fairwind.engine.layout import Parts, flattened
from fairwind.engine.local import local_part, trains_alone
from fairwind.engine.loop.learner import Learner, Modification, difference, split
from fairwind.engine.loop.tally import ClientResult, RunTotals, measured, outcome
from fairwind.engine.memory import Compression, Memories, OwnParts
from fairwind.engine.plain import PlainModel
from fairwind.engine.plan import ExecutionPlan
from fairwind.engine.schedule import Order, Plan, Planner
from fairwind.engine.workers import Workers


class Job(NamedTuple):
    """A client of a run."""

    run: int
    entry: int  # of the seed's plan
    client: int


class Schedule(NamedTuple):
    """The clients of a seed in a round, and their samples."""

    plan: Plan
    training: list[Tensor]  # of each entry, its samples in their order, epoch after epoch
    probing: list[Tensor]
    sizes: list[int]  # of an epoch
    steps: list[int]
    personal_steps: list[int]  # the first of them, which train the personal part alone
    keys: list[int]  # for dropout


class Loop:
    """Executes rounds one client at a time."""

    def __init__(
        self,
        model: PlainModel,
        federation: Federation,
        planner: Planner,
        runs: list[Run],
        memories: Memories,
        own: OwnParts,
        plan: ExecutionPlan,
        compression: Compression | None = None,
    ):
        self.compression = compression
        self.federation, self.planner, self.runs = federation, planner, runs
        self.memories, self.own = memories, own
        self.threads, self.gram_numbers = plan.threads.value, plan.sizes.gram_numbers
        # The runs whose servers get the mean gradient
        self.summing = [r for r, run in enumerate(runs) if isinstance(run.algorithm, GradientAlgorithm)]
        self.workers = Workers([Learner(model.another()) for _ in range(plan.workers.value)])
        self.layout, self.whole, self.own_layout = model.layout, model.whole, model.division.own
        self.together = max(
            1, min(tuning.MAX_REPORTED_CLIENTS, tuning.MAX_REPORTED_NUMBERS // model.layout.parameters)
        )
        self.unknown = torch.full((), torch.nan, dtype=torch.float64, device=federation.device)

    def prepare(self, round: int) -> int:
        self.lr = self.planner.solver.rate(round)
        self.schedules = {seed: self._schedule(seed, round) for seed in {run.seed for run in self.runs}}
        return sum(int(self.schedules[run.seed].plan.steps.sum()) for run in self.runs)

    def _schedule(self, seed: int, round: int) -> Schedule:
        plan = self.planner.plan([seed], round)
        entries, device = torch.arange(len(plan.client)), self.federation.device
        keys = plan.order_key.to(device), plan.dropout_key.to(device)
        training = self.planner.training(plan, entries).order(*keys)
        probing = self.planner.probing(plan, entries, tuning.MAX_LOOP_PROBED_SAMPLES).order(*keys)
        return Schedule(
            plan,
            _by_entry(training, plan.size * plan.epochs),
            _by_entry(probing, self.planner.probed(plan.size)),
            plan.size.tolist(),
            plan.steps.tolist(),
            plan.personal_steps.tolist(),
            plan.dropout_key.tolist(),
        )

    def round(self, x: Tensor, loss0: Tensor, shared: Shared, finish: Callable[[RoundSums], None]) -> None:
        more: dict[int, Tensor] = {}
        tallies = [
            RunTotals(r, run, x[r], partial(shared, r), self.memories, self.gram_numbers, self.compression)
            for r, run in enumerate(self.runs)
        ]
        for r, clients, report in self._trained(x, loss0, shared, more):
            tallies[r].add(clients, report)
        finish(outcome(tallies, more))

    def gradients(self, x: Tensor) -> dict[int, Tensor]:
        with self.workers.states[0].model.own_generators():
            return self._gradients(x, [self.layout.parts(each) for each in x], self._jobs())[1]

    def updates(
        self, x: Tensor, loss0: Tensor, shared: Shared, gradients: dict[int, Tensor]
    ) -> Iterator[ClientUpdates]:
        for r, clients, report in self._trained(x, loss0, shared, gradients):
            client = torch.tensor([each.client for each in clients], device=x.device)
            yield ClientUpdates(r, client, report, torch.stack([each.update for each in clients]))

    def _trained(
        self, x: Tensor, loss0: Tensor, shared: Shared, more: dict[int, Tensor]
    ) -> Iterator[tuple[int, list[ClientResult], Report]]:
        """A few clients of a run at a time, with their reports (n,).

        `more` is given the mean gradients that it does not have.
        """
        jobs, models = self._jobs(), [self.layout.parts(each) for each in x]
        with self.workers.states[0].model.own_generators():
            probes, gradients = self._gradients(x, models, jobs)
            more |= gradients | more

            @torch.enable_grad()
            def train(job: Job, learner: Learner) -> ClientResult:
                r = job.run
                if trains_alone(self.runs[r]):
                    return self._train_alone(x[r], job, learner)
                received = self._received(models, job)
                trained = self._train(x[r], received, shared, more.get(r), job, learner, probes.get(job))
                if isinstance(self.runs[r].algorithm, PersonalAlgorithm):
                    self._train_personal(x[r], job, learner)
                return trained

            done = zip(jobs, self.workers.map(train, jobs), strict=True)
            for r, of_run in groupby(done, lambda pair: pair[0].run):
                while some := list(islice(of_run, self.together)):
                    entries, clients = [job.entry for job, _ in some], [trained for _, trained in some]
                    report = measured(clients, self._report(r, entries, loss0))
                    self._keep(r, clients, report)
                    yield r, clients, report

    def _keep(self, r: int, clients: list[ClientResult], report: Report) -> None:
        """Keeps the clients' own parts, if the model has any."""
        if self.own.width and not trains_alone(self.runs[r]):
            numbers = torch.tensor([each.client for each in clients], device=self.own.device)
            new = torch.stack([each.own for each in clients])
            self.own.put(r, numbers, new, usable_clients(self.runs[r].algorithm, report))

    def _received(self, models: list[Parts], job: Job) -> Parts:
        """The whole model that a client begins from."""
        if not self.own.width:
            return models[job.run]
        own = self.own.take(job.run, torch.tensor([job.client]))[0]
        return (*models[job.run], *self.own_layout.parts(own))

    def _jobs(self) -> list[Job]:
        return [
            Job(r, entry, client)
            for r, run in enumerate(self.runs)
            for entry, client in enumerate(self.schedules[run.seed].plan.client.tolist())
        ]

    def _report(self, r: int, entries: list[int], loss0: Tensor) -> Report:
        """The reports of a run's clients, without what they measured."""
        plan, device = self.schedules[self.runs[r].seed].plan, loss0.device
        size, steps = plan.size[entries].double(), (plan.steps - plan.personal_steps)[entries].double()
        return Report(
            size=size.to(device),
            steps=self.planner.solver.accumulated(steps).to(device),
            lr=torch.full_like(size, self.lr, device=device),
            update_norm=self.unknown,
            loss=self.unknown,
            loss0=loss0[r, plan.client[entries].to(device)],
            grad_norm=self.unknown,
        )

    def _gradients(
        self, x: Tensor, models: list[Parts], jobs: list[Job]
    ) -> tuple[dict[Job, tuple[Tensor, Tensor]], dict[int, Tensor]]:
        """The probes of runs that need gradients, and their mean gradients (P,)."""
        mine = [job for job in jobs if job.run in self.summing]
        found: dict[Job, tuple[Tensor, Tensor]] = {}
        total = {r: torch.zeros_like(x[r], dtype=torch.float64) for r in self.summing}
        weight = dict.fromkeys(self.summing, 0.0)

        @torch.enable_grad()
        def measure(job: Job, learner: Learner) -> tuple[Tensor, Tensor, Tensor]:
            gradient = torch.empty_like(x[job.run])
            learner.model.load(self._received(models, job))
            return *self._probe(learner, job, gradient), gradient

        for job, (loss, size, gradient) in zip(mine, self.workers.map(measure, mine), strict=True):
            found[job] = loss, size
            if torch.isfinite(size):
                samples = self.schedules[self.runs[job.run].seed].sizes[job.entry]
                total[job.run] += samples * gradient.double()
                weight[job.run] += samples
        return found, {r: each / max(1, weight[r]) for r, each in total.items()}

    def _modification(
        self, job: Job, x: Tensor, received: Parts, shared: Shared, mean: Tensor | None
    ) -> Modification:
        """How a client's local steps are modified."""
        run = self.runs[job.run]
        corrected = isinstance(run.algorithm, GradientAlgorithm) and run.algorithm.corrected
        local = local_part(run, "training")
        if local == Local() and not corrected and job.run not in self.memories.values:
            return Modification()
        w = -local.pull * x
        if local.shared is not None:
            w += shared(job.run).to(x.dtype)
        if isinstance(run.algorithm, MemoryAlgorithm):
            w += run.algorithm.memory.factor * self.memories.take(job.run, torch.tensor([job.client]))[0]
        if corrected:
            assert mean is not None
            assert not callable(local.scale)
            w += local.scale * mean.to(x.dtype)
        return Modification(local, self.layout.parts(w), received if corrected else None)

    def _train(
        self,
        x: Tensor,
        received: Parts,
        shared: Shared,
        mean: Tensor | None,
        job: Job,
        learner: Learner,
        probed: tuple[Tensor, Tensor] | None,
    ) -> ClientResult:
        """A client probes (unless done) and trains from x (P,), with its whole model's parts `received`."""
        learner.model.load(received)
        loss, grad_norm = probed or self._probe(learner, job)
        self._steps(learner, job, self._modification(job, x, received, shared, mean))
        trained = learner.model.tensors
        shared_parts = len(self.layout.names)
        update, update_norm = difference(x, received[:shared_parts], trained[:shared_parts])
        own = flattened(trained[shared_parts:], x)
        return ClientResult(job.client, loss, grad_norm, update_norm, update, own)

    def _train_alone(self, x: Tensor, job: Job, learner: Learner) -> ClientResult:
        """A client trains nothing but its own model, and sends an update of zero."""
        norm = 0.0 if self._train_personal(x, job, learner) else torch.nan
        measured, own = (self.unknown, self.unknown, torch.full_like(self.unknown, norm)), x.new_empty(0)
        return ClientResult(job.client, *measured, torch.zeros_like(x), own)

    def _train_personal(self, x: Tensor, job: Job, learner: Learner) -> bool:
        """A client trains its personal model, and keeps it if it is finite; returns whether it is."""
        client = torch.tensor([job.client])
        learner.model.load(self.whole.parts(self.memories.take(job.run, client)[0]))
        local = local_part(self.runs[job.run], "personal")
        self._steps(learner, job, Modification(local, self.layout.parts(-local.pull * x)))
        new = self.whole.flatten(learner.model.module)[None]
        finite = bool(torch.isfinite(new).all())
        if finite:
            self.memories.put(job.run, client, new)
        return finite

    def _probe(self, learner: Learner, job: Job, gradient: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The mean loss over a client's samples, and the norm of its gradient if the probe needs it.

        The gradient itself is written to `gradient` (P,), if given.
        """
        run = self.runs[job.run]
        if run.algorithm.probe == "none":
            return self.unknown, self.unknown
        samples = self.schedules[run.seed].probing[job.entry]
        loss = partial(self._pick, learner.model.evaluation_loss)
        if run.algorithm.probe == "loss":
            return learner.loss(loss, samples), self.unknown
        return learner.probe(loss, samples, None if gradient is None else self.layout.parts(gradient))

    def _steps(self, learner: Learner, job: Job, modification: Modification) -> None:
        """The client's steps, in place."""
        first = self.schedules[self.runs[job.run].seed].personal_steps[job.entry]
        batches = self._batches(learner.model, job)
        learner.steps(self.planner.solver, self.lr, batches, modification, personal_steps=first)

    def _batches(self, model: PlainModel, job: Job) -> Iterator[Callable[[], Tensor]]:
        """For each local step, a function that computes the loss of its batch."""
        schedule = self.schedules[self.runs[job.run].seed]
        key, size = schedule.keys[job.entry], self.planner.solver.batch_size
        epochs = split(schedule.training[job.entry], schedule.sizes[job.entry])
        batches = (part for epoch in epochs for part in split(epoch, size))
        for step, part in enumerate(islice(batches, schedule.steps[job.entry])):
            yield partial(self._pick, partial(model.training_loss, key=mix(key, step)), part)

    def _pick(self, loss: Callable[..., Tensor], samples: Tensor) -> Tensor:
        return loss(*self.federation.at(samples))


def _by_entry(order: Order, sizes: Tensor) -> list[Tensor]:
    """The samples of each entry, given their numbers."""
    return list(order.samples.split_with_sizes(sizes.tolist()))
