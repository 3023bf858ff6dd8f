"""Whether computing local steps less exactly changes results by more than another seed does.

    python benchmarks/precision.py femnist --rounds 200 [--precisions float32 tf32 bf16] [--device cuda]

Every algorithm is trained under every seed and in every precision. Printed are the final metrics' means over
seeds, their standard deviation over seeds, and how far a precision moved runs of the same seed in the mean.
Data is the setup's own as `fairwind data` prepared it, or a folder of per-client files (--folder).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from fairwind import Federation, Settings, algorithms, setups
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.runs.environment import environment
from fairwind.runs.schema import Metric
from fairwind.setups import Where

METRICS: dict[Metric, str] = {"avg": "average", "std": "STD", "worst30": "worst 30 %"}
EXACT = ("float32", "tf32", "bf16")  # the most exact first
Values = dict[str, torch.Tensor]  # of each metric, those of all runs (algorithms, seeds)


def final(setup: setups.Setup, data: Federation, runs: list[Run], settings: Settings, seeds: int) -> Values:
    """Each metric of each run at the end."""
    simulation = Simulation(lambda: setup.model(data), data, runs, settings)
    simulation.run()
    print(f"{settings.precision}: {settings.rounds} rounds in {simulation.seconds:.0f} s", flush=True)
    lines = simulation.history[-len(runs) :]
    values = {name: torch.tensor([line[name] for line in lines], dtype=torch.float64) for name in METRICS}
    return {name: v.view(-1, seeds) for name, v in values.items()}


def compared(found: dict[str, Values], names: list[str]) -> list[dict[str, Any]]:
    """Every metric of every algorithm, beside its most exact."""
    exact, *others = sorted(found, key=EXACT.index)
    lines = []
    for a, name in enumerate(names):
        for metric in METRICS:
            values = {p: v[metric][a] for p, v in found.items()}
            line = {
                "algorithm": name,
                "metric": metric,
                "values": {p: v.tolist() for p, v in values.items()},
                "mean": {p: float(v.mean()) for p, v in values.items()},
                "over_seeds": float(values[exact].std()),
                "moved": {p: float((values[p] - values[exact]).abs().mean()) for p in others},
            }
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("setup")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--precisions", nargs="+", default=EXACT, choices=EXACT)
    parser.add_argument("--algorithms", nargs="+", default=list(algorithms.PAPER))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--json", type=Path, help="where the numbers go as well, after each precision")
    o = parser.parse_args()
    if o.json:
        o.json.touch()  # if it cannot be written, better now
    setup = setups.find(o.setup)
    data = Federation.from_folder(o.folder) if o.folder else setups.federation(o.setup, Where(cache=o.cache))
    print(data)
    runs = [Run(name, algorithms.build(name), seed) for name in o.algorithms for seed in o.seeds]
    found: dict[str, Values] = {}
    for precision in o.precisions:
        settings = Settings(
            rounds=o.rounds,
            eval_every=o.rounds,
            solver=setup.solver,
            device=o.device,
            compile=o.compile,
            precision=precision,
        )
        found[precision] = final(setup, data, runs, settings, len(o.seeds))
        lines = compared(found, o.algorithms)
        if o.json:
            given = {"setup": o.setup, "rounds": o.rounds, "seeds": o.seeds, "data": str(data)}
            text = json.dumps({"environment": environment(o.device), **given, "results": lines}, indent=1)
            o.json.write_text(text + "\n")
    for line in lines:
        means = "  ".join(f"{p} {m:6.2f}" for p, m in line["mean"].items())
        moved = "  ".join(f"{p} {m:5.2f}" for p, m in line["moved"].items())
        print(
            f"{line['algorithm']:12s} {METRICS[line['metric']]:10s} {means} | "
            f"over seeds ±{line['over_seeds']:.2f} | moved by {moved}"
        )


if __name__ == "__main__":
    main()
