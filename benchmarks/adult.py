"""The Adult census data as two clients: how well the worse-off of them is served, by algorithm.

python benchmarks/adult.py FOLDER [--rounds 100] [--json benchmarks/results/adult.json]

FOLDER holds adult.data and adult.test, as the UCI repository has them: examples/adult.py.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fairwind as fw
from fairwind.runs.environment import environment

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from examples.adult import task  # noqa: E402

ALGORITHMS = ("fedavg", "afl", "qfedavg", "term", "adafedadam")
SEEDS = (0, 1, 2)


def in_both_parts(compared: fw.Comparison, adult: fw.Task) -> list[dict[str, Any]]:
    """Each global model's mean loss and accuracy on every client's training and test samples."""
    data, found = adult.federation, []
    assert not isinstance(adult.model, nn.Module)
    module = adult.model()
    assert isinstance(data.inputs, Tensor)
    assert isinstance(data.targets, Tensor)
    for run in compared:
        if not run.state_dict:
            continue
        module.load_state_dict(run.state_dict)
        for k, name in enumerate(data.names):
            middle = int(data.start[k] + data.train[k])
            parts = {
                "train": slice(int(data.start[k]), middle),
                "test": slice(middle, middle + int(data.test[k])),
            }
            for part, here in parts.items():
                with torch.no_grad():
                    outputs = module(data.inputs[here])
                right = (outputs.argmax(1) == data.targets[here]).double().mean()
                loss = cross_entropy(outputs, data.targets[here])
                found.append(
                    {
                        "algorithm": run.algorithm,
                        "seed": run.seed,
                        "client": name,
                        "part": part,
                        "loss": float(loss),
                        "accuracy": 100 * float(right),
                    }
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    present = [name for name in ALGORITHMS if name in fw.algorithms.REGISTRY]
    missing = [name for name in ALGORITHMS if name not in present]
    if missing and o.json:
        parser.error(f"not registered: {', '.join(missing)}; {o.json} is for results of all, leave it out")
    if missing:
        print(f"not registered, and left out: {', '.join(missing)}", file=sys.stderr)
    adult = task(o.folder)
    rounds = o.rounds or adult.rounds
    compared = fw.compare(adult, present, seeds=o.seeds, rounds=rounds, device="cpu")
    print(compared)
    print(compared.groups_to_pandas().groupby(["algorithm", "group"], sort=False).avg.agg(["mean", "std"]))
    parts = in_both_parts(compared, adult)
    print("\nmean over seeds, in training and in test samples:")
    for key in dict.fromkeys((p["algorithm"], p["client"], p["part"]) for p in parts):
        rows = [p for p in parts if (p["algorithm"], p["client"], p["part"]) == key]
        loss, accuracy = (sum(row[what] for row in rows) / len(rows) for what in ("loss", "accuracy"))
        print(f"{key[0]:12s} {key[1]:14s} {key[2]:6s} loss {loss:.4f}, accuracy {accuracy:.1f}")
    if o.json:
        keys = "algorithm", "avg", "worst_group_avg", "group_gap", "groups"
        solver = adult.solver
        found = {
            "environment": environment("cpu"),
            "seeds": list(o.seeds),
            "rounds": rounds,
            "solver": {"lr": solver.lr, "batch_size": solver.batch_size, "epochs": solver.epochs},
            "federation": compared.results["federation"],
            "data": compared.results["data"],
            "seconds": compared.results["timing"]["seconds"],
            "parts": parts,
            "summary": [
                {key: value for key, value in row.items() if key in keys}
                for row in compared.results["summary"]
            ],
            "runs": [
                {"algorithm": r.algorithm, "seed": r.seed, "worst_group": r.worst_group, "groups": r.groups}
                for r in compared
            ],
        }
        o.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
