"""One million clients of ten samples, two rounds of AdaFedAdam on a CPU: time and memory.

python benchmarks/million.py [--clients 1000000] [--json numbers.json]
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import torch

from fairwind import Federation, Task, compare
from fairwind.models import linear
from fairwind.runs.environment import environment

FEATURES, CLASSES, SAMPLES, ROUNDS = 20, 5, 10, 2


def peak() -> float:
    """GiB that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES * o.clients, FEATURES, generator=draw)
    targets = (inputs @ torch.randn(FEATURES, CLASSES, generator=draw)).argmax(1)
    owner = torch.arange(o.clients).repeat_interleave(SAMPLES)
    began = time.perf_counter()
    federation = Federation.from_owners(inputs, targets, owner, names=[str(k) for k in range(o.clients)])
    built = time.perf_counter() - began
    before = peak()
    task = Task(lambda: linear(FEATURES, CLASSES), federation, rounds=ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        compared = compare(task, "adafedadam", device="cpu", eval_every=ROUNDS, out=Path(folder) / "run")
        trained = time.perf_counter() - began
        began = time.perf_counter()
        compared.report()
        reported = time.perf_counter() - began
    found = {
        "clients": o.clients,
        "samples": federation.samples,
        "data_gib": federation.bytes / 2**30,
        "federation_seconds": built,
        "rounds": ROUNDS,
        "seconds": trained,
        "rounds_seconds": compared.results["timing"]["seconds"],
        "report_seconds": reported,
        "peak_gib": peak(),
        "peak_before_training_gib": before,
    }
    print(json.dumps(found, indent=1))
    if o.json:
        o.json.write_text(json.dumps({"environment": environment("cpu"), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
