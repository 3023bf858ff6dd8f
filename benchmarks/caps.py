"""What the bounds of a real federation's server cost honest clients: training with and without them.

    python benchmarks/caps.py [--tasks synthetic synthetic-li:clients=30] [--seeds 1 2] [--json FILE]

The bounds were chosen on Synthetic with seed 0, and are judged here on what they were not chosen on. The
simulator trains all clients. Its server asks an `exchange.Aggregator`, which is told every client's report,
by how much the contribution of each is cut.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairwind import algorithms, setups
from fairwind.contract import Algorithm, Cohort, CohortAlgorithm, Report
from fairwind.engine.executor import Run
from fairwind.engine.layout import Layout
from fairwind.engine.simulation import Simulation
from fairwind.exchange import Aggregator, Bounds, Reply
from fairwind.runs.environment import environment
from fairwind.runs.recipe import settings_of
from fairwind.runs.schema import Metric

ALGORITHMS = "fedavg", "adafedadam"
SHOWN: tuple[Metric, ...] = "avg", "std", "worst30"


class CappedServer:
    """An algorithm whose clients are bounded and capped as a real federation's server does it."""

    def __init__(self, algorithm: Algorithm[Any, Any], bounds: Bounds):
        self.algorithm = algorithm
        # Shares depend on how long updates are, not on where they point: a number stands for each of them.
        layout = Layout((("length",),), (torch.Size([1]),), ((1,),), torch.float64)
        asked = algorithm._replace(server=self._take_sums)
        self.server = Aggregator(asked, layout, torch.zeros(1, dtype=torch.float64), bounds=bounds)
        self.sums: Any = None  # of the round, as they are after the cap
        self.capped: dict[str, int] = {}  # by client: rounds in which it was

    def _take_sums(self, x: Tensor, state: Any, total: Tensor, sums: Any) -> tuple[Tensor, Any]:
        self.sums = sums
        return x, state

    def as_algorithm(self) -> CohortAlgorithm[Any]:
        """The same for the simulator."""
        algorithm = self.algorithm

        def server(x: Tensor, state: Any, total: Tensor) -> tuple[Tensor, Any]:
            return algorithm.server(x, state, total, self.sums)

        def init(x: Tensor, clients: int) -> Any:
            return algorithm.init(x)

        return CohortAlgorithm(init, self._weigh, server, algorithm.probe, name=algorithm.name)

    def _weigh(self, state: Any, cohort: Cohort) -> tuple[Tensor, Any]:
        coef = self.algorithm.client(cohort.report).coef.double()
        if len(cohort.client) == 1:  # the simulator asks what is needed of a report
            return coef, state
        names = [str(int(k)) for k in cohort.client]
        for k, name in enumerate(names):
            why = self.server.accept(name, self._reply(Report(*(field[k] for field in cohort.report))))
            assert not why, why
        done = self.server.finish()
        assert not done.bounded, "coefficients are those of reports as they are"
        for name in {name for each in done.capped.values() for name in each}:
            self.capped[name] = self.capped.get(name, 0) + 1
        factors = [done.capped.get(what, {}) for what in ("weight", "update")]
        cut = [factors[0].get(name, 1.0) * factors[1].get(name, 1.0) for name in names]
        return coef * torch.tensor(cut, dtype=torch.float64), state

    def _reply(self, report: Report) -> Reply:
        form = self.server.form
        numbers = {name: float(getattr(report, name)) for name in (*form.numbers, *form.optional)}
        return Reply({"length": np.array([float(report.update_norm)])}, numbers)


def label(spec: str, capped: bool) -> str:
    """What a run is called; the simulator knows runs by their names."""
    return f"{spec}, bounded" if capped else spec


def measured(setup: str, seeds: list[int], rounds: int) -> list[dict[str, Any]]:
    """All runs of a setup, which train together."""
    task = setups.task(setup)
    cases = [(spec, seed, capped) for spec in ALGORITHMS for seed in seeds for capped in (True, False)]
    runs, servers = [], []
    for spec, seed, capped in cases:
        built = algorithms.build(spec)
        assert isinstance(built, Algorithm)
        servers.append(CappedServer(built, Bounds()) if capped else None)
        trained = servers[-1].as_algorithm() if servers[-1] else built
        runs.append(Run(label(spec, capped), trained, seed))
    settings = settings_of(setup, rounds=rounds, eval_every=rounds, device="cpu")
    simulation = Simulation(task.model, task.federation, runs, settings)
    simulation.run()
    rows = []
    last = {(line["algorithm"], line["seed"]): line for line in simulation.history[-len(runs) :]}
    for (spec, seed, capped), server in zip(cases, servers, strict=True):
        line = last[label(spec, capped), seed]
        row = {"setup": setup, "clients": len(task.federation), "algorithm": spec, "seed": seed}
        row["bounds"] = server is not None
        row |= {name: line[name] for name in SHOWN}
        if server is not None:
            row["capped_a_round"] = sum(server.capped.values()) / rounds
            row["capped_ever"] = len(server.capped)
        rows.append(row)
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["synthetic", "synthetic-li:clients=30"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    found: list[dict[str, Any]] = []
    for task in o.tasks:
        found += measured(task, o.seeds, o.rounds)
        if o.json:
            about = {"environment": environment("cpu"), "rounds": o.rounds, "runs": found}
            o.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
