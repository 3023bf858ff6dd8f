"""What α does to clients' training losses, and whether their test losses follow.

    python benchmarks/lag.py [--alphas 0 1 2 4 8] [--seeds 0 1 2] --json results/alpha/lag.json

AdaFedAdam weighs a client by I^α, I its training loss over its first one. Printed are, over clients and as
means over seeds, the mean of I, its mean over the 30 % of clients that lag most, and its relative standard
deviation; then mean and worst 30 % of the test loss.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from fairwind import algorithms, setups
from fairwind.engine.evaluation import client_scores, split
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.metrics import worst_mean
from fairwind.runs.environment import environment
from fairwind.runs.recipe import settings_of


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setup", default="synthetic")
    parser.add_argument("--alphas", nargs="+", default=["0", "1", "2", "4", "8"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    task = setups.task(o.setup, setups.Where(cache=o.cache))
    specs = [f"adafedadam:alpha={alpha}" for alpha in o.alphas]
    runs = [Run(spec, algorithms.build(spec), seed) for spec in specs for seed in o.seeds]
    simulation = Simulation(task.model, task.federation, runs, settings_of(o.setup, eval_every=1000))
    simulation.run()
    train = split(simulation.federation, "train")
    losses, *_ = client_scores(
        simulation.plain, simulation.federation, simulation.x, *train, simulation.ranks
    )
    lag = (losses / simulation.loss0).cpu().numpy()
    test = simulation.loss[:, simulation.federation.test.cpu() > 0].numpy()
    rows = []
    for i, spec in enumerate(specs):
        mine = slice(i * len(o.seeds), (i + 1) * len(o.seeds))
        row = {
            "lag": float(lag[mine].mean()),
            "lag_worst30": float(np.mean([-worst_mean(-each) for each in lag[mine]])),
            "lag_rsd": float((lag[mine].std(1) / lag[mine].mean(1)).mean()),
            "test_loss": float(test[mine].mean()),
            "test_loss_worst30": float(np.mean([-worst_mean(-each) for each in test[mine]])),
        }
        rows.append({"algorithm": spec, **row})
        print(spec, " ".join(f"{name} {value:.3f}" for name, value in row.items()))
    if o.json:
        about = {"setup": o.setup, "seeds": o.seeds, "rounds": simulation.round}
        found = {**about, "environment": environment(simulation.settings.device), "rows": rows}
        o.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
