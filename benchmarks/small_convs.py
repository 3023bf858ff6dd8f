"""Small convolutional networks on a CPU, against a plain loop.

    python benchmarks/small_convs.py [--engine auto] [--clock process] [--json numbers.json] [names …]

Two convolutions of 3×3, each with ReLU and max pooling, and a dense layer; 24 clients of 60 to 140 samples,
batches of 10, FedAvg. The loop is as in benchmarks/engine.py, with the number of threads that suits it best,
PyTorch's fused SGD and its fused cross-entropy. Both run in one process and in turn, and ratios are medians
over neighbouring measurements. On a busy machine, `--clock process` compares processor time instead of wall
time, with one thread in the loop: it does not say what either gains from a second core.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import CLOCKS, Clock, Loop, cost, taken
from fairwind import Settings, algorithms
from fairwind.engine.executor import Run
from fairwind.engine.settings import Engine
from fairwind.engine.simulation import Simulation
from fairwind.runs.environment import environment
from tasks import Task, small_convolutions

SECONDS = 0.5  # of a measurement, about
SIZES = {"1-8-16": (1, 8, 16, 28), "1-16-32": (1, 16, 32, 28), "3-32-64": (3, 32, 64, 32)}


class FusedLoop(Loop):
    """The plain loop with fused SGD."""

    optimizer = staticmethod(partial(torch.optim.SGD, fused=True))


def measure(task: Task, engine: Engine, rounds: int, repeats: int, clock: Clock) -> dict[str, Any]:
    data = task.data(task.few)
    settings = Settings(
        rounds=rounds,
        eval_every=rounds,
        solver=task.solver,
        engine=engine,
        device="cpu",
        precision="float32",
    )
    ours = Simulation(task.model, data, [Run("fedavg", algorithms.fedavg(), 0)], settings)
    loop = FusedLoop(task, data, settings, clock)
    ours.step()
    times = max(1, round(SECONDS / taken(ours.step, clock)))
    pairs = [(loop.cost(["none"]), cost(ours, times, clock)) for _ in range(repeats)]
    ratios = [slow / fast for slow, fast in pairs]
    return {
        "network": task.title,
        "parameters": ours.layout.parameters,
        "engine": ours.plan.order,
        "convolutions": ours.plan.convolutions.value,
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "loop_us": 1e6 * statistics.median(slow for slow, _ in pairs),
        "loop_threads": loop.threads,
        "ours_us": 1e6 * statistics.median(fast for _, fast in pairs),
        "workers": ours.plan.workers.value,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"{', '.join(SIZES)}; all, if none is named")
    parser.add_argument("--engine", default="auto", choices=["auto", "loop", "stacked"])
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS))
    parser.add_argument("--rounds", type=int, default=1000, help="for which a plan is made")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    if o.clock == "process":
        torch.set_num_threads(1)  # with which the loop takes least
    results = []
    for name in o.names or SIZES:
        task = small_convolutions(*SIZES[name])
        found = measure(task, o.engine, o.rounds, o.repeats, CLOCKS[o.clock])
        results.append(found)
        print(
            f"{name:10}{found['ratio']:5.2f}× ({found['low']:.2f} to {found['high']:.2f}; "
            f"{found['loop_us']:.0f} → {found['ours_us']:.0f} µs a client step; {found['loop_threads']} "
            f"threads of the loop, {found['workers']} workers)  {found['engine']}",
            flush=True,
        )
        if o.json:
            content = {
                "environment": environment("cpu"),
                "clock": o.clock,
                "repeats": o.repeats,
                "results": results,
            }
            o.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
