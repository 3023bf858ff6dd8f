"""A training that may be killed: python flower_killed.py ROUNDS OUT."""

import sys
from pathlib import Path

import torch

from conftest import make_federation
from exchanged import task_of
from fairwind.flower import AlgorithmStrategy, client_app
from flower_grid import InProcessGrid

if __name__ == "__main__":
    task = task_of(make_federation([12, 20, 45, 8, 26], dtype=torch.float32), torch.float32)
    strategy = AlgorithmStrategy("adafedadam", task, eval_every=5, out=Path(sys.argv[2]))
    strategy.start(InProcessGrid(client_app(task), 5), num_rounds=int(sys.argv[1]), timeout=60)
