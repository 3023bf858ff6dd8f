"""How much slower a round is while two other programs keep the cores busy.

    python benchmarks/busy.py [--json FILE]

Rounds of Synthetic, AdaFedAdam with one run and five algorithms with 15 runs, in turn on an otherwise idle
machine and beside as many programs, each busy in a loop, as it may use cores. A program's fair share is then
half of the machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine import cohorts
from fairwind import Settings
from fairwind.engine.simulation import Simulation
from fairwind.engine.workers import cores
from fairwind.runs.environment import environment
from tasks import TASKS


@contextmanager
def busy(programs: int) -> Iterator[None]:
    """So many programs that do nothing but compute."""
    loop = "while True: sum(range(10000))"
    started = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(programs)]
    time.sleep(0.5)
    try:
        yield
    finally:
        for program in started:
            program.kill()
            program.wait()


def milliseconds(simulation: Simulation, seconds: float = 3.0) -> float:
    """Of a round and run: the mean over some seconds, since a busy machine serves in turns."""
    rounds, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < seconds:
        simulation.step()
        rounds += 1
    return 1e3 * taken / rounds / len(simulation.runs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=argparse.FileType("w"), help="where the numbers go as well")
    o = parser.parse_args()
    made_with, task = environment("cpu"), TASKS["synthetic"]
    print(", ".join(f"{k} {v}" for k, v in made_with.items() if v))
    settings = Settings(rounds=10**9, eval_every=10**9, solver=task.solver, device="cpu", compile="on")
    results: list[dict[str, Any]] = []
    for title, runs in cohorts().items():
        simulation = Simulation(task.model, task.data(task.few), runs, settings)
        milliseconds(simulation)
        pairs = []
        for _ in range(o.repeats):
            idle = milliseconds(simulation)
            with busy(cores()):
                pairs.append((idle, milliseconds(simulation)))
        ratios = [loaded / idle for idle, loaded in pairs]
        idle, loaded = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        ratio = statistics.median(ratios)
        results.append(
            {"runs": len(runs), "idle_ms": idle, "busy_ms": loaded, "ratio": ratio, "pairs": pairs}
        )
        print(f"{title}: {idle:.2f} ms a round and run idle, {loaded:.2f} busy, {ratio:.2f}×", flush=True)
    if o.json:
        json.dump({"environment": made_with, "results": results}, o.json, indent=1)


if __name__ == "__main__":
    main()
