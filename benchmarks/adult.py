"""The Adult census data as two clients: how well the worse-off of them is served, by algorithm.

python benchmarks/adult.py FOLDER [--rounds 100] [--json benchmarks/results/adult.json]

FOLDER holds adult.data and adult.test, as the UCI repository has them: examples/adult.py.
"""

import argparse
import json
import sys
from pathlib import Path

import fairwind as fw
from fairwind.environment import environment

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from examples.adult import task  # noqa: E402

ALGORITHMS = ("fedavg", "afl", "qfedavg", "term", "adafedadam")
SEEDS = (0, 1, 2)


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
            "summary": [{key: row[key] for key in keys} for row in compared.results["summary"]],
            "runs": [
                {"algorithm": r.algorithm, "seed": r.seed, "worst_group": r.worst_group, "groups": r.groups}
                for r in compared
            ],
        }
        o.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
