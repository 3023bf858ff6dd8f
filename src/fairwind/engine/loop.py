"""The plain executor: one client after another, with ordinary autograd and PyTorch's own optimisers.

It takes any module that PyTorch can train. On a CPU, clients are distributed over worker threads, one per
core; a large model uses all cores in each kernel instead. The stacked executor is tested against it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairwind.aggregation import contribute, usable_clients
from fairwind.contract import (
    CohortAlgorithm,
    GradientAlgorithm,
    GramAlgorithm,
    Local,
    MemoryAlgorithm,
    PersonalAlgorithm,
    Report,
)
from fairwind.counter import mix
from fairwind.data.federation import Federation
from fairwind.engine.executor import Outcome, Run, seeing
from fairwind.engine.held import Held
from fairwind.engine.learner import Learner, Modification, Sum, difference
from fairwind.engine.local import local_part
from fairwind.engine.memory import Memories, changed
from fairwind.engine.plain import PlainModel
from fairwind.engine.plan import Order, Plan, Planner
from fairwind.engine.workers import Workers

PROBED = 512  # samples that are probed at once
LARGE = 1 << 20  # parameters from which on a model is large,
LONG = 5e9  # and operations of a step, whose kernels then fill all cores


class Job(NamedTuple):
    """A client of a run."""

    run: int
    entry: int  # of the seed's plan
    client: int


class Loop:
    """Executes rounds one client at a time."""

    def __init__(
        self,
        model: PlainModel,
        federation: Federation,
        planner: Planner,
        runs: list[Run],
        memories: Memories,
        *,
        workers: int = 1,
    ):
        self.federation, self.planner, self.runs, self.memories = federation, planner, runs, memories
        # Kernels of a large model use all cores, and several large models do not fit into the cache; small
        # steps would wait for the GIL. And PyTorch's generator is shared by all threads.
        self.threads = 1
        few = planner.participants * len(runs) < workers
        if few or model.layout.parameters >= LARGE or model.operations(planner.solver.batch_size) >= LONG:
            workers, self.threads = 1, workers
        elif model.randomness == "generator" or not model.fills_a_core(planner.solver.batch_size):
            workers = 1
        self.summing = [r for r, run in enumerate(runs) if isinstance(run.algorithm, GradientAlgorithm)]
        factors = federation.device.type == "cpu" and planner.solver.plain and not self.summing
        self.workers = Workers([Learner(model.another(), factors=factors) for _ in range(workers)])
        self.layout, self.randomness = model.layout, model.randomness
        self.recurrent = any(isinstance(layer, nn.RNNBase) for layer in model.module.modules())

    def prepare(self, round: int) -> int:
        self.lr = self.planner.solver.rate(round)
        self.plans: dict[int, Plan] = {}
        self.orders: dict[int, tuple[Order, Order]] = {}  # by seed: for training, for probes
        for seed in {run.seed for run in self.runs}:
            plan = self.plans[seed] = self.planner.plan([seed], round)
            entries = torch.arange(len(plan.client))
            device = self.federation.device
            keys = plan.order_key.to(device), plan.dropout_key.to(device)
            self.orders[seed] = (
                self.planner.training(plan, entries).order(*keys),
                self.planner.probing(plan, entries, PROBED).order(*keys),
            )
        return sum(int(self.plans[run.seed].steps.sum()) for run in self.runs)

    def round(
        self, x: Tensor, loss0: Tensor, states: Sequence[Any], finish: Callable[[Outcome], None]
    ) -> None:
        jobs = [
            Job(r, entry, client)
            for r, run in enumerate(self.runs)
            for entry, client in enumerate(self.plans[run.seed].client.tolist())
        ]
        totals = [Sum(each) for each in x]
        used, left_out = torch.zeros(2, len(self.runs), dtype=torch.int64, device=x.device)
        lowest = torch.full((len(self.runs),), torch.inf, dtype=torch.float64, device=x.device)
        parts: list[list[tuple[Tensor, ...]]] = [[] for _ in self.runs]
        held = {r: Held(each, lambda matrices: matrices[0]) for r, each in seeing(self.runs).items()}
        probes, more = self._gradients(x, jobs)

        def train(job: Job, learner: Learner) -> tuple[Report, Tensor]:
            own = x[job.run], states[job.run], more.get(job.run)
            report, delta = self._train(*own, job, learner, probes.get(job))
            if isinstance(self.runs[job.run].algorithm, PersonalAlgorithm):
                self._train_personal(x[job.run], job, learner)
            return report._replace(loss0=loss0[job.run, job.client]), delta

        changes = {r: torch.zeros_like(x[r], dtype=torch.float64) for r in self._remembering()}
        for job, (report, delta) in zip(jobs, self.workers.map(train, jobs), strict=True):
            r, algorithm = job.run, self.runs[job.run].algorithm
            if isinstance(algorithm, CohortAlgorithm | GramAlgorithm):
                usable = usable_clients(algorithm, report)
                client = torch.tensor([job.client], device=x.device)
                held[r].add(Report(*(field[None] for field in report)), client, [delta[None]])
            else:
                part, usable = contribute(algorithm, report)
                parts[r].append(part.sums)
                if usable and isinstance(algorithm, MemoryAlgorithm):
                    changes[r] += self._remember(algorithm, job, report, states[r], delta)
                if usable:
                    totals[r].add(float(part.coef), delta)
            used[r] += usable
            left_out[r] += ~usable
            lowest[r] = torch.fmin(lowest[r], report.loss)
        sums = [
            type(p[0])(*(torch.stack(each).sum() for each in zip(*p, strict=True))) if p else None
            for p in parts
        ]
        total = torch.stack([each.flush() for each in totals])
        finish(Outcome(total, sums, used, left_out, lowest, more | changes, held))

    def _remembering(self) -> list[int]:
        return [r for r, run in enumerate(self.runs) if isinstance(run.algorithm, MemoryAlgorithm)]

    def _remember(
        self, algorithm: MemoryAlgorithm[Any, Any], job: Job, report: Report, state: Any, delta: Tensor
    ) -> Tensor:
        """Updates a client's memory, and returns its change (P,)."""
        client = torch.tensor([job.client])
        memory = partial(self.memories.take, job.run, client)
        shared = algorithm.local.shared(state).to(delta.dtype) if algorithm.local.shared else 0.0
        here = torch.ones(1, dtype=torch.bool, device=delta.device)
        change = changed(algorithm.memory.change(report), memory, shared, delta[None].clone(), here)
        self.memories.add(job.run, client, change)
        return change[0]

    def _gradients(
        self, x: Tensor, jobs: list[Job]
    ) -> tuple[dict[Job, tuple[Tensor, Tensor]], dict[int, Tensor]]:
        """The probes of runs that need gradients, and their mean gradients (P,)."""
        mine = [job for job in jobs if job.run in self.summing]
        found: dict[Job, tuple[Tensor, Tensor]] = {}
        total = {r: torch.zeros_like(x[r], dtype=torch.float64) for r in self.summing}
        weight = dict.fromkeys(self.summing, 0.0)

        def measure(job: Job, learner: Learner) -> tuple[Tensor, Tensor, Tensor]:
            gradient = torch.empty_like(x[job.run])
            return *self._probe(learner.model.load(x[job.run]), learner, job, gradient), gradient

        for job, (loss, size, gradient) in zip(mine, self.workers.map(measure, mine), strict=True):
            found[job] = loss, size
            if torch.isfinite(size):
                samples = int(self.plans[self.runs[job.run].seed].size[job.entry])
                total[job.run] += samples * gradient.double()
                weight[job.run] += samples
        return found, {r: each / max(1, weight[r]) for r, each in total.items()}

    def _modification(
        self, job: Job, x: Tensor, state: Any, mean: Tensor | None, weights: list[nn.Parameter]
    ) -> Modification:
        """How a client's local steps are modified."""
        run = self.runs[job.run]
        corrected = isinstance(run.algorithm, GradientAlgorithm) and run.algorithm.corrected
        local = local_part(run, "training")
        if local == Local() and not corrected and job.run not in self.memories.values:
            return Modification()
        w = -local.pull * x
        if local.shared is not None:
            w += local.shared(state).to(x.dtype)
        if isinstance(run.algorithm, MemoryAlgorithm):
            w += run.algorithm.memory.factor * self.memories.take(job.run, torch.tensor([job.client]))[0]
        if corrected:
            assert mean is not None
            assert not callable(local.scale)
            w += local.scale * mean.to(x.dtype)
        return Modification(local, weights, self.layout.parts(w), self.layout.parts(x) if corrected else None)

    def _train(
        self,
        x: Tensor,
        state: Any,
        mean: Tensor | None,
        job: Job,
        learner: Learner,
        probed: tuple[Tensor, Tensor] | None,
    ) -> tuple[Report, Tensor]:
        """A client probes (unless done), trains from x and reports; returns also its update δ (P,)."""
        plan = self.plans[self.runs[job.run].seed]
        weights = learner.model.load(x)
        loss, grad_norm = probed or self._probe(weights, learner, job)
        self._steps(weights, learner, job, self._modification(job, x, state, mean, weights))
        delta = torch.empty_like(x)
        update_norm = difference(self.layout.parts(x), weights, self.layout.parts(delta))
        solver = self.planner.solver
        numbers = (plan.size[job.entry].double(), solver.accumulated(plan.steps[job.entry].double()))
        lr = torch.tensor(self.lr, dtype=torch.float64)
        size, steps, rate = (number.to(x.device) for number in (*numbers, lr))
        return Report(
            size, steps, rate, update_norm, loss, torch.full_like(loss, torch.nan), grad_norm
        ), delta

    def _train_personal(self, x: Tensor, job: Job, learner: Learner) -> None:
        """A client trains its personal model."""
        client = torch.tensor([job.client])
        weights = learner.model.load(self.memories.take(job.run, client)[0])
        local = local_part(self.runs[job.run], "personal")
        self._steps(weights, learner, job, Modification(local, weights, self.layout.parts(-local.pull * x)))
        new = torch.cat([weight.detach().reshape(-1) for weight in weights])[None]
        if torch.isfinite(new).all():
            self.memories.put(job.run, client, new)

    def _probe(
        self, weights: list[nn.Parameter], learner: Learner, job: Job, gradient: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The mean loss over a client's samples, and the norm of its gradient if the probe needs it.

        The gradient itself is written to `gradient` (P,), if given.
        """
        probe = self.runs[job.run].algorithm.probe
        device = self.federation.device
        if probe == "none":
            nothing = torch.full((2,), torch.nan, dtype=torch.float64, device=device)
            return nothing[0], nothing[1]
        samples = _samples(self.orders[self.runs[job.run].seed][1], job.entry, 1)
        learner.model.train(False)
        summed = torch.zeros((), dtype=torch.float64, device=device)
        found: dict[int, Tensor] = {}
        # In evaluation mode cuDNN's recurrent layers have no backward pass.
        cudnn = torch.backends.cudnn.flags(enabled=not self.recurrent)
        with torch.set_grad_enabled(probe == "gradient"), cudnn:
            for part in torch.split(samples, PROBED):
                loss = self._pick(learner.model.losses, part).sum()
                summed += loss.detach()
                if probe == "gradient":
                    for i, new in enumerate(torch.autograd.grad(loss, weights, allow_unused=True)):
                        if new is not None:
                            found[i] = found[i].add_(new) if i in found else new
        if gradient is not None:
            for i, place in enumerate(self.layout.parts(gradient)):
                place.copy_(found[i] / len(samples) if i in found else torch.zeros_like(place))
        size = learner.gradient_norm(weights, found) if probe == "gradient" else summed * torch.nan
        return summed / len(samples), size / len(samples)

    def _steps(
        self, weights: list[nn.Parameter], learner: Learner, job: Job, modification: Modification
    ) -> None:
        """The client's steps, in place."""
        model, solver, seed = learner.model, self.planner.solver, self.runs[job.run].seed
        plan = self.plans[seed]
        samples = _samples(self.orders[seed][0], job.entry, int(plan.epochs[job.entry]))
        model.train()
        optimizer = solver.build(weights, self.lr)
        epochs = torch.split(samples, int(plan.size[job.entry]))
        batches = (part for epoch in epochs for part in torch.split(epoch, solver.batch_size))
        key = int(plan.dropout_key[job.entry])
        draws = self.randomness == "generator"
        with torch.enable_grad(), torch.random.fork_rng(range(torch.cuda.device_count()), enabled=draws):
            for step, part in enumerate(batches):
                losses = partial(self._pick, partial(model.training_losses, key=mix(key, step)), part)
                learner.step(optimizer, losses, solver.clip, modification)

    def _pick(self, losses: Callable[..., Tensor], samples: Tensor) -> Tensor:
        return losses(*self.federation.at(samples))


def _samples(order: Order, entry: int, epochs: int) -> Tensor:
    """One entry's samples, epoch after epoch."""
    begin = int(order.base[entry])
    return order.samples[begin : begin + epochs * int(order.size[entry])]
