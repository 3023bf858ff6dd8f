"""What the bounds of a real federation's server cost honest clients: training with and without them.

    python benchmarks/caps.py [--tasks synthetic synthetic-li:clients=30] [--seeds 1 2] [--json FILE]

The bounds were chosen on Synthetic with seed 0, and are judged here on what they were not chosen on. The
simulator trains with the same limits on weights, lengths and sums (`defence="bounds"`).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from fairwind import algorithms, setups
from fairwind.aggregation import contribute
from fairwind.contract import SumAlgorithm
from fairwind.engine.executor import Run
from fairwind.engine.round_updates import RoundUpdates
from fairwind.engine.simulation import Simulation
from fairwind.robust.limits import Limits, factors, size_of
from fairwind.runs.environment import environment
from fairwind.runs.recipe import settings_of
from fairwind.runs.schema import Metric

ALGORITHMS = "fedavg", "adafedadam"
SHOWN: tuple[Metric, ...] = "avg", "std", "worst30"


class Counting(Simulation):
    """A simulation that counts whose contributions are cut."""

    cut: dict[int, list[int]]  # by run, the clients that were cut in each round

    def _stepped_lying(
        self, r: int, algorithm: SumAlgorithm, held: RoundUpdates
    ) -> tuple[Tensor, Any, Tensor]:
        part, _ = contribute(algorithm, held.cohort().report)
        pulls = part.coef.abs() * held.cohort().report.update_norm
        sums = zip(*(each.tolist() for each in part.sums), strict=True)
        sizes = [size_of(pull, own) for pull, own in zip(pulls.tolist(), sums, strict=True)]
        found = factors(sizes, Limits())
        self.cut.setdefault(r, []).append(sum(min(f.weight, f.update, *f.further) < 1 for f in found))
        return super()._stepped_lying(r, algorithm, held)


def measured(setup: str, seeds: list[int], rounds: int) -> list[dict[str, Any]]:
    """All runs of a setup."""
    task = setups.task(setup)
    cases = [(spec, seed) for spec in ALGORITHMS for seed in seeds]
    rows = []
    for defence in ("bounds", None):
        runs = [Run(spec, algorithms.build(spec), seed) for spec, seed in cases]
        settings = settings_of(setup, rounds=rounds, eval_every=rounds, device="cpu", defence=defence)
        simulation = Counting(task.model, task.federation, runs, settings)
        simulation.cut = {}
        simulation.run()
        for r, ((spec, seed), line) in enumerate(zip(cases, simulation.final().lines, strict=True)):
            row = {"setup": setup, "clients": len(task.federation), "algorithm": spec, "seed": seed}
            row |= {"bounds": defence is not None} | {name: line[name] for name in SHOWN}
            if defence is not None:
                row["capped_a_round"] = sum(simulation.cut[r]) / rounds
            rows.append(row)
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["synthetic", "synthetic-li:clients=30"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    found: list[dict[str, Any]] = []
    for task in o.tasks:
        found += measured(task, o.seeds, o.rounds)
        if o.json:
            about = {"environment": environment("cpu"), "rounds": o.rounds, "runs": found}
            o.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
