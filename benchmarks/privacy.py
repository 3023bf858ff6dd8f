"""What differential privacy for whole clients costs in average and worst 30 %, on Synthetic.

    python benchmarks/privacy.py [--clients 100] [--rounds 200] [--noise 0 5 10 20] [--seeds 0 1 2] [--json F]

All clients take part in every round. The rounds are the simulator's, which trains the clients of all runs at
once; contributions are clipped, and sums noised, by the same functions as a real federation's server uses
(`fairwind.exchange.Privacy`). Noise is drawn from a seed here, so that numbers can be made again.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairwind import algorithms, setups
from fairwind.contract import Algorithm, Contribution, Report
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.exchange import Privacy
from fairwind.exchange.accounting import Accountant
from fairwind.runs.environment import environment
from fairwind.runs.recipe import settings_of
from fairwind.runs.schema import Metric

# Public bounds, chosen knowing Synthetic. Noise is as large as they are, so that of the weight is small: half
# of the clients have 18 samples or fewer. The others are near what a median client has at first.
BOUNDS: dict[str, dict[str, float]] = {
    "fedavg": {"clip": 0.2, "weight": 10.0},
    "adafedadam": {"clip": 8.0, "weight": 5.0, "further": 2.0},
}
MEASURED: tuple[Metric, ...] = "avg", "worst30"


def private(algorithm: Algorithm[Any, Any], make: Callable[[], Privacy]) -> Algorithm[Any, Any]:
    """The algorithm with clipped clients and a server that sees noisy sums; noise begins with training."""
    privacy = make()

    def init(x: Tensor) -> Any:
        nonlocal privacy
        privacy = make()
        return algorithm.init(x)

    def client(r: Report) -> Contribution[Any]:
        part = algorithm.client(r)
        scales, limit = privacy.scales(len(part.sums)), privacy.limit(len(part.sums))
        fields = (part.coef * r.update_norm, *part.sums)
        scaled = torch.stack([each / scale for each, scale in zip(fields, scales, strict=True)])
        factor = (limit / scaled.norm(dim=0)).clamp(max=1)
        return Contribution(part.coef * factor, type(part.sums)(*(s * factor for s in part.sums)))

    def server(x: Tensor, state: Any, total: Tensor, sums: Any) -> tuple[Tensor, Any]:
        total, noisy = privacy.noised(total, tuple(map(float, sums)))
        if not privacy.is_clear(noisy):
            return x, state
        told = type(sums)(*(torch.tensor(s, dtype=torch.float64) for s in noisy))
        return algorithm.server(x, state, total, told)

    return algorithm._replace(init=init, client=client, server=server, name=f"{algorithm.name} private")


def seeded(key: str, noise: float, delta: float, bounds: Mapping[str, float]) -> Callable[[], Privacy]:
    """Makes the same privacy each time, whose noise begins anew."""

    def make() -> Privacy:
        return Privacy(noise=noise, delta=delta, draw=random.Random(key).randbytes, **bounds)

    return make


def runs_of(
    noises: Iterable[float], seeds: Iterable[int], delta: float
) -> dict[tuple[str, float | None], Any]:
    """By algorithm and noise (None is no privacy): its settings, and a run for each seed."""
    found: dict[tuple[str, float | None], Any] = {}
    seeds = list(seeds)
    for name, bounds in BOUNDS.items():
        plain = algorithms.build(name)
        assert isinstance(plain, Algorithm)
        found[name, None] = None, [Run(name, plain, seed) for seed in seeds]
        for noise in noises:
            runs = []
            for seed in seeds:
                made = seeded(f"{name} {noise} {seed}", noise, delta, bounds)
                runs.append(Run(f"{name} noise {noise}", private(plain, made), seed))
            found[name, noise] = made(), runs
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--noise", type=float, nargs="+", default=[0, 5, 10, 20])
    parser.add_argument("--delta", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    setup = f"synthetic:clients={o.clients}"
    task = setups.task(setup, setups.WHERE)
    planned = runs_of(o.noise, o.seeds, o.delta)
    runs = [run for _, each in planned.values() for run in each]
    settings = settings_of(setup, rounds=o.rounds, eval_every=o.rounds, device="cpu")
    began = time.monotonic()
    simulation = Simulation(task.model, task.federation, runs, settings)
    simulation.run()
    seconds = time.monotonic() - began
    last = {(line["algorithm"], line["seed"]): line for line in simulation.history}
    rows = []
    for (name, noise), (privacy, mine) in planned.items():
        row: dict[str, Any] = {"algorithm": name, "noise": noise}
        if privacy is not None:
            row["privacy"] = Accountant(privacy, [(1, 1, o.rounds)]).described()
        for metric in MEASURED:
            lines = [last[run.label, run.seed] for run in mine]
            values = [value for line in lines if (value := line[metric]) is not None]
            row[metric] = statistics.mean(values)
            row[f"{metric}_by_seed"] = values
        rows.append(row)
        epsilon = row["privacy"]["epsilon"] if privacy is not None else None
        print(f"{name:12} noise {noise} ε {epsilon} average {row['avg']:.1f} worst 30 % {row['worst30']:.1f}")
    print(f"{seconds:.0f} s")
    if o.json:
        about = {"setup": setup, "rounds": o.rounds, "seeds": o.seeds, "seconds": seconds}
        found = {**about, "environment": environment("cpu"), "rows": rows}
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
