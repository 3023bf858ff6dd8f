"""Does momentum that clients keep from round to round explain the published rows with momentum on Synthetic?

    python benchmarks/kept_momentum.py [--seeds 0 1 2] [--rounds 1000] --json FILE

In the engine a client's momentum starts at zero in every round. Here clients are trained by a simulation of
its own, once like that ("zero") and once with a momentum buffer that each client keeps ("kept"), on the same
batches. Data, initial weights, algorithms and metrics are the package's; local training and the order of
samples are not. results/solvers/momentum.json has what it found.

FedNova divides by ‖a‖₁, the total weight of a round's gradients. Kept momentum also carries gradients of
earlier rounds, which ‖a‖₁ does not define; clients report that of a start from zero in both cases, as the
package does.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fairwind import Solver, Task, algorithms, setups
from fairwind.aggregation import advance, contribute, first_state
from fairwind.contract import Algorithm, Report
from fairwind.engine.checks import build
from fairwind.metrics import fairness, finite, over_seeds
from fairwind.runs.environment import environment
from fairwind.runs.recipe import settings_of

STARTS = ("zero", "kept")
REPORTED = ("avg", "std", "worst30", "avg_weighted", "std_weighted", "worst30_weighted")


class Batch(NamedTuple):
    """The same local step of all clients that take it; these are the first n."""

    place: Tensor  # (n, B) positions among the ordered samples
    share: Tensor  # (n, 1, B, 1, 1) what a sample counts in the batch's mean; 0 is padding


class KeptMomentum:
    """Runs (algorithm, start) of a linear classifier under all seeds, with all clients in every round.

    Models are (seeds, features + 1, runs, classes): the last feature is 1, and its weights are the bias.
    """

    def __init__(
        self,
        task: Task,
        solver: Solver,
        runs: Sequence[tuple[Algorithm[Any, Any], str]],
        seeds: Sequence[int],
    ):
        # All that is simulated: one epoch of SGD
        assert solver == Solver(solver.lr, solver.momentum, solver.nesterov, batch_size=solver.batch_size)
        self.solver, self.runs, self.seeds, self.round = solver, runs, seeds, 0
        models = [build(task.model, seed) for seed in seeds]
        weights = [torch.cat([m.weight.T, m.bias[None]]).detach() for m in models if isinstance(m, nn.Linear)]
        self.x = torch.stack(weights)[:, :, None].repeat(1, 1, len(runs), 1)
        data = task.federation
        assert isinstance(data.inputs, Tensor)
        assert isinstance(data.targets, Tensor)
        self.inputs = nn.functional.pad(data.inputs.to(self.x.dtype), (0, 1), value=1.0)
        self.labels = nn.functional.one_hot(data.targets, self.x.shape[3]).to(self.x.dtype)
        # Largest clients first, so that those that still train are the first
        self.order = torch.argsort(data.train, descending=True, stable=True)
        self.start, self.train, self.test = (each[self.order] for each in (data.start, data.train, data.test))
        self.batches = self._batches()
        self.buffer = self.x.new_zeros(len(data), *self.x.shape)
        self.kept = torch.tensor([start == "kept" for _, start in runs])[:, None].to(self.x.dtype)
        self.states = {
            (s, r): first_state(algorithm, self.x[s, :, r].reshape(-1), len(data))
            for s in range(len(seeds))
            for r, (algorithm, _) in enumerate(runs)
        }
        self.loss0 = self.probe()[0]
        self.left_out = 0

    def _batches(self) -> list[Batch]:
        size, found = self.solver.batch_size, []
        first = self.train.cumsum(0) - self.train
        for begin in range(0, int(self.train.max()), size):
            n = int((self.train > begin).sum())
            place = begin + torch.arange(size)
            inside = place < self.train[:n, None]
            share = inside.to(self.x.dtype) / inside.sum(1, keepdim=True)
            at = torch.where(inside, first[:n, None] + place, first[:n, None])
            found.append(Batch(at, share[:, None, :, None, None]))
        return found

    def shuffled(self) -> Tensor:
        """Each client's training samples in random order, client after client, for each seed: (seeds, N)."""
        owner = np.repeat(np.arange(len(self.train)), self.train.numpy())
        place = np.arange(len(owner)) - np.repeat(
            (self.train.cumsum(0) - self.train).numpy(), self.train.numpy()
        )
        sample = self.start.numpy()[owner] + place
        draws = (np.random.default_rng([seed, self.round]).random(len(owner)) for seed in self.seeds)
        return torch.from_numpy(np.stack([sample[np.argsort(owner + drawn)] for drawn in draws]))

    def local_training(self) -> Tensor:
        """The clients' updates x − x_k after their local steps: (K, seeds, features + 1, runs, classes)."""
        lr, rho, order = self.solver.lr, self.solver.momentum, self.shuffled()
        models = self.x.repeat(len(self.train), 1, 1, 1, 1)
        self.buffer *= self.kept
        for place, share in self.batches:
            n = len(place)
            samples = order[:, place].transpose(0, 1)  # (n, seeds, B)
            inputs, labels = self.inputs[samples], self.labels[samples]
            outputs = torch.unflatten(inputs @ models[:n].flatten(3), -1, models.shape[-2:])
            error = (outputs.softmax(-1) - labels[:, :, :, None]) * share
            gradient = torch.unflatten(inputs.mT @ error.flatten(3), -1, models.shape[-2:])
            buffer = self.buffer[:n].mul_(rho).add_(gradient)
            models[:n].sub_(gradient.add_(buffer, alpha=rho) if self.solver.nesterov else buffer, alpha=lr)
        return self.x - models

    def probe(self) -> tuple[Tensor, Tensor]:
        """Every client's training loss at x, and its gradient's norm: (K, seeds, runs)."""
        losses, norms = [], []
        for begin, size in zip(self.start.tolist(), self.train.tolist(), strict=True):
            inputs, labels = self.inputs[begin : begin + size], self.labels[begin : begin + size, None]
            outputs = torch.unflatten(inputs @ self.x.flatten(2), -1, self.x.shape[-2:])
            logs = outputs.log_softmax(-1)  # (seeds, n, runs, classes)
            losses.append(-(logs * labels).sum(-1).double().mean(1))
            gradient = inputs.T @ (logs.exp() - labels).flatten(2) / size
            squares = torch.unflatten(gradient, -1, self.x.shape[-2:]).double().square()
            norms.append(squares.sum((1, 3)).sqrt())
        return torch.stack(losses), torch.stack(norms)

    def step(self) -> None:
        """One round of every run."""
        loss, grad_norm = self.probe()
        updates = self.local_training().double()
        size, steps = self.train.double(), -(-self.train // self.solver.batch_size)
        for (s, r), state in self.states.items():
            algorithm, update = self.runs[r][0], updates[:, s, :, r].flatten(1)
            report = Report(
                size=size,
                steps=self.solver.accumulated(steps.double()),
                lr=torch.full_like(size, self.solver.lr),
                update_norm=update.norm(dim=1),
                loss=loss[:, s, r],
                loss0=self.loss0[:, s, r],
                grad_norm=grad_norm[:, s, r],
            )
            part, usable = contribute(algorithm, report)
            total = part.coef @ torch.where(usable[:, None], update, 0)
            sums = type(part.sums)(*(each.sum() for each in part.sums))
            x = self.x[s, :, r].reshape(-1)
            x, self.states[s, r], _ = advance(algorithm, x, state, total, sums, usable.sum())
            self.x[s, :, r] = x.view(self.x.shape[1], -1)
            self.left_out += int((~usable).sum())
        self.round += 1

    def metrics(self) -> list[list[dict[str, float | None]]]:
        """The metrics of every run under each seed, from the clients' accuracies on their test samples."""
        there = self.test > 0
        scores, losses = torch.full((2, len(there), *self.x.shape[::2]), torch.nan, dtype=torch.float64)
        for k in there.nonzero()[:, 0].tolist():
            begin = int(self.start[k] + self.train[k])
            inputs, labels = (each[begin : begin + int(self.test[k])] for each in (self.inputs, self.labels))
            outputs = torch.unflatten(inputs @ self.x.flatten(2), -1, self.x.shape[-2:])
            right = outputs.argmax(-1) == labels.argmax(-1)[:, None]
            scores[k] = 100 * right.double().mean(1)
            losses[k] = -(outputs.log_softmax(-1) * labels[:, None]).sum(-1).double().mean(1)
        return [
            [finite(fairness(scores[:, s, r], losses[:, s, r], self.test)) for s in range(len(self.seeds))]
            for r in range(len(self.runs))
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", nargs="+", default=list(algorithms.PAPER))
    parser.add_argument("--solvers", nargs="+", default=["momentum", "nesterov"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    torch.set_num_threads(1)
    task = setups.task("synthetic")
    runs: list[tuple[Any, str]] = [
        (algorithms.build(name), start) for name, start in product(o.algorithms, STARTS)
    ]
    rows, began = [], time.perf_counter()
    seconds: dict[str, float] = {}
    for name in o.solvers:
        simulation = KeptMomentum(task, settings_of("synthetic", solver=name).solver, runs, o.seeds)
        while simulation.round < o.rounds:
            simulation.step()
            if simulation.round % 100 == 0 or simulation.round == o.rounds:
                print(f"{name}, round {simulation.round}, {time.perf_counter() - began:.0f} s", flush=True)
                found = simulation.metrics()
                for (algorithm, start), by_seed in zip(runs, found, strict=True):
                    row = {metric: over_seeds([each[metric] for each in by_seed]) for metric in REPORTED}
                    values = " ".join(f"{metric} {value['mean']:.1f}" for metric, value in row.items())
                    print(f"  {algorithm.name} {start}: {values}", flush=True)
        rows += [
            {
                "algorithm": algorithm.name,
                "solver": name,
                "start": start,
                **{metric: over_seeds([each[metric] for each in by_seed]) for metric in REPORTED},
            }
            for (algorithm, start), by_seed in zip(runs, found, strict=True)
        ]
        seconds[name] = round(time.perf_counter() - began - sum(seconds.values()), 1)
        print(f"{name}: {simulation.left_out} reports left out")
    if o.json:
        about = {
            "setup": "synthetic",
            "seeds": o.seeds,
            "rounds": o.rounds,
            "seconds": seconds,
            "command": f"python {shlex.join(sys.argv)}",
            "environment": environment("cpu"),
        }
        o.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
