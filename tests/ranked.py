"""Simulations that one process and several must agree on; as a script, on a rank of torchrun's."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import make_federation
from fairwind import InputError, algorithms, setups
from fairwind.engine import tuning
from fairwind.engine.layout import Sharing
from fairwind.engine.ranks import find, join
from fairwind.engine.simulation import Simulation
from fairwind.setups import Where
from samples import as_tensor
from simulations import SOLVERS, Spoilt, normed_model, simulation

EVERY = list(algorithms.REGISTRY)
CASES: dict[str, tuple[list[str], list[int], dict[str, Any]]] = {
    "every algorithm": (EVERY, [0, 1], {}),
    "some clients": (EVERY, [0, 1], {"participation": 0.5, "solver": SOLVERS["uneven"]}),
    "some samples": (
        ["qfedavg", "qfedavg:q=2", "adafedadam"],
        [0, 1],
        {"probe_samples": 6, "solver": SOLVERS["nesterov"]},
    ),
    "some steps": (["fednova", "adafedadam"], [0, 1], {"solver": SOLVERS["steps"]}),
    "a client left out": (EVERY, [0], {"model": Spoilt}),
    "stopped early on validation samples": (
        ["fedavg", "adafedadam"],
        [0, 1],
        {"eval_every": 1, "patience": 1},
    ),
    "coded": (["adafedadam", "ditto", "fedfv"], [0], {"codec": "int8", "participation": 0.5}),
    "liars and a defence": (
        ["fedavg", "adafedadam", "fedprox", "ditto"],
        [0, 1],
        {"attack": "inflated", "defence": "clipping", "participation": 0.5},
    ),
    "more ranks than rows": (["adafedadam"], [0], {"clients_per_round": 1}),
    "more ranks than rows, without probes": (["fednova"], [0], {"clients_per_round": 1}),
    "more ranks than rows, with more than sums": (["mime", "scaffold"], [0], {"clients_per_round": 1}),
    "more ranks than rows, of updates": (["ditto", "fedfv"], [0], {"clients_per_round": 1}),
    "personal heads, averaged statistics": (
        ["adafedadam", "ditto", "scaffold", "fedfv"],
        [0, 1],
        {"model": normed_model, "sharing": Sharing("3.*", "shared"), "participation": 0.5},
    ),
    "more ranks than rows, personal norms": (
        ["adafedadam"],
        [0],
        {"model": normed_model, "sharing": Sharing(None, "local"), "clients_per_round": 1},
    ),
}


def build(case: str) -> Simulation:
    names, seeds, options = CASES[case]
    federation = make_federation([1, 2, 3, 17, 45, 8, 1, 26])  # some have no sample to test
    if case == "stopped early on validation samples":
        federation = federation.with_validation(0.2)
    if case == "a client left out":
        as_tensor(federation.inputs)[:1] += 1000
    return simulation(federation, names, seeds, **options)


def outcome(case: str) -> dict[str, Any]:
    """What was measured before the first round, and what came of all of them."""
    sim = build(case)
    first = {"loss0": sim.loss0.cpu(), "loss": sim.loss, "score": sim.score}
    sim.run()
    states = [tuple(value.cpu() for value in state) for state in sim.states]
    counts = {"left_out": sim.left_out.tolist(), "stalled": sim.stalled.tolist(), "steps": sim.client_steps}
    lines = sim.history + sim.final().lines
    found = {"first": first, "x": sim.x.cpu(), "states": states, "counts": counts, "history": lines}
    kept = {r: kept.cpu() for r, kept in sim.memories.values.items()}
    left_out = {r: each.cpu() for r, each in sim.left_out_of_updates.items()}
    own = {name: each.cpu() for name, each in sim.own.tensors().items()}
    return found | {"kept": kept, "left out": left_out, "own": own}


def outcomes() -> dict[str, Any]:
    whole = {case: outcome(case) for case in CASES}
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("CPU", "GPU"):  # so that every rank has some to evaluate
            patch.setattr(tuning, kind, getattr(tuning, kind)._replace(evaluated_numbers=1))
        return whole | {"small chunks": outcome("every algorithm")}


def prepared(folder: Path) -> dict[str, Any]:
    """What is said while FEMNIST is prepared from the folder's files, and what becomes of it."""
    said: list[str] = []
    federation = setups.federation(
        "femnist", Where(folder / "in", cache=folder / "cache"), said.append, join()
    )
    return {"said": said, "digest": federation.digest()}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.save(outcomes() | {"prepared": prepared(folder)}, folder / f"{find().rank}.pt")
    with pytest.raises(InputError, match="the loop runs in one process"):
        simulation(make_federation([5, 6]), ["fedavg"], [0], engine="loop")
