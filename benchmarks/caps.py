"""What the server's bounds cost honest clients: training with and without them.

    python benchmarks/caps.py [--tasks synthetic synthetic-li:clients=30] [--seeds 1 2] [--json FILE]

The bounds were chosen on Synthetic with seed 0, and are judged here on what they were not chosen on. Clients
and server are those of a real federation (`fairwind.exchange`), without a network. Where nothing was bounded
or capped, training without bounds is the same, and is not done again.
"""

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import fairwind
from fairwind import Settings, algorithms
from fairwind.environment import environment
from fairwind.exchange import UNBOUNDED, Aggregator, Bounds, Evaluations, LocalClient

ALGORITHMS = "fedavg", "adafedadam"
SHOWN = "avg", "std", "worst30"


def trained(setup: str, seed: int, spec: str, bounds: Bounds, rounds: int) -> dict[str, Any]:
    """How the model of so many rounds serves the clients, and how often these were bounded or capped."""
    torch.set_num_threads(1)
    task, algorithm = fairwind.setup(setup), algorithms.build(spec)
    settings = Settings(solver=task.solver, workers=1, engine="loop", compile="off", device="cpu")
    count = len(task.federation)
    clients = {str(k): LocalClient(task, algorithm, k, seed=seed, settings=settings) for k in range(count)}
    server = Aggregator(algorithm, clients["0"].layout, clients["0"].start(), bounds=bounds)
    first_losses: dict[str, float | None] = {}
    capped: dict[str, int] = {}  # by client: rounds in which it was
    bounded: dict[str, int] = {}
    began = time.perf_counter()
    for number in range(rounds):
        weights = server.weights()
        for name, client in clients.items():
            done = client.train(weights, number, first_loss=first_losses.get(name))
            first_losses[name] = done.first_loss
            why = server.accept(name, done.reply)
            assert not why, why
        told = server.finish()
        assert told.moved
        for name in {name for each in told.capped.values() for name in each}:
            capped[name] = capped.get(name, 0) + 1
        for name in told.bounded:
            bounded[name] = bounded.get(name, 0) + 1
    weights = server.weights()
    judged = {name: client.evaluate(weights) for name, client in clients.items()}
    line = Evaluations(clients["0"].scores, spec, seed).add(rounds, judged, {})
    return {
        "setup": setup,
        "seed": seed,
        "algorithm": spec,
        "bounds": bounds != UNBOUNDED,
        "clients": count,
        **{name: line[name] for name in SHOWN},
        "capped_a_round": sum(capped.values()) / rounds,
        "capped_ever": len(capped),
        "bounded_a_round": sum(bounded.values()) / rounds,
        "seconds": time.perf_counter() - began,
    }


def both(setup: str, seed: int, spec: str, rounds: int) -> list[dict[str, Any]]:
    """With bounds, and without."""
    on = trained(setup, seed, spec, Bounds(), rounds)
    if on["capped_a_round"] or on["bounded_a_round"]:
        return [on, trained(setup, seed, spec, UNBOUNDED, rounds)]
    return [on, {**on, "bounds": False, "seconds": 0.0}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["synthetic", "synthetic-li:clients=30"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2, help="processes that train at once")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    cases = [(task, seed, spec) for task in o.tasks for seed in o.seeds for spec in ALGORITHMS]
    rows = []
    with ProcessPoolExecutor(o.workers) as pool:
        for found in [pool.submit(both, *case, o.rounds) for case in cases]:
            for row in found.result():
                rows.append(row)
                print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            if o.json:
                about = {"environment": environment("cpu"), "rounds": o.rounds, "runs": rows}
                o.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
