"""What each special path gains: the same work with and without it, in turn, in one process.

    python benchmarks/ablation.py [NAMES] [--device cuda] [--repeats 5] [--json FILE]

A path is switched off in the execution plan; where layers choose, by the constant that decides it. One that
gains less than 1.15 times on the work that it was made for is to go.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from engine import CLOCKS, Clock, cost, taken
from fairwind import Settings, algorithms
from fairwind.engine import tuning
from fairwind.engine.executor import Run
from fairwind.engine.plan import Decision, ExecutionPlan
from fairwind.engine.simulation import Simulation
from fairwind.runs.environment import environment
from tasks import TASKS

SECONDS = 1.5  # of a measurement, about


class Ablation(NamedTuple):
    """A special path, and the work that it was made for."""

    what: str
    without: Mapping[str, str | int]  # parts of the plan, and what they are without it
    task: str
    runs: Sequence[str]
    seeds: int = 1
    settings: Mapping[str, Any] = MappingProxyType({"compile": "off"})
    constants: Mapping[str, Any] = MappingProxyType({})
    """Of `fairwind.engine.tuning`, and what they are without it."""


PAPER = tuple(algorithms.PAPER)
ONE = ("adafedadam",)
DENSE, COMPILED = {"gradients": "dense"}, {"compile": "on"}
ONE_THREAD = {"workers": 1, "threads": 1}
LOOP = {"compile": "off", "engine": "loop"}
NO_KERNELS = {"MIN_SHARED_MEMORY_BYTES": 1 << 60}
CPU = {
    "factored": Ablation("factored gradients, compiled", DENSE, "femnist", ONE, 1, COMPILED),
    "factored-15": Ablation("the same, 15 runs", DENSE, "femnist", PAPER, 3, COMPILED),
    "factored-modified": Ablation(
        "the same, FedProx and SCAFFOLD", DENSE, "femnist", ("fedprox", "scaffold"), 1, COMPILED
    ),
    "factored-eager": Ablation("the same, uncompiled", DENSE, "femnist", ONE),
    "classifier": Ablation(
        "hand-written steps of linear classifiers", {"steps": "ahead-of-time"}, "synthetic", ONE, 1, COMPILED
    ),
    "classifier-15": Ablation(
        "the same, 15 runs", {"steps": "ahead-of-time"}, "synthetic", PAPER, 3, COMPILED
    ),
    "compiled": Ablation("steps compiled ahead of time", {"steps": "eager"}, "femnist", ONE, 1, COMPILED),
    "threads": Ablation("threads of the loop", ONE_THREAD, "leaf", ONE, 1, LOOP),
    "workers": Ablation("worker threads of the loop", ONE_THREAD, "lstm", ONE, 1, LOOP),
    "channels-last": Ablation(
        "channels last in the loop", {"convolutions": "as called"}, "convolutions", ONE, 1, LOOP
    ),
    "channels-last-leaf": Ablation("the same", {"convolutions": "as called"}, "leaf", ONE, 1, LOOP),
    "convolutions": Ablation(
        "hand-written steps of convolutions",
        {"executor": "loop", "steps": "eager", "convolutions": "channels last"},
        "convolutions",
        ONE,
        1,
        COMPILED,
    ),
    "sort": Ablation("sorting by NumPy", {}, "synthetic", ONE, 1, COMPILED, {"NUMPY_SORTS": False}),
}
ROUNDS, STEPS, EAGER = {"graphs": "steps"}, {"graphs": "none"}, {"steps": "eager"}
GPU = {
    "graphs": Ablation("graphs of rounds, against graphs of steps", ROUNDS, "synthetic", ONE, 1, COMPILED),
    "graphs-15": Ablation("the same, 15 runs", ROUNDS, "synthetic", PAPER, 3, COMPILED),
    "graphs-femnist": Ablation("the same", ROUNDS, "femnist", ONE, 1, COMPILED),
    "step-graphs": Ablation("graphs, against none", STEPS, "synthetic", ONE, 1, COMPILED),
    "step-graphs-lstm": Ablation("the same", STEPS, "lstm", ONE),
    "step-graphs-leaf": Ablation("the same", STEPS, "leaf", ONE),
    "compiled": Ablation("steps compiled", EAGER, "femnist", ONE, 1, COMPILED),
    "lstm": Ablation("kernels for LSTM layers", {}, "lstm", ONE, constants=NO_KERNELS),
    "sent140": Ablation("the same", {}, "sent140", ONE, constants=NO_KERNELS),
    "convolutions": Ablation("kernels for convolutions", {}, "cifar10", ONE, constants=NO_KERNELS),
    "convolutions-bf16": Ablation(
        "the same, 16 bits", {}, "resnet", ONE, 1, {"compile": "off", "precision": "bf16"}, NO_KERNELS
    ),
    "host": Ablation("samples on the GPU", {"data": "host", "graphs": "steps"}, "femnist", ONE),
}
PATHS = {"cpu": CPU, "cuda": GPU}


@contextmanager
def changed(constants: Mapping[str, Any]) -> Iterator[None]:
    """Steps while constants of tuning are others."""
    before = {name: getattr(tuning, name) for name in constants}
    try:
        for name, value in constants.items():
            setattr(tuning, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(tuning, name, value)


def simulation(path: Ablation, device: str, plan: ExecutionPlan | None = None) -> Simulation:
    task = TASKS[path.task]
    settings = Settings(solver=task.solver, rounds=1000, device=device, **path.settings)
    runs = [Run(name, algorithms.build(name), seed) for name in path.runs for seed in range(path.seeds)]
    clients = task.few if device == "cpu" else task.clients
    made = Simulation(task.model, task.data(clients), runs, settings, plan=plan)
    for _ in range(3):  # builds, records
        made.step()
    return made


def measure(path: Ablation, device: str, repeats: int, clock: Clock) -> dict[str, Any]:
    ours = simulation(path, device)
    switched: dict[str, Any] = {part: Decision(value, "ablation") for part, value in path.without.items()}
    with changed(path.constants):
        other = simulation(path, device, ours.plan._replace(**switched))
        rounds = max(1, int(SECONDS / taken(other.step)))
    pairs = []
    for _ in range(repeats):
        with changed(path.constants):
            slow = cost(other, rounds, clock)
        pairs.append((slow, cost(ours, rounds, clock)))
    ratios = [slow / fast for slow, fast in pairs]
    return {
        "what": path.what,
        "task": TASKS[path.task].title,
        "algorithms": list(path.runs),
        "runs": len(path.runs) * path.seeds,
        "with": {part: getattr(ours.plan, part).value for part in path.without},
        "without": dict(path.without) or dict(path.constants),
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "us": 1e6 * statistics.median(fast for _, fast in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(CPU)}; on a GPU {', '.join(GPU)}"
    )
    parser.add_argument("--device", choices=list(PATHS), default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="process: on a busy machine")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    results = []
    for name in o.names or PATHS[o.device]:
        result = measure(PATHS[o.device][name], o.device, o.repeats, CLOCKS[o.clock])
        results.append({"name": name, **result})
        print(
            f"{result['what']} ({result['task']}, {result['runs']} runs): {result['ratio']:.2f}× "
            f"({result['low']:.2f} to {result['high']:.2f}), {result['us']:.1f} µs a client step",
            flush=True,
        )
        if o.json:
            content = {
                "environment": environment(o.device),
                "repeats": o.repeats,
                "clock": o.clock,
                "results": results,
            }
            o.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
