"""What each special path gains on a CPU: the same work with and without it, in turn, in one process.

    python benchmarks/ablation.py [NAMES] [--repeats 5] [--json benchmarks/results/ablation-cpu.json]

A path is switched off in the execution plan. One that gains less than 1.15 times on the work that it was made
for is to go. Paths of a GPU have no entry here: what was recorded there is in benchmarks/results/engine-h200.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from engine import cost, taken
from fairwind import Settings, algorithms
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


PAPER = tuple(algorithms.PAPER)
ONE = ("adafedadam",)
DENSE, COMPILED = {"gradients": "dense"}, {"compile": "on"}
ONE_THREAD = {"workers": 1, "threads": 1}
LOOP = {"compile": "off", "engine": "loop"}
PATHS = {
    "factored": Ablation("factored gradients, compiled", DENSE, "femnist", ONE, 1, COMPILED),
    "factored-15": Ablation("the same, 15 runs", DENSE, "femnist", PAPER, 3, COMPILED),
    "factored-modified": Ablation(
        "the same, FedProx and SCAFFOLD", DENSE, "femnist", ("fedprox", "scaffold"), 1, COMPILED
    ),
    "factored-eager": Ablation("the same, uncompiled", DENSE, "femnist", ONE),
    "factored-loop": Ablation("factored gradients, loop", DENSE, "leaf", ONE, 1, LOOP),
    "classifier": Ablation(
        "hand-written steps of linear classifiers", {"steps": "ahead-of-time"}, "synthetic", ONE, 1, COMPILED
    ),
    "classifier-15": Ablation(
        "the same, 15 runs", {"steps": "ahead-of-time"}, "synthetic", PAPER, 3, COMPILED
    ),
    "compiled": Ablation("steps compiled ahead of time", {"steps": "eager"}, "femnist", ONE, 1, COMPILED),
    "threads": Ablation("threads of the loop", ONE_THREAD, "leaf", ONE, 1, LOOP),
    "workers": Ablation("worker threads of the loop", ONE_THREAD, "lstm", ONE, 1, LOOP),
}


def simulation(path: Ablation, plan: ExecutionPlan | None = None) -> Simulation:
    task = TASKS[path.task]
    settings = Settings(solver=task.solver, rounds=1000, device="cpu", **path.settings)
    runs = [Run(name, algorithms.build(name), seed) for name in path.runs for seed in range(path.seeds)]
    made = Simulation(task.model, task.data(task.few), runs, settings, plan=plan)
    for _ in range(2):
        made.step()
    return made


def measure(path: Ablation, repeats: int) -> dict[str, Any]:
    ours = simulation(path)
    switched: dict[str, Any] = {part: Decision(value, "ablation") for part, value in path.without.items()}
    other = simulation(path, ours.plan._replace(**switched))
    rounds = max(1, int(SECONDS / taken(ours.step)))
    pairs = [(cost(other, rounds), cost(ours, rounds)) for _ in range(repeats)]
    ratios = [slow / fast for slow, fast in pairs]
    return {
        "what": path.what,
        "task": TASKS[path.task].title,
        "algorithms": list(path.runs),
        "runs": len(path.runs) * path.seeds,
        "with": {part: getattr(ours.plan, part).value for part in path.without},
        "without": dict(path.without),
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "us": 1e6 * statistics.median(fast for _, fast in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(PATHS), metavar="NAME", help=", ".join(PATHS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    found = []
    for name in o.names:
        result = measure(PATHS[name], o.repeats)
        found.append({"name": name, **result})
        print(
            f"{result['what']} ({result['task']}, {result['runs']} runs): {result['ratio']:.2f}× "
            f"({result['low']:.2f} to {result['high']:.2f}), {result['us']:.1f} µs a client step",
            flush=True,
        )
    if o.json:
        content = {"environment": environment("cpu"), "repeats": o.repeats, "results": found}
        o.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
