"""The plain executor: one run, one client, one batch after another, with ordinary autograd.

The reference the stacked executor is tested against, and the baseline it is timed against.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fairwind.contract import Probe, Report, contribute
from fairwind.counter import mix
from fairwind.data.federation import Federation
from fairwind.engine.cohort import Cohort
from fairwind.engine.executor import Outcome, Run
from fairwind.engine.schedule import Plan, Schedule


class Loop:
    """Executes rounds one client at a time."""

    repeats = ran_short = False

    def step_by_step(self) -> None:
        pass

    def __init__(self, cohort: Cohort, federation: Federation, schedule: Schedule, runs: list[Run]):
        self.cohort, self.federation, self.schedule, self.runs = cohort, federation, schedule, runs
        self.training, self.evaluating = copy.deepcopy(cohort.training), copy.deepcopy(cohort.evaluating)
        self.keys = [b for n, b in self.training.named_buffers() if n in cohort.keys]

    def prepare(self, round: int) -> int:
        self.plans = {seed: self.schedule.plan([seed], round) for seed in {run.seed for run in self.runs}}
        return sum(int(self.plans[run.seed].steps.sum()) for run in self.runs)

    def round(self, x: Tensor, loss0: Tensor) -> Outcome:
        total = torch.zeros_like(x, dtype=torch.float64)
        used, left_out = torch.zeros(2, len(self.runs), dtype=torch.int64, device=x.device)
        sums = []
        for r, run in enumerate(self.runs):
            plan = self.plans[run.seed]
            parts = []
            for i, client in enumerate(plan.client.tolist()):
                report, delta = self.train(x[r], loss0[r, client], plan, i, run.algorithm.probe)
                part, usable = contribute(run.algorithm, report)
                if usable:
                    total[r] += part.coef * delta.double()
                used[r] += usable
                left_out[r] += ~usable
                parts.append(part.sums)
            sums.append(type(parts[0])(*(torch.stack(each).sum() for each in zip(*parts, strict=True))))
        return Outcome(total, sums, used, left_out)

    def train(self, x: Tensor, loss0: Tensor, plan: Plan, i: int, probe: Probe) -> tuple[Report, Tensor]:
        """The i-th client of a plan: probe, train from x, report; and its update δ (P,)."""
        solver, size, steps = self.schedule.solver, plan.size[i], plan.steps[i]
        keys = self.schedule.keys(plan)
        loss = grad_norm = torch.tensor(torch.nan, dtype=torch.float64, device=x.device)
        if probe != "none":
            weights = self._load(self.evaluating, x)
            measured = self.schedule.probing(plan, torch.tensor([i]), int(size)).drawn(*keys).order
            value = self._losses(self.evaluating, measured).mean()
            loss = value.detach().double()
            if probe == "gradient":
                grad_norm = _norm(torch.autograd.grad(value, weights, materialize_grads=True))

        weights = self._load(self.training, x)
        optimizer = torch.optim.SGD(
            weights, solver.lr, solver.momentum, weight_decay=solver.weight_decay, nesterov=solver.nesterov
        )
        epochs = torch.split(self.schedule.training(plan, torch.tensor([i])).drawn(*keys).order, int(size))
        batches = (samples for epoch in epochs for samples in torch.split(epoch, solver.batch_size))
        for step, samples in enumerate(batches):
            for key in self.keys:
                key.copy_(mix(plan.dropout_key[i], step))
            optimizer.zero_grad()
            torch.autograd.backward(self._losses(self.training, samples).mean())
            optimizer.step()
        delta = x - torch.cat([w.detach().reshape(-1) for w in weights])

        taken, lr = solver.accumulated(steps.double()), torch.tensor(solver.lr, dtype=torch.float64)
        host = size.double().to(x.device), taken.to(x.device), lr.to(x.device)
        return Report(*host, _norm([delta]), loss, loss0, grad_norm), delta

    def _losses(self, module: nn.Module, samples: Tensor) -> Tensor:
        outputs: Tensor = module(self.federation.inputs[samples])
        return self.cohort.loss(outputs, self.federation.targets[samples])

    def _load(self, module: nn.Module, x: Tensor) -> list[nn.Parameter]:
        """Puts parameters x into a module, and returns them as the module's own."""
        found = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in self.cohort.unflatten(x).items():
                found[name].copy_(value)
        return [found[name] for name in self.cohort.names]


def _norm(parts: Sequence[Tensor]) -> Tensor:
    flat = torch.cat([p.reshape(-1) for p in parts])
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return norm
