"""The plain executor: one client after another, with ordinary autograd and PyTorch's own optimisers.

It takes whatever PyTorch trains. On a CPU clients are shared out among workers with a core each, or, where
the model is large, each has all cores. The stacked executor is tested against it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairwind.contract import Probe, Report, contribute
from fairwind.counter import mix
from fairwind.data.federation import Federation
from fairwind.engine.executor import Outcome, Run
from fairwind.engine.plain import PlainModel
from fairwind.engine.plan import Order, Plan, Planner
from fairwind.engine.workers import Workers
from fairwind.layers.factored import add_gradients, factored, squared_norm, take_factors

PROBED = 512  # samples that are probed at once
BLOCK = 1 << 18  # numbers that are added up at once
FEW = 8  # clients
LARGE = 1 << 20  # parameters from which on a model is large,
LONG = 5e9  # and operations of a step, whose kernels then fill all cores


class Job(NamedTuple):
    """A client of a run."""

    run: int
    entry: int  # of the seed's plan
    client: int


class Learner:
    """A copy of the model that trains one client after another."""

    def __init__(self, model: PlainModel, *, factors: bool):
        """Where `factors` is set, gradients of large dense layers are added to the weights unformed."""
        self.model = model
        self.layers = factored(model.module) if factors else []

    def step(self, optimizer: torch.optim.Optimizer, losses: Tensor, clip: float | None) -> None:
        """One step down the mean of losses."""
        torch.autograd.backward(losses.mean())
        if clip is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        add_gradients(self.layers, -optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def gradient_norm(self, weights: list[nn.Parameter], found: dict[int, Tensor]) -> Tensor:
        """The norm of gradients of weights, by their numbers, together with those left as factors."""
        factors, squares = take_factors(self.layers), []
        for i, weight in enumerate(weights):
            product = factors.get(id(weight))
            if product is not None and i in found:  # the weight is another layer's, too
                found[i] = found[i] + (product[0].mT @ product[1])
            elif product is not None:
                squares.append(squared_norm(*product))
        return torch.stack([_norm(list(found.values())).square(), *squares]).sum().sqrt()


class Loop:
    """Executes rounds one client at a time."""

    def __init__(
        self,
        model: PlainModel,
        federation: Federation,
        planner: Planner,
        runs: list[Run],
        *,
        workers: int = 1,
    ):
        self.federation, self.planner, self.runs = federation, planner, runs
        # Kernels of a large model fill all cores, and several large models do not fit into the cache; small
        # steps would wait for Python's lock. And PyTorch's generator belongs to all threads.
        self.threads = 1
        few = planner.participants * len(runs) < workers
        if few or model.layout.parameters >= LARGE or model.operations(planner.solver.batch_size) >= LONG:
            workers, self.threads = 1, workers
        elif model.randomness == "generator" or not model.fills_a_core(planner.solver.batch_size):
            workers = 1
        on_cpu = federation.device.type == "cpu"
        self.workers = Workers(
            [Learner(model.another(), factors=on_cpu and planner.solver.plain) for _ in range(workers)]
        )
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

    def round(self, x: Tensor, loss0: Tensor, finish: Callable[[Outcome], None]) -> None:
        jobs = [
            Job(r, entry, client)
            for r, run in enumerate(self.runs)
            for entry, client in enumerate(self.plans[run.seed].client.tolist())
        ]
        totals = [Sum(each) for each in x]
        used, left_out = torch.zeros(2, len(self.runs), dtype=torch.int64, device=x.device)
        lowest = torch.full((len(self.runs),), torch.inf, dtype=torch.float64, device=x.device)
        parts: list[list[tuple[Tensor, ...]]] = [[] for _ in self.runs]

        def train(job: Job, learner: Learner) -> tuple[Report, Tensor]:
            probe = self.runs[job.run].algorithm.probe
            return self._train(x[job.run], loss0[job.run, job.client], job, learner, probe)

        for job, (report, delta) in zip(jobs, self.workers.map(train, jobs), strict=True):
            r, loss = job.run, report.loss
            part, usable = contribute(self.runs[r].algorithm, report)
            if usable:
                totals[r].add(float(part.coef), delta)
            used[r] += usable
            left_out[r] += ~usable
            lowest[r] = torch.fmin(lowest[r], loss)
            parts[r].append(part.sums)
        sums = [type(p[0])(*(torch.stack(each).sum() for each in zip(*p, strict=True))) for p in parts]
        total = torch.stack([each.flush() for each in totals])
        finish(Outcome(total, sums, used, left_out, lowest))

    def _train(
        self, x: Tensor, loss0: Tensor, job: Job, learner: Learner, probe: Probe
    ) -> tuple[Report, Tensor]:
        """A client probes, trains from x and reports; and its update δ (P,)."""
        seed = self.runs[job.run].seed
        plan, (order, probed) = self.plans[seed], self.orders[seed]
        loss, grad_norm = torch.full((2,), torch.nan, dtype=torch.float64, device=x.device)
        weights = learner.model.load(x)
        if probe != "none":
            loss, grad_norm = self._probe(weights, learner, _samples(probed, job.entry, 1), probe)
        with torch.random.fork_rng(range(torch.cuda.device_count()), enabled=self.randomness == "generator"):
            samples = _samples(order, job.entry, int(plan.epochs[job.entry]))
            self._steps(weights, learner, samples, plan, job)
        delta = torch.empty_like(x)
        with torch.no_grad():
            for part, before, after in zip(*map(self.layout.parts, (delta, x)), weights, strict=True):
                torch.sub(before, after, out=part)
        solver = self.planner.solver
        numbers = (plan.size[job.entry].double(), solver.accumulated(plan.steps[job.entry].double()))
        lr = torch.tensor(self.lr, dtype=torch.float64)
        size, steps, rate = (number.to(x.device) for number in (*numbers, lr))
        return Report(size, steps, rate, _norm([delta]), loss, loss0, grad_norm), delta

    def _probe(
        self, weights: list[nn.Parameter], learner: Learner, samples: Tensor, probe: Probe
    ) -> tuple[Tensor, Tensor]:
        """The mean loss over the samples, and the norm of its gradient, if that is probed for."""
        learner.model.train(False)
        summed = torch.zeros((), dtype=torch.float64, device=samples.device)
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
        norm = learner.gradient_norm(weights, found) if probe == "gradient" else summed * torch.nan
        return summed / len(samples), norm / len(samples)

    def _steps(
        self, weights: list[nn.Parameter], learner: Learner, samples: Tensor, plan: Plan, job: Job
    ) -> None:
        """The client's steps, in place."""
        model, solver = learner.model, self.planner.solver
        model.train()
        optimizer = solver.build(weights, self.lr)
        epochs = torch.split(samples, int(plan.size[job.entry]))
        batches = (part for epoch in epochs for part in torch.split(epoch, solver.batch_size))
        key = int(plan.dropout_key[job.entry])
        with torch.enable_grad():
            for step, part in enumerate(batches):
                losses = self._pick(partial(model.training_losses, key=mix(key, step)), part)
                learner.step(optimizer, losses, solver.clip)

    def _pick(self, losses: Callable[..., Tensor], samples: Tensor) -> Tensor:
        return losses(*self.federation.at(samples))


def _samples(order: Order, entry: int, epochs: int) -> Tensor:
    """One entry's samples, epoch after epoch."""
    begin = int(order.base[entry])
    return order.samples[begin : begin + epochs * int(order.size[entry])]


class Sum:
    """Σ coef·δ in float64, of which a few terms at a time are added up in the updates' own type."""

    def __init__(self, like: Tensor):
        self.total = torch.zeros_like(like, dtype=torch.float64)
        self.few: Tensor | None = None
        self.terms, self.scale = 0, 1.0

    def add(self, coef: float, update: Tensor) -> None:
        """Takes the update over."""
        if self.few is None or self.terms == FEW or not 1e-6 < abs(coef / self.scale) < 1e6:
            self.flush()
            if coef:
                self.few, self.terms, self.scale = update, 1, coef
            return
        self.few.add_(update, alpha=coef / self.scale)
        self.terms += 1

    def flush(self) -> Tensor:
        """The sum of all terms so far."""
        if self.few is not None:
            # In blocks whose copies in float64 stay in the cache
            for total, few in zip(*(torch.split(t, BLOCK) for t in (self.total, self.few)), strict=True):
                total.add_(few, alpha=self.scale)
        self.few = None
        return self.total


def _norm(parts: Sequence[Tensor]) -> Tensor:
    """The norm of all parts together."""
    blocks = [block for part in parts for block in torch.split(part.detach().reshape(-1), BLOCK)]
    if not blocks:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(blocks)).double().square().sum().sqrt()
