"""Clients that lie: attacks on Synthetic against each defence, and against Flower's own strategies.

    python benchmarks/liars.py [--rounds 100] [--seeds 0 1 2] [--shares 0 0.1 0.2 0.3 0.4] [--json F]

Of 20 clients some lie; numbers are of the others. A seed determines the first model, the order of batches and
who lies. Fairwind's runs are `compare(…, attack=…, defence=…)`. Flower's strategies aggregate the same lying
clients' models in this process, without a network, and the next round begins from what they return.
"""

import argparse
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairwind import algorithms, setups
from fairwind.aggregation import contribute
from fairwind.contract import SumAlgorithm
from fairwind.data.counter import fold
from fairwind.engine.executor import Run
from fairwind.engine.round_updates import RoundUpdates
from fairwind.engine.simulation import Simulation
from fairwind.robust.attacks import build_attack
from fairwind.robust.defence import build_defence
from fairwind.runs.environment import environment
from fairwind.runs.recipe import settings_of
from fairwind.runs.schema import Metric

SETUP = "synthetic:clients=20"
ALGORITHMS = "fedavg", "adafedadam"
ALL_ATTACKS = 0.3  # the share of liars under which every attack is tried; the first two under all shares
ATTACKS = {
    "sign-flip": "signflip",
    "inflated": "inflated",
    "a little is enough": "alie",
    "noise": "noise",
    "label flip": "labelflip",
    "targeted label flip": "labelflip:source=1,target=7",
}
DEFENCES: dict[str, str | None] = {
    "none": None,
    "bounds": "bounds",
    "trimmed": "trimmed:cut=0.3",
    "median": "median",
    "multikrum": "multikrum:liars=0.3",
    "geometric": "geometric",
    "clipping": "clipping",
}
SHOWN: tuple[Metric, ...] = "avg", "worst30"


def flower_strategies(clients: int) -> dict[str, Any]:
    """Flower's, for up to 30 % of the clients."""
    from flwr.serverapp import strategy

    liars = round(0.3 * clients)
    return {
        "FedAvg": strategy.FedAvg(),
        "FedMedian": strategy.FedMedian(),
        "FedTrimmedAvg": strategy.FedTrimmedAvg(beta=0.3),
        "MultiKrum": strategy.MultiKrum(num_malicious_nodes=liars, num_nodes_to_select=clients - liars),
    }


def flower_mean(strategy: Any, vectors: Tensor, sizes: Tensor) -> NDArray[np.float64]:
    """What a strategy of Flower's makes of clients' vectors (K, P) and numbers of samples (K,)."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    logging.getLogger("flwr").setLevel(logging.WARNING)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    replies = []
    for k, (vector, size) in enumerate(zip(vectors, sizes, strict=True)):
        arrays = ArrayRecord({"model": Array(vector.numpy())})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": float(size)})})
        replies.append(Message(content, reply_to=Message(RecordDict(), k + 1, "train")))
    found, _ = strategy.aggregate_train(1, replies)
    mean: NDArray[np.float64] = found["model"].numpy()
    return mean


class Case(NamedTuple):
    """A run: who sums up, and how some clients lie."""

    algorithm: str  # or "Flower"
    defence: str  # or the name of Flower's strategy
    attack: str  # "none" or one of ATTACKS


class Study(Simulation):
    """Runs with an attack and a defence each, which train at once; the same clients lie in all of them."""

    def __init__(self, cases: list[Case], seed: int, share: float, relabelling: str | None, rounds: int):
        """`relabelling` is an attack on labels, which all runs have, or none."""
        self.cases, task = cases, setups.task(SETUP)
        specs = ["fedavg" if case.algorithm == "Flower" else case.algorithm for case in cases]
        built = {spec: algorithms.build(spec) for spec in dict.fromkeys(specs)}
        runs = [Run("/".join(case), built[spec], seed) for case, spec in zip(cases, specs, strict=True)]
        # Whatever it is, an attack says whom not to score, and a defence that updates are held.
        judged = attacked(relabelling or "signflip", share, seed) if share else None
        settings = settings_of(
            SETUP, rounds=rounds, eval_every=rounds, device="cpu", attack=judged, defence="bounds"
        )
        super().__init__(task.model, task.federation, runs, settings)
        attacks = [attacked(ATTACKS.get(case.attack), share, seed) for case in cases]
        self.attacks = [None if spec is None else build_attack(spec) for spec in attacks]
        defences = [DEFENCES.get(case.defence) for case in cases]
        self.defences = [None if spec is None else build_defence(spec) for spec in defences]
        self.strategies = flower_strategies(len(task.federation))
        self.means = {r: torch.zeros_like(x, dtype=torch.float64) for r, x in enumerate(self.x)}
        # By run, the liars' share of the weight before it is limited, round by round
        self.weights: list[list[float]] = [[] for _ in cases]

    def _stepped_lying(
        self, r: int, algorithm: SumAlgorithm, held: RoundUpdates
    ) -> tuple[Tensor, Any, Tensor]:
        case, self.attack, self.defence = self.cases[r], self.attacks[r], self.defences[r]
        (client, report), told, clients = held.cohort(), held.vectors(), len(self.federation)
        if self.attack is not None:
            report, told = self.attack.lied(
                client, report, told, fold(self.runs[r].seed, self.round), clients
            )
            weight, lies = contribute(algorithm, report)[0].sums[0], self.attack.liars(clients)[client]
            self.weights[r].append(float(weight[lies].sum() / weight.sum()))
        if case.algorithm != "Flower":
            return super()._stepped_lying(r, algorithm, held)
        mean = torch.from_numpy(flower_mean(self.strategies[case.defence], told.double(), report.size))
        return self.x[r] - mean.to(self.x.dtype), self.states[r], torch.ones((), dtype=torch.bool)


def attacked(attack: str | None, share: float, seed: int) -> str | None:
    """The spec of an attack by a share of the clients."""
    if attack is None or not share:
        return None
    return attack + (":" if ":" not in attack else ",") + f"share={share:g},draw={seed}"


def cases_of(attack: str, servers: tuple[str, ...]) -> list[Case]:
    """Every algorithm with every defence, and Flower's strategies."""
    found = [Case(spec, defence, attack) for spec in servers for defence in DEFENCES]
    return found + [Case("Flower", name, attack) for name in flower_strategies(20)]


def stacks(share: float, servers: tuple[str, ...]) -> Iterator[tuple[str | None, list[Case]]]:
    """What trains at once: an attack on labels, or none; and the runs."""
    if not share:
        yield None, cases_of("none", servers)
        return
    names = list(ATTACKS) if share == ALL_ATTACKS else list(ATTACKS)[:2]
    relabelling = [name for name in names if ATTACKS[name].startswith("labelflip")]
    yield None, [case for name in names if name not in relabelling for case in cases_of(name, servers)]
    for name in relabelling:
        yield ATTACKS[name], cases_of(name, servers)


def measured(
    share: float, seed: int, rounds: int, servers: tuple[str, ...] = ALGORITHMS
) -> list[dict[str, Any]]:
    """The honest clients' average and worst 30 % of every run with this share of liars."""
    rows = []
    for relabelling, cases in stacks(share, servers):
        study = Study(cases, seed, share, relabelling, rounds)
        study.run()
        for case, line in zip(cases, study.final().lines, strict=True):
            row: dict[str, Any] = {**case._asdict(), "share": share, "seed": seed}
            rows.append(row | {name: line[name] for name in SHOWN})
    return rows


def weights(share: float, seed: int, rounds: int) -> list[dict[str, Any]]:
    """The share of the weight that liars have without a defence, in the first and the last round."""
    cases = [Case(spec, "none", "sign-flip") for spec in ALGORITHMS]
    study = Study(cases, seed, share, None, rounds)
    study.run()
    return [
        {**case._asdict(), "share": share, "seed": seed, "first": found[0], "last": found[-1]}
        for case, found in zip(cases, study.weights, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.1, 0.2, 0.3, 0.4])
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    rows, began = [], time.monotonic()
    for share in o.shares:
        for seed in o.seeds:
            rows += measured(share, seed, o.rounds)
            print(
                f"{share:.0%} of the clients lie, seed {seed}: {time.monotonic() - began:.0f} s", flush=True
            )
    for row in rows:
        if row["seed"] == o.seeds[0]:
            print({name: round(v, 1) if isinstance(v, float) else v for name, v in row.items()})
    if o.json:
        about = {"setup": SETUP, "rounds": o.rounds, "seeds": o.seeds, "shares": o.shares}
        specs = {"attacks": ATTACKS, "defences": DEFENCES, "seconds": time.monotonic() - began}
        weighed = [row for seed in o.seeds for row in weights(ALL_ATTACKS, seed, o.rounds)]
        found = {**about, **specs, "environment": environment("cpu"), "rows": rows, "weights": weighed}
        o.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
