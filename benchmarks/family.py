"""What a round of each algorithm costs, against FedAvg's.

    python benchmarks/family.py [fedprox scaffold …] [--task femnist] [--json FILE]

Each algorithm trains alone, one run, all clients, compiled as `compile="on"` does; rounds of FedAvg and of
the others are taken in turn. Ratios are medians over neighbouring measurements.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from engine import cost
from fairwind import Settings, algorithms
from fairwind.engine.executor import Run
from fairwind.engine.simulation import Simulation
from fairwind.runs.environment import environment
from tasks import TASKS


def simulation(task: str, name: str, clients: int, device: str) -> Simulation:
    made = TASKS[task]
    settings = Settings(
        rounds=10**9, eval_every=10**9, solver=made.solver, device=device, compile="on", precision="float32"
    )
    runs = [Run(name, algorithms.build(name), 0)]
    found = Simulation(made.model, made.data(clients), runs, settings)
    for _ in range(3):  # compiles
        found.step()
    return found


def measure(task: str, names: list[str], clients: int, repeats: int, device: str) -> list[dict[str, Any]]:
    plain = simulation(task, "fedavg", clients, device)
    rounds = max(1, min(100, int(0.5 / (cost(plain, 1) * plain.client_steps / plain.round))))
    found = []
    for name in names:
        other = simulation(task, name, clients, device)
        pairs = [(cost(plain, rounds), cost(other, rounds)) for _ in range(repeats)]
        ratios = sorted(b / a for a, b in pairs)
        steps = plain.client_steps / plain.round
        result = {
            "algorithm": name,
            "task": TASKS[task].title,
            "clients": clients,
            "rounds": rounds,
            "ratio": statistics.median(ratios),
            "low": ratios[0],
            "high": ratios[-1],
            "fedavg_ms": 1e3 * steps * statistics.median(a for a, _ in pairs),
            "round_ms": 1e3 * steps * statistics.median(b for _, b in pairs),
        }
        found.append(result)
        print(
            f"{name:12s} {result['ratio']:.2f}× FedAvg ({result['low']:.2f} to {result['high']:.2f}; "
            f"{result['fedavg_ms']:.1f} → {result['round_ms']:.1f} ms a round)",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("algorithms", nargs="*", help="all, if none is named")
    parser.add_argument("--task", default="synthetic", choices=["synthetic", "femnist"])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="where the numbers go as well")
    o = parser.parse_args()
    made_with = environment(o.device)
    print(", ".join(f"{k} {v}" for k, v in made_with.items() if v))
    names = o.algorithms or [name for name in algorithms.REGISTRY if name != "fedavg"]
    results = measure(o.task, names, o.clients, o.repeats, o.device)
    if o.json:
        o.json.write_text(json.dumps({"environment": made_with, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
