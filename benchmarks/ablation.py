"""What each special path gains on a CPU: the same work with and without it, in turn, in one process.

    python benchmarks/ablation.py [NAMES] [--repeats 5] [--json benchmarks/results/ablation-cpu.json]

A path that gains less than 1.15 times on the work that it was made for is to go. Paths of a GPU have no
entry here: what was recorded there is in benchmarks/results/engine-h200.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from engine import cost, taken
from fairwind import Settings, algorithms
from fairwind.engine.executor import Run
from fairwind.engine.plan import Decision
from fairwind.engine.simulation import Simulation
from fairwind.engine.stacked.model import StackedModel
from fairwind.runs.environment import environment
from tasks import TASKS

SECONDS = 1.5  # of a measurement, about


@contextmanager
def stored_gradients_stacked() -> Iterator[None]:
    def dense(*given: Any, **options: Any) -> StackedModel:
        return StackedModel(*given, **{**options, "factored": False})

    with patch("fairwind.engine.plan.StackedModel", dense):
        yield


@contextmanager
def stored_gradients_in_the_loop() -> Iterator[None]:
    with patch("fairwind.engine.loop.learner.factored", lambda module: []):
        yield


@contextmanager
def no_handwritten_steps() -> Iterator[None]:
    with patch("fairwind.engine.backends.backend.has_handwritten_step", lambda *given: False):
        yield


@contextmanager
def whole_server_steps() -> Iterator[None]:
    with patch("fairwind.engine.server.is_elementwise", lambda *given: False):
        yield


@contextmanager
def counters_by_torch() -> Iterator[None]:
    with patch("fairwind.data.counter.BY_NUMPY", ()):
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    with patch("fairwind.engine.builder.loop_threads", lambda *given: (Decision(1, ""), Decision(1, ""))):
        yield


class Ablation(NamedTuple):
    """A special path, and the work that it was made for."""

    what: str
    without: Callable[[], Any] | None  # None: without compiled steps
    task: str
    runs: Sequence[str]
    seeds: int = 1
    compile: str = "off"
    engine: str = "auto"


PAPER = tuple(algorithms.PAPER)
PATHS = {
    "factored": Ablation(
        "factored gradients, stacked, compiled", stored_gradients_stacked, "femnist", ["adafedadam"], 1, "on"
    ),
    "factored-15": Ablation("the same, 15 runs", stored_gradients_stacked, "femnist", PAPER, 3, "on"),
    "factored-modified": Ablation(
        "the same, FedProx and SCAFFOLD",
        stored_gradients_stacked,
        "femnist",
        ["fedprox", "scaffold"],
        1,
        "on",
    ),
    "factored-eager": Ablation("the same, uncompiled", stored_gradients_stacked, "femnist", ["adafedadam"]),
    "factored-loop": Ablation(
        "factored gradients, loop", stored_gradients_in_the_loop, "leaf", ["adafedadam"], 1, "off", "loop"
    ),
    "classifier": Ablation(
        "hand-written C++ for linear classifiers", no_handwritten_steps, "synthetic", ["adafedadam"], 1, "on"
    ),
    "classifier-15": Ablation("the same, 15 runs", no_handwritten_steps, "synthetic", PAPER, 3, "on"),
    "compiled": Ablation("steps compiled ahead of time", None, "femnist", ["adafedadam"], 1, "on"),
    "server": Ablation(
        "the server's step in blocks", whole_server_steps, "leaf", ["adafedadam"], 1, "off", "loop"
    ),
    "numpy": Ablation(
        "counter-based random numbers by NumPy", counters_by_torch, "synthetic", ["adafedadam"], 1, "on"
    ),
    "threads": Ablation("threads of the loop", one_thread, "leaf", ["adafedadam"], 1, "off", "loop"),
    "workers": Ablation("worker threads of the loop", one_thread, "lstm", ["adafedadam"], 1, "off", "loop"),
}


def simulation(path: Ablation, *, compiled: str) -> Simulation:
    task = TASKS[path.task]
    settings = Settings(solver=task.solver, rounds=1000, compile=compiled, engine=path.engine, device="cpu")  # type: ignore[arg-type]
    runs = [Run(name, algorithms.build(name), seed) for name in path.runs for seed in range(path.seeds)]
    made = Simulation(task.model, task.data(task.few), runs, settings)
    for _ in range(2):
        made.step()
    return made


def measure(path: Ablation, repeats: int) -> dict[str, Any]:
    ours = simulation(path, compiled=path.compile)
    if path.without is None:
        other = simulation(path, compiled="off")
        within: Any = None
    else:
        within = path.without
        with within():
            other = simulation(path, compiled=path.compile)
    rounds = max(1, int(SECONDS / taken(ours.step)))
    pairs = []
    for _ in range(repeats):
        fast = cost(ours, rounds)
        if within is None:
            slow = cost(other, rounds)
        else:
            with within():
                slow = cost(other, rounds)
        pairs.append((slow, fast))
    ratios = [slow / fast for slow, fast in pairs]
    return {
        "what": path.what,
        "task": TASKS[path.task].title,
        "algorithms": list(path.runs),
        "runs": len(path.runs) * path.seeds,
        "plan": str(ours.plan.steps.value),
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
